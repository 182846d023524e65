// SPDX-License-Identifier: Apache-2.0
// The output folder of a training run: one run at a time, nothing of an earlier run lost, and every place it will write
// to tried before the first step.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"

namespace farspan {

class RunFolder {
 public:
  // Creates and locks `folder`, tries the checkpoint folder, writes config.yaml. For a fresh run (`start_step` 0) an
  // earlier run's checkpoints and metrics are renamed aside (NAME.earlier-N) and the log says so; a resumed run drops
  // the metrics of steps after `start_step`. Throws DataError where something cannot be written, ConfigError when
  // another run is using it.
  RunFolder(const std::string& folder, const Config& config, int64_t start_step);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  std::string metrics() const { return folder_ + "/metrics.jsonl"; }
  const std::string& checkpoints() const { return checkpoints_; }

 private:
  std::string folder_;
  std::string checkpoints_;
  int lock_ = -1;
};

}  // namespace farspan
