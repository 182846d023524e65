// SPDX-License-Identifier: Apache-2.0
// spdlog's adaptor: the sink that keeps lines of several threads whole. What a line says is decided here.
#include "base/log.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace farspan {
namespace {

constexpr int kNoRank = -1;
thread_local int this_rank = kNoRank;
std::atomic<LogLevel> threshold{LogLevel::info};

spdlog::logger& stderr_logger() {
  static spdlog::logger logger = [] {
    spdlog::logger made("farspan", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made.set_pattern("farspan: %v");
    made.set_level(spdlog::level::trace);
    made.flush_on(spdlog::level::trace);
    return made;
  }();
  return logger;
}

std::string_view label_of(LogLevel level) {
  switch (level) {
    case LogLevel::error:
      return "error: ";
    case LogLevel::warning:
      return "warning: ";
    case LogLevel::info:
      return "";
    case LogLevel::debug:
      return "debug: ";
  }
  return "";
}

}  // namespace

void set_log_level(LogLevel level) { threshold = level; }

LogRank::LogRank(int rank) : outer_(this_rank) { this_rank = rank; }
LogRank::~LogRank() { this_rank = outer_; }

std::string one_line(std::string_view message) {
  std::string line(message);
  for (char& c : line) {
    if (c == '\n' || c == '\r' || c == '\t') c = ' ';
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return line;
}

namespace detail {

void write_log(LogLevel level, const std::string& message) {
  if (level > threshold) return;
  const bool other_rank = this_rank > 0;
  if (level == LogLevel::info && other_rank && threshold < LogLevel::debug) return;
  const bool named = other_rank || (level == LogLevel::error && this_rank != kNoRank);
  const std::string speaker = named ? fmt::format("rank {}: ", this_rank) : std::string();
  stderr_logger().log(spdlog::level::info, fmt::format("{}{}{}", label_of(level), speaker, one_line(message)));
}

bool first_time(std::string_view key) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> seen;
  const std::lock_guard<std::mutex> lock(mutex);
  if (seen.contains(key)) return false;
  seen.emplace(key);
  return true;
}

}  // namespace detail
}  // namespace farspan
