// SPDX-License-Identifier: Apache-2.0
#include "train/stop_signal.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <vector>

namespace farspan {
namespace {

std::atomic<int> received_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

extern "C" void note_signal(int number) {
  received_signal = number;
  std::signal(number, SIG_DFL);
}

}  // namespace

StopSignal::StopSignal() {
  received_signal = 0;
  std::signal(SIGINT, note_signal);
  std::signal(SIGTERM, note_signal);
}

StopSignal::~StopSignal() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

int StopSignal::received() { return received_signal; }

int StopSignal::received_by_any(Communicator& world) {
  int64_t mine = received();
  std::vector<int64_t> all(static_cast<size_t>(world.size()));
  world.all_gather(Tensor(&mine, DType::i64, {1}), Tensor(all.data(), DType::i64, {std::ssize(all)}), "stop signal")
      .wait();
  return static_cast<int>(*std::max_element(all.begin(), all.end()));
}

}  // namespace farspan
