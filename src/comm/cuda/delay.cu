// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/delay.h"
#include "device/cuda/cuda.h"

namespace farspan {
namespace {

__device__ int64_t nanoseconds() {
  int64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void spin(int64_t duration) {
  const int64_t start = nanoseconds();
  while (nanoseconds() - start < duration) __nanosleep(1000);
}

}  // namespace

void delay_compute(Device& device, double seconds) {
  spin<<<1, 1, 0, cuda::compute_stream(device)>>>(static_cast<int64_t>(seconds * 1e9));
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace farspan
