// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/attention.h"

#include <array>

#include "ops/cuda/attention_kernels.h"
#include "ops/cuda/attention_scratch.h"
#include "ops/cudnn/attention_cudnn.h"

namespace farspan::cuda {
namespace {

std::string kernels_decline_forward(Device&, const AttentionForward& call) {
  return attention_kernel_declines(call.block);
}

std::string kernels_decline_backward(Device&, const AttentionBackward& call) {
  return attention_kernel_declines(call.block);
}

void kernels_forward(Device& device, const AttentionForward& call) {
  attention_kernel_forward(device, call.block, call.use, call.out, call.lse);
}

// The kernels read delta; where the caller has none it is made here, behind the kernels' own scratch.
void kernels_backward(Device& device, const AttentionBackward& call) {
  Tensor delta = call.delta;
  if (!delta.defined()) {
    char* const scratch = static_cast<char*>(device.scratch());
    delta =
        Tensor(scratch + attention_kernel_backward_scratch(AttentionSizes(call.block)), DType::f32, call.lse.shape());
    cuda::attention_delta(device, call.out, call.d_out, delta);
  }
  attention_kernel_backward(device, call.block, call.d_out, call.lse, delta, call.d_query_use, call.d_key_value_use,
                            call.d_query, call.d_key, call.d_value);
}

constexpr std::array kImplementations = {
    AttentionImplementation{"cudnn", cudnn_forward_declines, cudnn_backward_declines, cudnn_forward, cudnn_backward},
    AttentionImplementation{"farspan", kernels_decline_forward, kernels_decline_backward, kernels_forward,
                            kernels_backward},
};

}  // namespace

std::span<const AttentionImplementation> attention_implementation_list() { return kImplementations; }

bool attention_reads_delta(const Device& device, const AttentionBlock& block) {
  return !cudnn_takes_gradients_of(device, block);
}

}  // namespace farspan::cuda
