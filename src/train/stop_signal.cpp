// SPDX-License-Identifier: Apache-2.0
#include "train/stop_signal.h"

#include <atomic>
#include <csignal>

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

}  // namespace farspan
