// SPDX-License-Identifier: Apache-2.0
// Errors. Every failure a user can meet is one line: what was wrong, the value found, what would work.
// The kind decides the exit status of the program (docs: README "Exit status").
#pragma once

#include <fmt/format.h>
#include <stdexcept>
#include <string>

namespace farspan {

// The values are the program's exit statuses.
enum class ErrorKind : int {
  internal = 1,       // a bug in Farspan
  config = 2,         // bad configuration or command line
  data = 3,           // bad data or checkpoint
  memory = 4,         // the plan does not fit
  communication = 5,  // a rank failed or a deadline passed
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, std::string message) : std::runtime_error(std::move(message)), kind_(kind) {}
  ErrorKind kind() const { return kind_; }
  int exit_status() const { return static_cast<int>(kind_); }

 private:
  ErrorKind kind_;
};

// Bad configuration or command line: name the option, the value found, a value that works.
class ConfigError : public Error {
 public:
  explicit ConfigError(std::string message) : Error(ErrorKind::config, std::move(message)) {}
};

// Bad data or checkpoint: name the file, the place in it, and what was expected there.
class DataError : public Error {
 public:
  explicit DataError(std::string message) : Error(ErrorKind::data, std::move(message)) {}
};

// The planned memory exceeds what there is.
class MemoryError : public Error {
 public:
  explicit MemoryError(std::string message) : Error(ErrorKind::memory, std::move(message)) {}
};

// A collective that failed, timed out, or disagreed between ranks.
class CommunicationError : public Error {
 public:
  explicit CommunicationError(std::string message) : Error(ErrorKind::communication, std::move(message)) {}
};

class InternalError : public Error {
 public:
  explicit InternalError(std::string message) : Error(ErrorKind::internal, std::move(message)) {}
};

namespace detail {
[[noreturn]] void throw_check_failure(const char* expression, const char* file, int line, const std::string& message);
}  // namespace detail

}  // namespace farspan

// FARSPAN_CHECK(condition, "rms_norm: x has {} columns, weight has {}", a, b): an invariant of the code itself. Throws
// InternalError with the statement and its place. User mistakes throw ConfigError or DataError instead.
#define FARSPAN_CHECK(condition, ...)                                                                     \
  do {                                                                                                    \
    if (!(condition)) [[unlikely]]                                                                        \
      ::farspan::detail::throw_check_failure(#condition, __FILE__, __LINE__, ::fmt::format(__VA_ARGS__)); \
  } while (false)
