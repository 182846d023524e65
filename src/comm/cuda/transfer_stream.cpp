// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/transfer_stream.h"

#include "device/cuda/cuda.h"

namespace farspan::cuda {

TransferStream::TransferStream() {
  int lowest = 0, highest = 0;
  FARSPAN_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  FARSPAN_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
}

TransferStream::~TransferStream() {
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

}  // namespace farspan::cuda
