// SPDX-License-Identifier: Apache-2.0
// Runs a command under mpirun as a user would, and watches over its processes.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <gtest/gtest.h>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "tests/scratch_folder.h"

namespace farspan {

inline std::string mpirun() {
  const char* program = std::getenv("FARSPAN_MPIRUN");
  // Ranks of a test may outnumber the cores, and the tests may run as root.
  return fmt::format("{} --allow-run-as-root --oversubscribe --bind-to none", program == nullptr ? "mpirun" : program);
}

// One launch, in the background until wait() returns.
class Launched {
 public:
  using Clock = std::chrono::steady_clock;

  // `arguments`: of mpirun, the program among them. FARSPAN_TEST_LAUNCH marks the processes.
  explicit Launched(const std::string& arguments, const std::string& launcher = mpirun()) {
    mark_ = fmt::format("FARSPAN_TEST_LAUNCH={}", folder_.path());
    command_ = fmt::format("exec env {} {} {}", mark_, launcher, arguments);
    const std::string redirected =
        fmt::format("{} >{} 2>{} </dev/null", command_, folder_.path("out"), folder_.path("err"));
    pid_ = fork();
    if (pid_ == 0) {
      execl("/bin/sh", "sh", "-c", redirected.c_str(), nullptr);
      _exit(127);
    }
  }
  ~Launched() {
    for (pid_t process : processes()) kill(process, SIGKILL);
    if (!over_) waitpid(pid_, nullptr, 0);
  }
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  pid_t launcher() const { return pid_; }
  const std::string& command() const { return command_; }
  std::string out() const { return folder_.read("out"); }
  std::string err() const { return folder_.read("err"); }

  // The launcher's exit status, as a shell has it (128 + the signal that ended it).
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    over_ = true;
    seconds_ = std::chrono::duration<double>(Clock::now() - start_).count();
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  double seconds() const { return seconds_; }

  // Processes of the launch, the launcher among them, that are still there.
  std::vector<pid_t> processes() const {
    std::vector<pid_t> found;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
      const pid_t pid = std::atoi(entry.path().filename().c_str());
      std::ostringstream environment;
      if (pid > 0) environment << std::ifstream(entry.path() / "environ", std::ios::binary).rdbuf();
      if (environment.str().find(mark_) != std::string::npos) found.push_back(pid);
    }
    return found;
  }
  // Those that run rank `rank`; 0 where none does yet.
  pid_t process_of_rank(int rank) const {
    for (pid_t pid : processes()) {
      std::ostringstream environment;
      environment << std::ifstream(fmt::format("/proc/{}/environ", pid), std::ios::binary).rdbuf();
      if (environment.str().find(fmt::format("OMPI_COMM_WORLD_RANK={}", rank) + '\0') != std::string::npos) return pid;
    }
    return 0;
  }
  // Waits until no process is left; the seconds it took, or `limit`.
  double seconds_until_gone(double limit) const {
    const Clock::time_point start = Clock::now();
    double seconds = 0;
    while (!processes().empty() && seconds < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      seconds = std::chrono::duration<double>(Clock::now() - start).count();
    }
    return seconds;
  }

  // The lines of stderr that the program wrote, not the launcher.
  std::vector<std::string> program_lines() const {
    std::vector<std::string> found;
    std::istringstream lines(err());
    for (std::string line; std::getline(lines, line);)
      if (line.starts_with("farspan: ")) found.push_back(line);
    return found;
  }
  std::string last_line() const {
    const std::vector<std::string> lines = program_lines();
    return lines.empty() ? "" : lines.back();
  }

 private:
  test::ScratchFolder folder_;
  std::string mark_;
  std::string command_;
  Clock::time_point start_ = Clock::now();
  pid_t pid_ = 0;
  bool over_ = false;
  double seconds_ = 0;
};

// Open MPI looks the machine up by name in every process. Where that name is neither in /etc/hosts nor known to the
// name server at once, a launch takes some ten seconds, and tests of what happens within two seconds say nothing.
class PromptLaunches : public ::testing::Environment {
 public:
  void SetUp() override {
    constexpr double kPrompt = 4;  // seconds; a launch of two processes takes a fraction of one
    const char* program = std::getenv("FARSPAN_PROGRAM");
    if (program == nullptr) return;
    Launched probe(fmt::format("-n 2 {} train /no/such/config.yaml", program));
    probe.wait();
    if (probe.seconds() > kPrompt)
      GTEST_SKIP() << "two processes took " << probe.seconds()
                   << " s to start under mpirun; does this machine's own name stand in /etc/hosts?";
  }
};
inline ::testing::Environment* const kPromptLaunches = ::testing::AddGlobalTestEnvironment(new PromptLaunches);

}  // namespace farspan
