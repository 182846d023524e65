// SPDX-License-Identifier: Apache-2.0
#include "train/run_folder.h"

#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sys/file.h>
#include <unistd.h>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "config/load.h"
#include "io/atomic_file.h"
#include "train/checkpoint.h"

namespace farspan {
namespace {

namespace fs = std::filesystem;

void create(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw DataError(fmt::format("{}: cannot be created: {}; give a folder that can be written to", folder.string(),
                                error.message()));
}

// `option`: what gave the folder.
int lock(const std::string& path, const fs::path& folder, const char* option) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) throw DataError(fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return descriptor;
  close(descriptor);
  throw ConfigError(
      fmt::format("{} {}: another run is writing there; give another --{}", option, folder.string(), option));
}

// NAME.earlier-N that is not there yet.
fs::path aside_name(const fs::path& path) {
  std::error_code ignored;
  fs::path aside;
  for (int n = 1; aside.empty() || fs::exists(aside, ignored); ++n)
    aside = path.string() + fmt::format(".earlier-{}", n);
  return aside;
}

void move_aside(const fs::path& path) {
  std::error_code error;
  if (!fs::exists(path, error) || (fs::is_directory(path, error) && fs::is_empty(path, error))) return;
  const fs::path aside = aside_name(path);
  fs::rename(path, aside, error);
  if (error) throw DataError(fmt::format("{}: cannot be renamed aside: {}", path.string(), error.message()));
  log_info("{} of an earlier run is now {}", path.string(), aside.string());
}

// The step of a metrics line.
std::optional<int64_t> step_of(const std::string& line) {
  const size_t key = line.find("\"step\":");
  if (key == std::string::npos) return std::nullopt;
  return std::strtoll(line.c_str() + key + 7, nullptr, 10);
}

void drop_later_steps(const std::string& metrics, int64_t last_step) {
  std::ifstream file(metrics);
  if (!file) return;
  std::string kept;
  bool dropped = false;
  for (std::string line; std::getline(file, line);) {
    const std::optional<int64_t> step = step_of(line);
    if (step && *step <= last_step)
      kept += line + "\n";
    else
      dropped = true;
  }
  if (!dropped) return;
  move_aside(metrics);
  write_file_atomically(metrics, kept);
}

// Steps that the run goes back behind: it will write its own, and the newest must be its own too.
void move_later_checkpoints_aside(const fs::path& checkpoints, int64_t last_step) {
  std::error_code ignored;
  std::vector<fs::path> later;
  for (const fs::directory_entry& entry : fs::directory_iterator(checkpoints, ignored)) {
    const std::optional<int64_t> step = checkpoint_step(entry.path().filename().string());
    if (step && *step > last_step) later.push_back(entry.path());
  }
  for (const fs::path& path : later) move_aside(path);
}

}  // namespace

RunPaths::RunPaths(const std::string& output, const Config& config)
    : folder(output),
      metrics(output + "/metrics.jsonl"),
      checkpoints(config.output.save.empty() ? (fs::path(output) / "checkpoints").string() : config.output.save) {}

RunFolder::RunFolder(const RunPaths& paths, const Config& config, int64_t start_step) {
  create(paths.folder);
  lock_ = lock((fs::path(paths.folder) / ".lock").string(), paths.folder, "output");
  if (!config.output.save.empty()) {
    create(paths.checkpoints);
    save_lock_ = lock(paths.checkpoints + ".lock", paths.checkpoints, "save");
  }
  if (start_step == 0) {
    move_aside(paths.metrics);
    move_aside(paths.checkpoints);
    for (const char* name : {"profile.json", "trace.json"}) move_aside(fs::path(paths.folder) / name);
  } else {
    drop_later_steps(paths.metrics, start_step);
    move_later_checkpoints_aside(paths.checkpoints, start_step);
  }
  create(paths.checkpoints);
  const fs::path trial = fs::path(paths.checkpoints) / ".writable";
  write_file_atomically(trial.string(), "");
  fs::remove(trial);
  write_file_atomically((fs::path(paths.folder) / "config.yaml").string(), effective_config_yaml(config));
}

RunFolder::~RunFolder() {
  close(lock_);
  if (save_lock_ >= 0) close(save_lock_);
}

}  // namespace farspan
