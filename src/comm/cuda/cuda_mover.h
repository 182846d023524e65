// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "comm/threads/mover.h"
#include "device/device.h"

namespace farspan {

// For tensors in the memory of `device`, a GPU, which must outlive the mover; used by the device's thread. Every mover
// of a group must be one of these.
//
// A rank that receives copies from its peers' memory, or sums over it, on a stream of the mover's own: behind the point
// of each peer's compute stream at which its memory was ready. Every stage is an event that the peers' streams wait
// for, and Work::wait makes the compute stream wait: for the rank's own stream, since its results are there, and for
// those of its readers, since it may now overwrite what they read.
std::unique_ptr<Mover> make_cuda_mover(Device& device);

}  // namespace farspan
