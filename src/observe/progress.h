// SPDX-License-Identifier: Apache-2.0
// What a person sees of a running job: on a terminal one line that is redrawn in place, elsewhere one plain line a
// step. Written to standard output by rank 0 only.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace farspan {

struct ProgressPoint {
  int64_t step = 0;
  std::optional<double> loss;  // none: the batch had no target
  double gradient_norm = 0;
  double learning_rate = 0;
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;  // of all ranks together
  int64_t epoch = 0;
  bool skipped = false;
};

// Whether standard output may be a terminal. A launcher gives its processes one of its own making, whatever it does
// with what they write there.
enum class Screen { maybe_terminal, launcher };

class Progress {
 public:
  // Shows steps (first, last]; a plain line every `interval` steps and at the last.
  Progress(int64_t first, int64_t last, int64_t interval, Screen screen);
  ~Progress();

  void show(const ProgressPoint& point);
  // A line of its own that stays (an evaluation, a checkpoint).
  void note(const std::string& text);

 private:
  std::string time_left(int64_t step) const;
  int64_t first_;
  int64_t last_;
  int64_t interval_;
  bool terminal_;
  bool line_open_ = false;
  std::chrono::steady_clock::time_point start_;
};

// "1.50 GiB", "12.0 MiB", "512 B"
std::string bytes_text(int64_t bytes);

}  // namespace farspan
