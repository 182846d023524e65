// SPDX-License-Identifier: Apache-2.0
// In place of the rest of this folder where there is no CUDA toolkit: nothing here is reached, since there is no device
// of that kind.
#include "base/error.h"
#include "comm/cuda/cuda_mover.h"
#include "comm/cuda/delay.h"
#include "comm/cuda/lone_cuda_communicator.h"

namespace farspan {
namespace {

[[noreturn]] void refuse() { throw InternalError("tensors on a GPU, in a program built without CUDA"); }

}  // namespace

std::unique_ptr<Mover> make_cuda_mover(Device&) { refuse(); }
std::unique_ptr<Communicator> make_lone_cuda_communicator(Dimension, int, Device&) { refuse(); }
void delay_compute(Device&, double) { refuse(); }

}  // namespace farspan
