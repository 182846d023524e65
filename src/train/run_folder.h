// SPDX-License-Identifier: Apache-2.0
// The output folder of a training run: one run at a time, nothing of an earlier run lost, and every place it will write
// to tried before the first step.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"

namespace farspan {

// Where a run writes; every process knows it.
struct RunPaths {
  RunPaths(const std::string& output, const Config& config);
  std::string folder;
  std::string metrics;
  std::string checkpoints;
};

class RunFolder {
 public:
  // Creates and locks the folder, tries the checkpoint folder, writes config.yaml. For a fresh run (`start_step` 0) an
  // earlier run's checkpoints, metrics, profile and trace are renamed aside (NAME.earlier-N) and the log says so; so
  // are, for a resumed run, checkpoints of steps after `start_step`, and metrics that tell of such steps. Throws
  // DataError where something cannot be written, ConfigError when another run is using it.
  RunFolder(const RunPaths& paths, const Config& config, int64_t start_step);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

 private:
  int lock_ = -1;
  int save_lock_ = -1;  // of a checkpoint folder elsewhere
};

}  // namespace farspan
