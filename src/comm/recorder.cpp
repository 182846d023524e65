// SPDX-License-Identifier: Apache-2.0
#include "comm/recorder.h"

#include <algorithm>

namespace farspan {

std::string_view name_of(CallProgress progress) {
  switch (progress) {
    case CallProgress::posted:
      return "posted";
    case CallProgress::waiting:
      return "waiting";
    case CallProgress::done:
      return "done";
    case CallProgress::failed:
      return "failed";
  }
  throw InternalError(fmt::format("no progress has the number {}", static_cast<int>(progress)));
}

std::string OperationRecord::title() const {
  return fmt::format("{} '{}' of {} bytes, call {} of {}", name_of(operation), label, bytes, sequence, group);
}

std::string OperationRecord::str() const { return fmt::format("{}, {}", title(), name_of(progress)); }

void Recorder::set_position(std::string position) {
  std::lock_guard lock(mutex_);
  position_ = std::move(position);
}

std::string Recorder::position() const {
  std::lock_guard lock(mutex_);
  return position_;
}

int64_t Recorder::record(std::string_view group, int64_t sequence, Operation operation, std::string_view label,
                         int64_t bytes) {
  std::lock_guard lock(mutex_);
  // Assigned field by field: the strings of the overwritten record lend their memory.
  OperationRecord& entry = ring_[static_cast<size_t>(recorded_ % kCapacity)];
  entry.sequence = sequence;
  entry.group.assign(group);
  entry.operation = operation;
  entry.label.assign(label);
  entry.bytes = bytes;
  entry.progress = CallProgress::posted;
  entry.position.assign(position_);
  return recorded_++;
}

void Recorder::set_progress(int64_t ticket, CallProgress progress) {
  std::lock_guard lock(mutex_);
  if (recorded_ - ticket <= kCapacity) ring_[static_cast<size_t>(ticket % kCapacity)].progress = progress;
}

std::vector<OperationRecord> Recorder::latest(int64_t count) const {
  std::lock_guard lock(mutex_);
  std::vector<OperationRecord> records;
  for (int64_t i = recorded_ - std::min({count, recorded_, kCapacity}); i < recorded_; ++i)
    records.push_back(ring_[static_cast<size_t>(i % kCapacity)]);
  return records;
}

std::string Recorder::whereabouts() const {
  const std::vector<OperationRecord> last = latest(1);
  const std::string operation = last.empty() ? "no call yet" : "last call: " + last.front().str();
  const std::string where = position();
  return where.empty() ? operation : "at " + where + "; " + operation;
}

}  // namespace farspan
