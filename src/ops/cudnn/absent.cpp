// SPDX-License-Identifier: Apache-2.0
// In place of the rest of this folder where cuDNN or its C++ frontend was not found.
#include "base/error.h"
#include "ops/cudnn/attention_cudnn.h"

namespace farspan::cuda {
namespace {

constexpr const char* kAbsent = "this program is built without cuDNN";

}  // namespace

std::string cudnn_forward_declines(Device&, const AttentionForward&) { return kAbsent; }
std::string cudnn_backward_declines(Device&, const AttentionBackward&) { return kAbsent; }
bool cudnn_takes_gradients_of(const Device&, const AttentionBlock&) { return false; }
void cudnn_forward(Device&, const AttentionForward&) { throw InternalError(kAbsent); }
void cudnn_backward(Device&, const AttentionBackward&) { throw InternalError(kAbsent); }

}  // namespace farspan::cuda
