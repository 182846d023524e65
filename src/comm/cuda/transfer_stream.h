// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

namespace farspan::cuda {

// The stream on which one rank moves the data of one group. Groups have streams of their own, since ranks need not
// start the calls of different groups in the same order, and a stream finishes what it was given in order. Its kernels
// go before those of compute streams: they are short, and others wait for them.
class TransferStream {
 public:
  TransferStream();
  ~TransferStream();  // waits for what is queued
  TransferStream(const TransferStream&) = delete;
  TransferStream& operator=(const TransferStream&) = delete;
  cudaStream_t get() const { return stream_; }
  operator cudaStream_t() const { return stream_; }  // NOLINT: used wherever CUDA wants one

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace farspan::cuda
