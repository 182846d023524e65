// SPDX-License-Identifier: Apache-2.0
// Hopper's copy engine and the barriers that count its bytes (PTX: cp.async.bulk.tensor, mbarrier).
#pragma once

#include <cstdint>

#include "ops/cuda/tensor_core.cuh"
#include "ops/cuda/tensor_map.h"

namespace farspan::cuda {

// In shared memory. A phase ends when all arrivals and all announced bytes have come; waiting names a phase by its parity,
// the first being 0.
using CopyBarrier = uint64_t;

__device__ inline void barrier_init(CopyBarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
// After the inits and before a barrier of the block.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(CopyBarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives, and announces bytes to come in this phase.
__device__ inline void barrier_expect(CopyBarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_wait(CopyBarrier& barrier, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}

__device__ inline void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The map's box of elements from `column`, `head` and `token` on, zeros outside the tensor.
__device__ inline void copy_box(void* to, const TensorMap& map, CopyBarrier& barrier, int column, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(head), "r"(token)
      : "memory");
}

// `bytes` of global memory; both addresses and the count are multiples of 16.
__device__ inline void copy_bytes(void* to, const void* from, CopyBarrier& barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// 8 bytes to another block of the cluster, or this one: to where `to` is in its own shared memory, counted by its `barrier`.
__device__ inline void send_to_block(uint32_t block, void* to, CopyBarrier& barrier, uint64_t bits) {
  asm volatile(
      "{\n.reg .b32 address, counter;\nmapa.shared::cluster.u32 address, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [address], %3, [counter];\n}" ::"r"(
          shared_address(to)),
      "r"(shared_address(&barrier)), "r"(block), "l"(bits)
      : "memory");
}

// What this thread wrote to shared memory is seen by the copy engine and by wgmma after a barrier.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers of some of a block's warps, by number 1 to 15; `threads` is the sum of those that wait and those that arrive.
__device__ inline void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Registers of each thread of a warpgroup from here on.
template <int kCount>
__device__ inline void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace farspan::cuda
