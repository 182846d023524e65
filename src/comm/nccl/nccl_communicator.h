// SPDX-License-Identifier: Apache-2.0
// Ranks that each have a GPU to themselves: NCCL moves the tensors, and the group's ordinary communicator among the
// ranks' threads or processes carries what NCCL cannot tell.
//
// Every call is announced there (CallCommunicator::announce), so ranks that disagree, do not come or have failed are
// found and named as in every other backend, and every wait ends when the job does. What only NCCL or the GPUs can
// notice, and a call that all have made and that does not end, is found by a watchdog, which ends the job and takes the
// kernels that hang off the GPU.
#pragma once

#include <memory>
#include <string>

#include "comm/call_communicator.h"
#include "comm/world.h"
#include "device/device.h"

namespace farspan {

// Why NCCL cannot be used by this program on this machine, in one clause; empty where it can.
std::string nccl_absence();

// `host`: the same ranks' group for memory of the CPU. `timeout_seconds`: how long a call may wait for other GPUs once
// this one's has come to it. All ranks of the group make theirs at once. Throws ConfigError where NCCL is absent or two
// of the ranks have the same GPU, CommunicationError where NCCL fails. `world` and `device` must outlive it.
//
// NCCL's multicast over NVLink (NVLS) is off unless NCCL_NVLS_ENABLE is set: see docs/decisions.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<CallCommunicator> host, World& world,
                                                     Device& device, double timeout_seconds);

}  // namespace farspan
