// SPDX-License-Identifier: Apache-2.0
// The failure that ends a job. Failures have causes and consequences: when rank 1 throws, rank 0's wait throws too,
// perhaps earlier by a moment; the failure to report is rank 1's. Errors that only say "another rank stopped" are
// therefore of type PeerFailure, and a failure that is not one takes the place of one that is.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "base/error.h"

namespace farspan {

// Thrown by a wait that cannot complete because another rank stopped.
class PeerFailure final : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// Thrown by a wait that cannot complete because ranks have not come, whose whereabouts the message does not tell.
class WaitFailure final : public CommunicationError {
 public:
  WaitFailure(std::string message, std::vector<int> missing)
      : CommunicationError(std::move(message)), missing_(std::move(missing)) {}
  const std::vector<int>& missing() const { return missing_; }

 private:
  std::vector<int> missing_;
};

struct RankFailure {
  int rank = 0;
  ErrorKind kind = ErrorKind::internal;
  std::string message;
  bool consequence = false;  // of another rank's failure
  std::vector<int> missing;  // ranks that the failed one waited for
  bool outside = false;      // before or after the ranks ran: what was wrong may be the same in every process
};

// What an exception that left rank `rank` means. One that is no farspan::Error is an internal error with its text.
RankFailure failure_of(int rank, std::exception_ptr exception);

// Throws the farspan::Error of the kind with exactly this message.
[[noreturn]] void throw_error(ErrorKind kind, const std::string& message);

}  // namespace farspan
