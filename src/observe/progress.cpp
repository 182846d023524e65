// SPDX-License-Identifier: Apache-2.0
#include "observe/progress.h"

#include <array>
#include <cstdio>
#include <fmt/format.h>
#include <unistd.h>

namespace farspan {
namespace {

constexpr const char* kClearLine = "\r\x1b[K";

std::string duration_text(double seconds) {
  const int64_t total = static_cast<int64_t>(seconds + 0.5);
  if (total >= 3600) return fmt::format("{}h{:02}m", total / 3600, total / 60 % 60);
  return fmt::format("{}m{:02}s", total / 60, total % 60);
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

Progress::Progress(int64_t first, int64_t last, int64_t interval, Screen screen)
    : first_(first),
      last_(last),
      interval_(interval),
      terminal_(screen == Screen::maybe_terminal && isatty(STDOUT_FILENO) == 1),
      start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  if (line_open_) std::fputs("\n", stdout);
  std::fflush(stdout);
}

std::string Progress::time_left(int64_t step) const {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return duration_text(elapsed / static_cast<double>(step - first_) * static_cast<double>(last_ - step));
}

void Progress::show(const ProgressPoint& point) {
  const bool milestone = point.step % interval_ == 0 || point.step == last_;
  if (!terminal_ && !milestone) return;
  const std::string line =
      fmt::format("step {}/{}  loss {}  grad norm {:.3f}  lr {:.2e}  {:.0f} tokens/s  memory {}  epoch {}  left {}{}",
                  point.step, last_, point.loss ? fmt::format("{:.4f}", *point.loss) : "none", point.gradient_norm,
                  point.learning_rate, point.tokens_per_second, bytes_text(point.memory_bytes), point.epoch,
                  time_left(point.step), point.skipped ? "  (update skipped)" : "");
  if (terminal_) {
    fmt::print("{}{}", kClearLine, line);
    line_open_ = true;
  } else {
    fmt::print("{}\n", line);
  }
  std::fflush(stdout);
}

void Progress::note(const std::string& text) {
  if (terminal_ && line_open_) std::fputs("\n", stdout);
  line_open_ = false;
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

}  // namespace farspan
