// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/attention_kernels.h"

#include "base/math.h"
#include "device/cuda/cuda.h"
#include "ops/cuda/attention_bounds.h"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_kernels_scratch.h"
#include "ops/cuda/attention_order.h"
#include "ops/dropout_rule.h"

namespace farspan::cuda {
namespace {

// As attention_kernels_scratch.h, which is compiled without CUDA too, counts them.
static_assert(sizeof(int2) == 8 && sizeof(TileBounds) == 16 && sizeof(TilePlace) == 8 && kBoundsRows == 64);
static_assert(kBackwardTileRows >= kLeastOrderedQueries && kWideBackwardKeys >= kLeastOrderedKeys);

constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // of a block: 32-bit numbers with room for a tile

HeadsView heads_view(const Tensor& x) {
  const int64_t vector = 16 / size_of(x.dtype());
  const auto whole = [&](int64_t elements) {
    return x.dim(2) % elements == 0 && (x.stride(0) % elements == 0 || x.dim(0) <= 1) &&
           (x.stride(1) % elements == 0 || x.dim(1) <= 1) &&
           reinterpret_cast<uintptr_t>(x.raw()) % static_cast<uintptr_t>(elements * size_of(x.dtype())) == 0;
  };
  return {.data = static_cast<char*>(x.raw()),
          .token_stride = x.stride(0),
          .head_stride = x.stride(1),
          .f32 = x.dtype() == DType::f32,
          .vectors = whole(vector),
          .pairs = whole(2)};
}

RowsView rows_view(const Tensor& x) { return {x.data<float>(), x.stride(0)}; }

void fill_arguments(AttentionArguments& a, const AttentionBlock& block) {
  a.query = heads_view(block.query);
  a.key = heads_view(block.key);
  a.value = heads_view(block.value);
  a.queries = static_cast<int>(block.query.dim(0));
  a.keys = static_cast<int>(block.key.dim(0));
  a.heads = static_cast<int>(block.query.dim(1));
  a.kv_heads = static_cast<int>(block.key.dim(1));
  a.group = a.kv_heads > 0 ? a.heads / a.kv_heads : 0;
  a.head_size = static_cast<int>(block.query.dim(2));
  a.scale = block.scale;
  a.keeps_blind = block.keeps_blind;
  if (block.dropout.probability == 0) return;
  const DropoutRule rule(block.dropout.probability);
  a.dropout = {.threshold = rule.threshold,
               .scale = rule.scale,
               .key = block.dropout.key,
               .row = static_cast<uint64_t>(block.dropout.row),
               .first_head = static_cast<uint64_t>(block.dropout.first_head),
               .query_begin = block.query_begin,
               .key_begin = block.key_begin};
}

// In the device's scratch: attention_kernel_forward_scratch or attention_kernel_backward_scratch bytes.
ForwardArguments forward_arguments(const AttentionBlock& block, StateUse use, const Tensor& out, const Tensor& lse,
                                   const Device& device) {
  ForwardArguments a;
  fill_arguments(a, block);
  ScratchParts scratch(device);
  a.bounds = place_query_bounds(scratch, a.queries);
  a.query_order = scratch.take_array<TilePlace>(ordered_query_tiles(a.queries, a.heads));
  a.out = heads_view(out);
  a.lse = rows_view(lse);
  a.add = use == StateUse::add;
  return a;
}

BackwardArguments backward_arguments(const AttentionBlock& block, const Tensor& d_out, const Tensor& lse,
                                     const Tensor& delta, Accumulate d_query_use, Accumulate d_key_value_use,
                                     const Tensor& d_query, const Tensor& d_key, const Tensor& d_value,
                                     const Device& device) {
  BackwardArguments a;
  fill_arguments(a, block);
  ScratchParts scratch(device);
  a.bounds = place_query_bounds(scratch, a.queries);
  a.query_order = scratch.take_array<TilePlace>(ordered_query_tiles(a.queries, a.heads));
  a.bounds.key_tiles = scratch.take_array<int2>(ceil_div(a.keys, kBoundsRows));
  a.key_order = scratch.take_array<TilePlace>(ordered_key_tiles(a.keys, a.kv_heads));
  a.d_out = heads_view(d_out);
  a.lse = rows_view(lse);
  a.delta = rows_view(delta);
  a.d_query = heads_view(d_query);
  a.d_key = heads_view(d_key);
  a.d_value = heads_view(d_value);
  a.add_query = d_query_use == Accumulate::yes;
  a.add_key_value = d_key_value_use == Accumulate::yes;
  return a;
}

// What the kernels for Hopper (wgmma, bulk copies) need of a block.
bool suits_hopper(const Device& device, const AttentionArguments& a) {
  return properties(device).major == 9 && !a.query.f32 && a.query.vectors && a.key.vectors && a.value.vectors &&
         a.scale > 0 && a.dropout.threshold == 0 && a.keys > 0;
}

}  // namespace

std::string attention_kernel_declines(const AttentionBlock& block) {
  if (block.query.dim(2) > kMaxHeadSize)
    return fmt::format("head size {}, at most {} is compiled", block.query.dim(2), kMaxHeadSize);
  if (block.query.dim(0) > kMaxTokens || block.key.dim(0) > kMaxTokens)
    return fmt::format("{} queries and {} keys, at most {} each are counted", block.query.dim(0), block.key.dim(0),
                       kMaxTokens);
  return "";
}

void attention_kernel_forward(Device& device, const AttentionBlock& block, StateUse use, const Tensor& out,
                              const Tensor& lse) {
  if (out.numel() == 0) return;
  const ForwardArguments a = forward_arguments(block, use, out, lse, device);
  const cudaStream_t stream = compute_stream(device);
  find_query_bounds(block, a.bounds, stream);
  if (a.query.f32) return attention_forward_fp32(a, stream);
  if (suits_hopper(device, a)) return attention_forward_hopper(a, stream);
  attention_forward_mma(a, stream);
}

void attention_kernel_backward(Device& device, const AttentionBlock& block, const Tensor& d_out, const Tensor& lse,
                               const Tensor& delta, Accumulate d_query_use, Accumulate d_key_value_use,
                               const Tensor& d_query, const Tensor& d_key, const Tensor& d_value) {
  const BackwardArguments a =
      backward_arguments(block, d_out, lse, delta, d_query_use, d_key_value_use, d_query, d_key, d_value, device);
  const cudaStream_t stream = compute_stream(device);
  find_query_bounds(block, a.bounds, stream);
  find_key_bounds(block, a.bounds, stream);
  if (a.query.f32) {
    attention_d_key_value_fp32(a, stream);
    attention_d_query_fp32(a, stream);
    return;
  }
  if (suits_hopper(device, a) && a.d_out.vectors && a.queries > 0) {
    const bool wide = a.head_size > 128;
    order_tiles(a, kBackwardTileRows, wide ? kWideBackwardKeys : kBackwardTileRows, stream);
    (wide ? attention_d_key_value_wide_hopper : attention_d_key_value_hopper)(a, stream);
    attention_d_query_hopper(a, stream);
    return;
  }
  attention_d_key_value_mma(a, stream);
  attention_d_query_mma(a, stream);
}

}  // namespace farspan::cuda
