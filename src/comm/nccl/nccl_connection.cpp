// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_connection.h"

#include <exception>
#include <thread>
#include <utility>

#include "comm/deadline.h"
#include "device/cuda/cuda.h"

namespace farspan {
namespace {

// Between two looks at what NCCL is doing. A launch takes some 50 us where connections are open: that long other
// threads may run, then this one sleeps.
class Pause {
 public:
  void operator()() const {
    if (NcclConnection::Clock::now() - start_ < std::chrono::microseconds(200))
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  NcclConnection::Clock::time_point start_ = NcclConnection::Clock::now();
};

// For the other ranks to leave a group too, before the connection is cut.
constexpr double kLeaveSeconds = 10;

bool good(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

}  // namespace

NcclConnection::NcclConnection(Device& device, const ncclUniqueId& id, int rank, int size, std::string name,
                               std::function<void()> throw_if_stopped, double timeout_seconds)
    : name_(std::move(name)),
      throw_if_stopped_(std::move(throw_if_stopped)),
      timeout_seconds_(timeout_seconds),
      device_(device),
      compute_(cuda::compute_stream(device)) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t begun = nccl().comm_init_rank_config(&comm_, size, id, rank, &config);
  if (!good(begun)) throw_failure(begun);
  const Clock::time_point deadline = deadline_after(timeout_seconds);
  try {
    for (const Pause pause; state() == ncclInProgress; pause()) {
      throw_if_stopped_();
      if (Clock::now() >= deadline)
        throw CommunicationError(fmt::format("{}: NCCL has not connected the GPUs after {} s", name_, timeout_seconds));
    }
    if (const ncclResult_t result = state(); result != ncclSuccess) throw_failure(result);
  } catch (...) {
    abort();
    throw;
  }
}

NcclConnection::~NcclConnection() {
  try {
    if (std::uncaught_exceptions() == 0) leave();
  } catch (const Error&) {
    // The job's failure, or NCCL's, is reported by whoever waits for a call.
  }
  abort();
}

void NcclConnection::leave() {
  Lock lock(mutex_);
  throw_if_aborted();
  await_launch(lock);
  for (void* handle : registered_) nccl().comm_deregister(comm_, handle);
  if (const ncclResult_t result = nccl().comm_finalize(comm_); !good(result)) throw_failure(result);
  const Clock::time_point deadline = deadline_after(kLeaveSeconds);
  for (const Pause pause; state() == ncclInProgress; pause()) {
    throw_if_stopped_();
    if (Clock::now() >= deadline) throw CommunicationError(name_ + ": not all ranks leave");
  }
  nccl().comm_destroy(std::exchange(comm_, nullptr));
}

int64_t NcclConnection::launch(std::string title, const std::function<void(ncclComm_t, cudaStream_t)>& calls) {
  Lock lock(mutex_);
  throw_if_aborted();
  await_launch(lock);
  forget_finished();
  Launched launched;
  launched.number = launched_++;
  launched.title = std::move(title);
  launched.ready = events_.take();
  launched.done = events_.take();
  launched.ready.record(compute_);
  launched.ready.block(stream_);
  launched.timing =
      device_.begin_observed({.kind = ActivityKind::communication, .label = launched.title, .stream = stream_.get()});
  nccl().group_start();
  try {
    calls(comm_, stream_);
  } catch (...) {
    nccl().group_end();
    throw;
  }
  const ncclResult_t result = nccl().group_end();
  if (!good(result)) throw_failure(result);
  under_way_.push_back(std::move(launched));
  return under_way_.back().number;
}

void NcclConnection::resume(int64_t number) {
  Lock lock(mutex_);
  throw_if_aborted();
  if (!under_way_.empty() && under_way_.back().number == number) await_launch(lock);
  for (const Launched& each : under_way_)
    if (each.number == number)
      device_.run_observed({.kind = ActivityKind::waiting, .label = each.title}, [&] { each.done.block(compute_); });
}

// Only the latest launch can still be NCCL's to do. Its end is recorded before anything else is queued behind it.
void NcclConnection::await_launch(Lock& lock) {
  if (under_way_.empty() || under_way_.back().queued) return;
  const Clock::time_point deadline = deadline_after(timeout_seconds_);
  for (const Pause pause; state() == ncclInProgress; throw_if_aborted()) {
    if (Clock::now() >= deadline)
      throw CommunicationError(
          fmt::format("{}: NCCL has not launched it after {} s", under_way_.back().title, timeout_seconds_));
    lock.unlock();
    throw_if_stopped_();
    pause();
    lock.lock();
  }
  if (const ncclResult_t result = state(); result != ncclSuccess) throw_failure(result);
  Launched& latest = under_way_.back();
  latest.done.record(stream_);
  device_.end_observed(std::exchange(latest.timing, std::nullopt));
  latest.queued = true;
}

void NcclConnection::forget_finished() {
  while (!under_way_.empty() && under_way_.front().queued && under_way_.front().done.reached()) {
    events_.give_back(std::move(under_way_.front().ready));
    events_.give_back(std::move(under_way_.front().done));
    under_way_.pop_front();
  }
}

void NcclConnection::register_memory(void* memory, int64_t bytes) {
  Lock lock(mutex_);
  throw_if_aborted();
  await_launch(lock);
  void* handle = nullptr;
  const ncclResult_t result = nccl().comm_register(comm_, memory, static_cast<size_t>(bytes), &handle);
  if (!good(result)) throw_failure(result);
  if (handle != nullptr) registered_.push_back(handle);
}

std::optional<std::string> NcclConnection::trouble() {
  const Lock lock(mutex_);
  if (aborted_) return std::nullopt;
  if (const ncclResult_t result = state(); !good(result)) return failure_text(result);
  try {
    forget_finished();
    if (under_way_.empty() || !under_way_.front().ready.reached()) return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;  // the GPU has failed, which the rank's own thread will find and report
  }
  Launched& oldest = under_way_.front();
  if (!oldest.ready_since) oldest.ready_since = Clock::now();
  if (std::chrono::duration<double>(Clock::now() - *oldest.ready_since).count() < timeout_seconds_) return std::nullopt;
  return fmt::format("{}: this rank's GPU has waited {} s for those of the other ranks", oldest.title,
                     timeout_seconds_);
}

void NcclConnection::abort() noexcept {
  const Lock lock(mutex_);
  if (std::exchange(aborted_, true)) return;
  if (comm_ != nullptr) nccl().comm_abort(std::exchange(comm_, nullptr));
}

void NcclConnection::abandon() noexcept {
  abort();
  cudaStreamSynchronize(stream_);
}

ncclResult_t NcclConnection::state() const {
  ncclResult_t result = ncclSuccess;
  nccl().comm_get_async_error(comm_, &result);
  return result;
}

void NcclConnection::throw_if_aborted() const {
  if (!aborted_) return;
  throw_if_stopped_();
  throw CommunicationError(name_ + ": an earlier call of this rank has failed");
}

std::string NcclConnection::failure_text(ncclResult_t result) const {
  const char* more = nccl().get_last_error(comm_);
  return fmt::format("{}: NCCL: {}{}{}", name_, nccl().get_error_string(result),
                     more == nullptr || *more == '\0' ? "" : ": ", more == nullptr ? "" : more);
}

void NcclConnection::throw_failure(ncclResult_t result) const { throw CommunicationError(failure_text(result)); }

}  // namespace farspan
