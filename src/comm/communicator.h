// SPDX-License-Identifier: Apache-2.0
// Communicator: one rank's end of one group of ranks. Collectives are started in the same order by every rank of the
// group and completed by Work::wait. The memory passed in must stay alive and untouched until wait returns.
//
// On a GPU both are points in the rank's compute stream: what was queued before the start is done before the memory is
// read or written, and what is queued after the wait finds the result and may overwrite the source. The thread that
// waits meets the other ranks' threads, but not the GPU.
//
// Every call has a sequence number in its group, a deadline, and an entry in the rank's recorder. Ranks that disagree
// on the operation, its size or its order get a CommunicationError that names both sides; a rank that never comes is
// named when the deadline passes; when a rank fails, every wait in the job ends within moments.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace farspan {

// Which axis of the rank grid a group belongs to; bytes are counted by it.
enum class Dimension { tp, cp, dp, pp, dp_cp, world };
inline constexpr int kDimensions = 6;
std::string_view name_of(Dimension dimension);

// "cp group [0, 2]"; world ranks.
std::string group_name(Dimension dimension, const std::vector<int>& ranks);

struct Traffic {
  int64_t bytes_sent = 0;      // by this rank, to other ranks
  int64_t bytes_received = 0;  // from other ranks
  int64_t calls = 0;
  // What the rank's computing had to wait for: time spent inside Work::wait and barrier; on a GPU, time for which its
  // compute stream was held up by them.
  double exposed_seconds = 0;
  bool operator==(const Traffic&) const = default;
};

// One message of an exchange: `peer` is a rank within the group.
struct Message {
  int peer = 0;
  Tensor data;  // contiguous
};

// Completion of a started operation. wait() may be called once or more; destroying a Work that was not waited for is a
// bug that is reported, except while an exception unwinds.
class Work {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;
  };
  Work() = default;  // already complete
  explicit Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
  Work(Work&&) noexcept = default;
  Work& operator=(Work&&) noexcept = default;
  void wait() {
    if (state_) state_->wait();
    state_.reset();
  }

 private:
  std::unique_ptr<State> state_;
};

// Sees a rank's calls when they have been waited for, on the rank's thread.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  // On std::chrono::steady_clock: when the call was started, when the rank came to wait for it, when it was done.
  virtual void on_call(std::string_view label, int64_t bytes, double started, double waited_from, double done) = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  // At most one; null removes it. Only calls whose wait lasts until the data is there tell anything: those on host
  // memory.
  void observe(CallObserver* observer) { observer_ = observer; }

  int rank() const { return rank_; }  // within the group
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  // world ranks, in group order
  Dimension dimension() const { return dimension_; }

  // `label` says what is moved ("layer 3 key/value hop 2"); it appears in error messages and the recorder.

  // data = sum over ranks, in rank order, in the tensor's own type (f32 or f64); every rank gets the same bits. (NCCL
  // sums in an order of its own, the same in every run of the same layout.)
  // Sends and receives 2 * bytes * (size - 1) / size.
  virtual Work all_reduce(Tensor data, std::string_view label) = 0;
  // whole = concatenation of every rank's part in rank order; whole has size() times part's bytes.
  // Each rank receives bytes(part) * (size - 1).
  virtual Work all_gather(const Tensor& part, Tensor whole, std::string_view label) = 0;
  // part = this rank's piece of the sum over ranks (in rank order; f32 or f64) of `whole`, cut in size() equal pieces.
  virtual Work reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) = 0;
  // Piece r of `send` goes to rank r; piece r of `receive` comes from rank r; equal pieces.
  virtual Work all_to_all(const Tensor& send, Tensor receive, std::string_view label) = 0;
  // Sends and receives posted together: no order between them, so no ring can lock. Message i from a to b meets the
  // i-th receive of b from a in this call.
  virtual Work exchange(std::span<const Message> sends, std::span<const Message> receives, std::string_view label) = 0;
  // The ranks' threads meet; what is queued on a GPU goes on.
  virtual void barrier(std::string_view label) = 0;

  // Memory from which most tensors of later calls will come: NCCL can then reach it without copies of its own. It must
  // outlive the communicator. All ranks of the group call this or none does.
  virtual void register_memory(void* /*memory*/, int64_t /*bytes*/) {}

  // On a GPU this waits until the compute stream has passed the last Work::wait: for the end of a step.
  const Traffic& traffic() {
    update_traffic();
    return traffic_;
  }
  void reset_traffic() {
    update_traffic();
    traffic_ = {};
  }

  // Counts calls that are not made, because it is known what they would move: of a dry run.
  void add_traffic(const Traffic& known) {
    traffic_.bytes_sent += known.bytes_sent;
    traffic_.bytes_received += known.bytes_received;
    traffic_.calls += known.calls;
  }

 protected:
  Communicator(Dimension dimension, int rank, std::vector<int> ranks)
      : dimension_(dimension), rank_(rank), ranks_(std::move(ranks)) {}
  // Adds to traffic_ what is only known now.
  virtual void update_traffic() {}
  CallObserver* observer() const { return observer_; }
  Traffic traffic_;

 private:
  CallObserver* observer_ = nullptr;
  Dimension dimension_;
  int rank_;
  std::vector<int> ranks_;
};

}  // namespace farspan
