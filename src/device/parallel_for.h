// SPDX-License-Identifier: Apache-2.0
// Splits a loop over a rank's CPU threads. Uses the same OpenMP threads as oneDNN, so the two never compete for cores.
#pragma once

#include <cstdint>
#include <functional>

#include "device/device.h"

namespace farspan {

// Calls body(begin, end) on disjoint ranges that cover [0, n). Ranges depend on n, grain and device.threads() only, and
// at most one is given to a thread unless `grain` says otherwise: a range holds at least `grain` items. An exception
// thrown by a body is rethrown here once all threads have finished.
void parallel_for(const Device& device, int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

// Calls body(index, thread) for every index in [0, n), handed out one at a time in ascending order to whichever of
// `threads` threads is free. For items of uneven cost whose results do not depend on which thread computes them;
// `thread` is in [0, threads) and picks per-thread scratch.
void parallel_tasks(int threads, int64_t n, const std::function<void(int64_t, int)>& body);

// How many of the device's threads are worth meeting for so many floating-point operations: at least one.
int worthwhile_threads(const Device& device, double flops);

}  // namespace farspan
