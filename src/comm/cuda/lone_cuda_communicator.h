// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "device/device.h"

namespace farspan {

// A group of one rank, whose collectives are copies within the memory of its GPU, in the order of its compute stream.
std::unique_ptr<Communicator> make_lone_cuda_communicator(Dimension dimension, int world_rank, Device& device);

}  // namespace farspan
