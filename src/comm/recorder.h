// SPDX-License-Identifier: Apache-2.0
// Recorder: the last operations of one rank, kept so that a hang or a failure can be told from outside: what the rank
// called, in which group, how far it came, and where in the step it was.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective_rules.h"

namespace farspan {

enum class CallProgress { posted, waiting, done, failed };
std::string_view name_of(CallProgress progress);

struct OperationRecord {
  int64_t sequence = 0;  // in its group, from 0
  std::string group;     // "cp group [0, 2]"
  Operation operation = Operation::barrier;
  std::string label;
  int64_t bytes = 0;
  CallProgress progress = CallProgress::posted;
  std::string position;  // of the rank when it posted; may be empty

  // "all_gather 'layer 3 key/value' of 1024 bytes, call 7 of cp group [0, 2]"
  std::string title() const;
  // The same with ", waiting".
  std::string str() const;
};

// Written by its own rank, read by any: every function may be called from any thread.
class Recorder {
 public:
  static constexpr int64_t kCapacity = 64;

  void set_position(std::string position);
  std::string position() const;

  // Returns a ticket for set_progress. The oldest record is overwritten when kCapacity are held.
  int64_t record(std::string_view group, int64_t sequence, Operation operation, std::string_view label, int64_t bytes);
  void set_progress(int64_t ticket, CallProgress progress);  // nothing when the record has been overwritten

  // Up to `count` latest records, oldest first.
  std::vector<OperationRecord> latest(int64_t count = kCapacity) const;

  // Where the rank is, in one clause: its position and its last operation.
  std::string whereabouts() const;

 private:
  mutable std::mutex mutex_;
  std::string position_;
  int64_t recorded_ = 0;  // in all; the ticket of the next one
  std::array<OperationRecord, kCapacity> ring_;
};

}  // namespace farspan
