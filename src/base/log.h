// SPDX-License-Identifier: Apache-2.0
// Log lines on stderr. Ranks are threads that run the same program, so who may speak is part of the call:
//
//   log_info      the job's progress: said by rank 0 (or outside any rank) only; other ranks' lines appear at level
//   debug log_warning   any rank; ranks above 0 say their number warn_once     once in the whole process for a key,
//   whichever rank comes first log_error     any rank, with its number
//
// One call is one line, whole even when several ranks write at once. Standard output is left to the commands' results.
#pragma once

#include <fmt/format.h>
#include <string>
#include <string_view>
#include <utility>

namespace farspan {

enum class LogLevel { error, warning, info, debug };

// Lines less important than this are dropped. The default is info.
void set_log_level(LogLevel level);

// While it lives, lines of this thread come from `rank`. Nests.
class LogRank {
 public:
  explicit LogRank(int rank);
  ~LogRank();
  LogRank(const LogRank&) = delete;
  LogRank& operator=(const LogRank&) = delete;

 private:
  int outer_;
};

// The message on one line: line breaks become spaces, other control characters '?'.
std::string one_line(std::string_view message);

namespace detail {
void write_log(LogLevel level, const std::string& message);
bool first_time(std::string_view key);
}  // namespace detail

template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  detail::write_log(LogLevel::error, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  detail::write_log(LogLevel::warning, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  detail::write_log(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  detail::write_log(LogLevel::debug, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void warn_once(std::string_view key, fmt::format_string<Args...> format, Args&&... args) {
  if (detail::first_time(key)) log_warning(format, std::forward<Args>(args)...);
}

}  // namespace farspan
