// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace farspan {

// Between two looks at something that others must do first: lets them run at once while they are likely to be quick,
// then sleeps for longer and longer. Where processes outnumber cores a peer only needs a core to get on.
class Backoff {
 public:
  void reset() { looks_ = 0; }
  void pause() {
    constexpr int kYields = 50;
    constexpr int kLongestSleepMicroseconds = 200;
    if (++looks_ <= kYields) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::min(10 * (looks_ - kYields), kLongestSleepMicroseconds)));
  }

 private:
  int looks_ = 0;
};

}  // namespace farspan
