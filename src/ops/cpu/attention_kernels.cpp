// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_kernels.h"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "device/parallel_for.h"
#include "ops/cpu/attention_tiling.h"

// Vectors of unknown length cannot be kept in arrays, as the register blocks do. On SSSE3 IfNegativeThenElse of
// Highway 1.0.3 looks at more than the sign; such machines, of before 2008, run the scalar kernels.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/attention_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include "ops/cpu/attention_tile-inl.h"
#include "ops/cpu/philox-inl.h"
// The tasks build on these.
#include "ops/cpu/attention_backward-inl.h"
#include "ops/cpu/attention_forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu::HWY_NAMESPACE {

int64_t task_scratch(int64_t head_size) { return std::max(forward_scratch(head_size), backward_scratch(head_size)); }

}  // namespace farspan::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace farspan::cpu {

HWY_EXPORT(task_scratch);
HWY_EXPORT(forward_task);
HWY_EXPORT(backward_task);

namespace {

struct Free {
  void operator()(float* p) const { std::free(p); }
};

// One piece of scratch for each thread of `device`, kept by the calling thread from call to call, all as large as the
// largest so far. Allocated before the parallel region, because a task that failed to get any would leave those that
// wait for it waiting.
std::vector<float*> scratch_per_thread(const Device& device, int64_t floats) {
  constexpr size_t kAlignment = 128;  // two cache lines: neighbours are fetched in pairs
  thread_local std::vector<std::unique_ptr<float, Free>> pieces;
  thread_local int64_t piece_floats = 0;
  const int64_t most_floats = std::max(piece_floats, floats);
  const int64_t bytes = round_up(most_floats * static_cast<int64_t>(sizeof(float)), static_cast<int64_t>(kAlignment));
  FARSPAN_CHECK(bytes <= kMaxScratchBytes, "attention: {} bytes of scratch a thread; at most {}", bytes,
                kMaxScratchBytes);
  if (piece_floats < floats) {
    pieces.clear();
    piece_floats = floats;
  }
  while (static_cast<int64_t>(pieces.size()) < device.threads()) {
    pieces.emplace_back(static_cast<float*>(std::aligned_alloc(kAlignment, static_cast<size_t>(bytes))));
    if (!pieces.back()) {
      pieces.pop_back();
      throw MemoryError(
          fmt::format("attention: the system refused {} bytes of scratch for one thread; {} are available", bytes,
                      available_memory_bytes()));
    }
  }
  std::vector<float*> pointers;
  for (const auto& piece : pieces) pointers.push_back(piece.get());
  return pointers;
}

InputRows input_rows(const Tensor& x) { return {x.raw(), x.stride(0), x.stride(1)}; }
OutputRows output_rows(const Tensor& x) { return {x.data<float>(), x.stride(0), x.stride(1)}; }
PerHead per_head(const Tensor& x) { return {x.data<float>(), x.stride(0)}; }

// One for each query head; none without dropout.
std::vector<uint64_t> draw_keys_of(const AttentionBlock& b) {
  std::vector<uint64_t> keys;
  if (b.dropout.probability == 0) return keys;
  for (int64_t head = 0; head < b.query.dim(1); ++head) keys.push_back(attention_draw_key(b.dropout, head));
  return keys;
}

// `draw_keys` stays with the caller while the block is in use.
KernelBlock kernel_block(const AttentionBlock& b, const std::vector<uint64_t>& draw_keys) {
  return {.query = input_rows(b.query),
          .key = input_rows(b.key),
          .value = input_rows(b.value),
          .bf16 = b.query.dtype() == DType::bf16,
          .lo = b.lo.data<int64_t>(),
          .hi = b.hi.data<int64_t>(),
          .lo_stride = b.lo.stride(0),
          .hi_stride = b.hi.stride(0),
          .key_begin = b.key_begin,
          .queries = b.query.dim(0),
          .keys = b.key.dim(0),
          .kv_heads = b.key.dim(1),
          .group = b.query.dim(1) / b.key.dim(1),
          .head_size = b.query.dim(2),
          .scale = b.scale,
          .draw_keys = draw_keys.empty() ? nullptr : draw_keys.data(),
          .drop = DropoutRule(b.dropout.probability),
          .query_begin = b.query_begin};
}

// Per backward row tile, the smallest range that holds every key its rows see.
std::vector<KeyRange> row_tile_ranges(const KernelBlock& block) {
  std::vector<KeyRange> ranges(static_cast<size_t>(ceil_div(block.rows(), kBackwardRows)));
  for (int64_t t = 0; t < static_cast<int64_t>(ranges.size()); ++t) {
    KeyRange some{block.keys, 0};
    const int64_t end = std::min((t + 1) * kBackwardRows, block.rows());
    for (int64_t r = t * kBackwardRows; r < end; ++r) {
      const KeyRange range = block.visible(r);
      if (!range.empty()) some = {std::min(some.begin, range.begin), std::max(some.end, range.end)};
    }
    ranges[static_cast<size_t>(t)] = some.empty() ? KeyRange{} : some;
  }
  return ranges;
}

}  // namespace

std::vector<std::string> attention_kernel_targets() {
  std::vector<std::string> names;
  // A lower bit is a better target.
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1)
    names.emplace_back(hwy::TargetName(left & -left));
  return names;
}

void attention_kernel_select(std::string_view target) {
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    if (!target.empty() && hwy::TargetName(left & -left) != target) continue;
    hwy::GetChosenTarget().Update(target.empty() ? left : left & -left);
    return;
  }
  throw InternalError(fmt::format("attention: no kernels for \"{}\" on this machine; there are {}", target,
                                  fmt::join(attention_kernel_targets(), ", ")));
}

std::string attention_kernel_declines(const AttentionBlock& block) {
  const int64_t head_size = block.query.dim(2);
  if (head_size <= kMaxKernelHeadSize) return {};
  return fmt::format("head size {} is above {}", head_size, kMaxKernelHeadSize);
}

namespace {

int threads_for(const Device& device, const AttentionBlock& block) {
  const int64_t pairs = block.visible_pairs >= 0 ? block.visible_pairs : block.query.dim(0) * block.key.dim(0);
  return worthwhile_threads(
      device, 4.0 * static_cast<double>(pairs) * static_cast<double>(block.query.dim(1) * block.query.dim(2)));
}

}  // namespace

void attention_kernel_forward(const Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& lse) {
  const std::vector<uint64_t> draw_keys = draw_keys_of(block);
  const ForwardArguments args{kernel_block(block, draw_keys), output_rows(out), per_head(lse)};
  const int64_t kv_heads = args.block.kv_heads;
  const int64_t tiles = ceil_div(args.block.rows(), forward_rows(args.block.head_size));
  const std::vector<float*> scratch =
      scratch_per_thread(device, HWY_DYNAMIC_DISPATCH(task_scratch)(args.block.head_size));
  // From the last rows to the first: under a causal mask the last see most, and short tasks at the end even out the
  // threads.
  parallel_tasks(threads_for(device, block), tiles * kv_heads, [&](int64_t index, int thread) {
    HWY_DYNAMIC_DISPATCH(forward_task)
    (args, index % kv_heads, tiles - 1 - index / kv_heads, scratch[static_cast<size_t>(thread)]);
  });
}

void attention_kernel_backward(const Device& device, const AttentionBlock& block, const Tensor& d_out,
                               const Tensor& lse, const Tensor& delta, const Tensor& d_query, const Tensor& d_key,
                               const Tensor& d_value) {
  const std::vector<uint64_t> draw_keys = draw_keys_of(block);
  BackwardArguments args;
  args.block = kernel_block(block, draw_keys);
  args.d_out = input_rows(d_out);
  args.lse = per_head(lse);
  args.delta = per_head(delta);
  args.d_query = output_rows(d_query);
  args.d_key = output_rows(d_key);
  args.d_value = output_rows(d_value);
  const std::vector<KeyRange> ranges = row_tile_ranges(args.block);
  args.tile_ranges = ranges.data();
  const int64_t kv_heads = args.block.kv_heads;
  const int64_t tasks = ceil_div(args.block.keys, kBackwardKeys) * kv_heads;
  std::vector<std::atomic<int64_t>> progress(static_cast<size_t>(tasks));
  args.progress = progress.data();
  const std::vector<float*> scratch =
      scratch_per_thread(device, HWY_DYNAMIC_DISPATCH(task_scratch)(args.block.head_size));
  // Chunks in ascending order, so that the one a task may wait for has always been started; heads innermost, so that it
  // is usually done.
  parallel_tasks(threads_for(device, block), tasks, [&](int64_t index, int thread) {
    HWY_DYNAMIC_DISPATCH(backward_task)(args, index % kv_heads, index / kv_heads, scratch[static_cast<size_t>(thread)]);
  });
}

}  // namespace farspan::cpu
#endif  // HWY_ONCE
