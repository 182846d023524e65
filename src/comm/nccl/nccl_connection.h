// SPDX-License-Identifier: Apache-2.0
// NcclConnection: one rank's ncclComm_t and what is under way on it. NCCL's calls do not block here: a call that has to
// open connections first is launched by a thread of NCCL's own, and until then nothing else can be asked of it.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <nccl.h>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/cuda/event_pool.h"
#include "comm/cuda/transfer_stream.h"
#include "comm/nccl/nccl_library.h"
#include "device/device.h"

namespace farspan {

class NcclConnection {
 public:
  using Clock = std::chrono::steady_clock;

  // `stopped` throws when the job has failed; it is asked while this waits for NCCL. `name`: of the group, for
  // messages. All ranks of the group make theirs at once. Throws CommunicationError when NCCL fails or takes longer
  // than `timeout_seconds`.
  NcclConnection(Device& device, const ncclUniqueId& id, int rank, int size, std::string name,
                 std::function<void()> throw_if_stopped, double timeout_seconds);
  // Together with the other ranks, unless aborted.
  ~NcclConnection();
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;

  // Queues NCCL calls as one group on the connection's stream, behind what the compute stream has been given so far.
  // `title` says what they are. Returns their number.
  int64_t launch(std::string title, const std::function<void(ncclComm_t, cudaStream_t)>& calls);
  // The compute stream waits for them; the thread only until they are launched, which can need the other ranks.
  void resume(int64_t number);

  void register_memory(void* memory, int64_t bytes);

  // What has gone wrong by now, if anything: NCCL reports a failure, or a call has waited for the other GPUs for longer
  // than the deadline. Any thread.
  std::optional<std::string> trouble();
  // Takes what is under way off the GPU and ends the connection. Any thread; nothing else is done on it later.
  void abort() noexcept;
  // The same, and returns when the memory of all calls is the caller's again.
  void abandon() noexcept;

 private:
  struct Launched {
    int64_t number = 0;
    std::string title;
    cuda::Event ready;  // of the compute stream: this GPU has come to the call
    cuda::Event done;
    bool queued = false;  // `done` is recorded
    std::optional<Clock::time_point> ready_since;
    std::optional<Device::Timing> timing;
  };
  using Lock = std::unique_lock<std::mutex>;

  void await_launch(Lock& lock);
  ncclResult_t state() const;
  void throw_if_aborted() const;
  [[noreturn]] void throw_failure(ncclResult_t result) const;
  std::string failure_text(ncclResult_t result) const;
  void forget_finished();
  void leave();

  const std::string name_;
  const std::function<void()> throw_if_stopped_;
  const double timeout_seconds_;
  Device& device_;
  cudaStream_t compute_;
  cuda::TransferStream stream_;
  cuda::EventPool events_;

  std::mutex mutex_;  // of what follows
  ncclComm_t comm_ = nullptr;
  bool aborted_ = false;
  int64_t launched_ = 0;  // in all
  std::deque<Launched> under_way_;
  std::vector<void*> registered_;
};

}  // namespace farspan
