// SPDX-License-Identifier: Apache-2.0
// Loss and gradient of whole rows of logits, which are read from memory once. Long rows are shared by the blocks of a
// cluster: each keeps its slice of a row in its own shared memory from the sum to the gradient, since a row (600 KB for
// 152K entries) is larger than what one multiprocessor holds. Blocks stay for many rows, and the copy engine brings the
// slices of the next ones while they work on one. Short rows take a warp each, in registers.
#include <algorithm>
#include <cooperative_groups.h>

#include "base/math.h"
#include "ops/cuda/copy_engine.cuh"
#include "ops/cuda/cross_entropy.cuh"
#include "ops/cuda/ops.h"

namespace farspan::cuda {
namespace {

namespace cg = cooperative_groups;

// Largest cluster that every GPU of compute capability 9 takes.
constexpr int kMaxCluster = 8;

// What d_logits hold; none: there are none.
enum class Gradient { none, f32, bf16 };
template <Gradient gradient>
using ElementOf = std::conditional_t<gradient == Gradient::bf16, BFloat16, float>;

// Threads of a block, and granules of each of them in a piece.
constexpr int kThreads = 512;
constexpr int kGroup = 4;
// Of a row, what one block of a cluster keeps at most, so that several blocks fit on a multiprocessor.
constexpr int64_t kSliceBytes = int64_t{75} << 10;

constexpr int kMaxPieces = 32;

struct Loss {
  const float* logits;
  const int32_t* targets;
  float* token_loss;
  void* d_logits;
  int64_t rows, vocabulary;
  int64_t logits_stride, d_logits_stride;
  float gradient_scale;
  // Of rows shared by a cluster: columns of a block, a multiple of 4, and the pieces that they are copied in.
  int64_t slice;
  int pieces;

  __device__ __forceinline__ bool counts(int32_t target) const { return target >= 0 && target < vocabulary; }
};

// loss = log sum exp(x - maximum) - (x_target - maximum)
__device__ __forceinline__ float loss_of(const ExponentialSum& all, float target_logit) {
  const double shifted = static_cast<double>(target_logit) - static_cast<double>(all.maximum);
  return static_cast<float>(static_cast<double>(logf(all.sum)) - shifted);
}

// (softmax - 1) gradient_scale
__device__ __forceinline__ float gradient_at_target(const ExponentialSum& all, float target_logit, float scale) {
  return (exponential(target_logit - all.shift()) / all.sum - 1) * scale;
}

// A block's slice of a row in granules of 16 bytes, as the copy engine moves them: the row may begin inside one. Elements
// before `begin` and from `end` on are not the slice's.
struct Granules {
  const float4* values;  // in shared memory, or in global memory
  int begin, end;

  // n elements from `first` on.
  __device__ __forceinline__ Granules(const float* first, int n)
      : begin(static_cast<int>(reinterpret_cast<uintptr_t>(first) % 16 / 4)), end(n > 0 ? begin + n : begin) {
    values = reinterpret_cast<const float4*>(first - begin);
  }
  __device__ __forceinline__ int count() const { return (end + 3) / 4; }
  __device__ __forceinline__ bool whole(int granule) const { return 4 * granule >= begin && 4 * granule + 4 <= end; }
  __device__ __forceinline__ bool holds(int element) const { return element >= begin && element < end; }

  // kShared: of values in shared memory, where all of a granule may be read.
  template <bool kShared>
  __device__ __forceinline__ void load(int granule, float (&x)[4]) const {
    float4 v{};
    if (kShared || whole(granule)) v = values[granule];
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    if (whole(granule)) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int element = 4 * granule + e;
      if (!holds(element))
        x[e] = kMinusInfinity;
      else if (!kShared)
        x[e] = reinterpret_cast<const float*>(values)[element];
    }
  }
  // To rows that begin at the slice's first granule.
  template <typename T>
  __device__ __forceinline__ void store(T* rows, int granule, const float (&x)[4]) const {
    T* const to = rows + 4 * granule;
    if (whole(granule) && reinterpret_cast<uintptr_t>(to) % (4 * sizeof(T)) == 0) return store_four(to, x);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (holds(4 * granule + e)) store_one(to + e, x[e]);
  }
};

// A cluster takes every gridDim.x / (blocks of a cluster)-th row. kKept: the slice stays in shared memory, and piece by
// piece the next row's takes its place; else, where it does not fit there, it is read twice.
template <Gradient gradient, bool kKept>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows(const Loss loss) {
  constexpr int kPiece = kThreads * kGroup;  // granules: kGroup of each thread
  constexpr int kWarps = kThreads / kWarp;
  extern __shared__ __align__(128) float4 kept[];
  __shared__ CopyBarrier arrived[kMaxPieces];
  // Two of each, used in turn: the next row's are written while others still read.
  __shared__ ExponentialSum of_warps[2][kWarps];
  __shared__ ExponentialSum of_block[2];
  const cg::cluster_group cluster = cg::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int64_t first = cluster.block_rank() * loss.slice;
  const int n = static_cast<int>(min(loss.slice, loss.vocabulary - first));
  const int64_t first_row = blockIdx.x / blocks, row_step = gridDim.x / blocks;
  const bool leads = threadIdx.x == 0;

  const auto granules_of = [&](int64_t row) { return Granules(loss.logits + row * loss.logits_stride + first, n); };
  const auto start_copy = [&](int64_t row, int piece) {
    if (!kKept || !leads || row >= loss.rows) return;
    const Granules granules = granules_of(row);
    int end = min((piece + 1) * kPiece, granules.count());
    // A granule's other elements are those of the rows beside, but behind the last row there may be no memory. What a
    // granule holds before a first row is: memory begins at a multiple of 16 bytes.
    if (row == loss.rows - 1 && end == granules.count() && end > piece * kPiece && granules.end % 4 != 0) {
      --end;
      for (int element = 4 * end; element < granules.end; ++element)
        if (granules.holds(element))
          reinterpret_cast<float*>(kept)[element] = reinterpret_cast<const float*>(granules.values)[element];
    }
    const int bytes = 16 * max(0, end - piece * kPiece);
    barrier_expect(arrived[piece], bytes);
    if (bytes > 0) copy_bytes(kept + piece * kPiece, granules.values + piece * kPiece, arrived[piece], bytes);
  };
  if (kKept && leads) {
    for (int piece = 0; piece < loss.pieces; ++piece) barrier_init(arrived[piece], 1);
    barrier_init_fence();
    for (int piece = 0; piece < loss.pieces; ++piece) start_copy(first_row, piece);
  }
  __syncthreads();

  int32_t next_target = first_row < loss.rows ? loss.targets[first_row] : -1;
  int parity = 0, turn = 0;
  for (int64_t row = first_row; row < loss.rows; row += row_step, parity ^= 1) {
    const int32_t target = next_target;
    if (row + row_step < loss.rows) next_target = loss.targets[row + row_step];
    Granules granules = granules_of(row);
    if (kKept) granules.values = kept;
    using Element = ElementOf<gradient>;
    Element* const d_logits =
        static_cast<Element*>(loss.d_logits) + row * loss.d_logits_stride + first - granules.begin;
    const auto each_piece = [&](const auto& body) {
      for (int piece = 0; piece < loss.pieces; ++piece) body(piece, piece * kPiece + static_cast<int>(threadIdx.x));
    };

    if (!loss.counts(target)) {
      if (leads && first == 0) loss.token_loss[row] = 0;
      each_piece([&](int piece, int g) {
        if (kKept) barrier_wait(arrived[piece], parity);
        const float zeros[4] = {};
        if constexpr (gradient != Gradient::none)
          for (int k = 0; k < kGroup; ++k)
            if (g + k * kThreads < granules.count()) granules.store(d_logits, g + k * kThreads, zeros);
      });
      __syncthreads();  // all have seen the pieces arrive
      each_piece([&](int piece, int) { start_copy(row + row_step, piece); });
      continue;
    }

    ExponentialSum all;
    each_piece([&](int piece, int g) {
      if (kKept) barrier_wait(arrived[piece], parity);
      float x[kGroup][4];
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        x[k][0] = x[k][1] = x[k][2] = x[k][3] = kMinusInfinity;
        if (g + k * kThreads < granules.count()) granules.load<kKept>(g + k * kThreads, x[k]);
      }
      all.add(reinterpret_cast<const float(&)[kGroup * 4]>(x));
    });
    all.combine_block<kWarps>(of_warps[turn]);
    if (leads) of_block[turn] = all;
    const bool holds_target = leads && target >= first && target < first + n;
    const float target_logit =
        holds_target ? reinterpret_cast<const float*>(granules.values)[granules.begin + target - first] : 0;
    if constexpr (gradient == Gradient::none) each_piece([&](int piece, int) { start_copy(row + row_step, piece); });
    cluster.sync();
    const int other = static_cast<int>(threadIdx.x) % kMaxCluster;
    all = other < blocks ? *cluster.map_shared_rank(&of_block[turn], other) : ExponentialSum();
    all.combine_lanes(kMaxCluster);
    turn ^= 1;

    if constexpr (gradient != Gradient::none) {
      const float shift = all.shift();
      const float factor = loss.gradient_scale / all.sum;
      each_piece([&](int piece, int g) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          if (g + k * kThreads >= granules.count()) continue;
          float x[4];
          granules.load<kKept>(g + k * kThreads, x);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = exponential(x[e] - shift) * factor;
          granules.store(d_logits, g + k * kThreads, x);
        }
        __syncthreads();
        start_copy(row + row_step, piece);
      });
    }
    if (holds_target) {
      loss.token_loss[row] = loss_of(all, target_logit);
      if constexpr (gradient != Gradient::none)
        store_one(d_logits + granules.begin + target - first,
                  gradient_at_target(all, target_logit, loss.gradient_scale));
    }
  }
  cluster.sync();  // others read of_block until here
}

constexpr int kShortThreads = 256;

// A warp per row of at most 32 kPerLane columns.
template <Gradient gradient, int kPerLane>
__global__ void __launch_bounds__(kShortThreads) cross_entropy_short_rows(const Loss loss) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kShortThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= loss.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float* const logits = loss.logits + row * loss.logits_stride;
  using Element = ElementOf<gradient>;
  Element* const d_logits = static_cast<Element*>(loss.d_logits) + row * loss.d_logits_stride;
  const int32_t target = loss.targets[row];
  if (!loss.counts(target)) {
    if (lane == 0) loss.token_loss[row] = 0;
    if constexpr (gradient != Gradient::none)
      for (int64_t i = lane; i < loss.vocabulary; i += kWarp) store_one(d_logits + i, 0);
    return;
  }
  float x[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int column = lane + k * kWarp;
    x[k] = column < loss.vocabulary ? logits[column] : kMinusInfinity;
  }
  const float target_logit = logits[target];
  __syncwarp();  // all have read before one writes
  ExponentialSum all;
  all.add(x);
  all.combine_lanes(kWarp);
  if (lane == 0) loss.token_loss[row] = loss_of(all, target_logit);
  if constexpr (gradient != Gradient::none) {
    const float factor = loss.gradient_scale / all.sum;
    const float at_target = gradient_at_target(all, target_logit, loss.gradient_scale);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int column = lane + k * kWarp;
      if (column < loss.vocabulary)
        store_one(d_logits + column, column == target ? at_target : exponential(x[k] - all.shift()) * factor);
    }
  }
}

template <Gradient gradient, bool kKept>
void launch_rows(Device& device, Loss loss, int blocks) {
  const auto kernel = cross_entropy_rows<gradient, kKept>;
  const int64_t granules = (loss.slice + 3) / 4 + 1;
  loss.pieces = static_cast<int>(ceil_div(granules, kThreads * kGroup));
  const int shared = kKept ? static_cast<int>(granules * 16) : 0;
  FARSPAN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = compute_stream(device);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  FARSPAN_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  config.gridDim.x = static_cast<unsigned>(std::clamp<int64_t>(clusters, 1, loss.rows)) * config.gridDim.x;
  FARSPAN_CUDA(cudaLaunchKernelEx(&config, kernel, loss));
}

template <Gradient gradient>
void run_rows(Device& device, Loss loss) {
  int blocks = 1;
  while (blocks < kMaxCluster && ceil_div(loss.vocabulary, blocks) * 4 > kSliceBytes) blocks *= 2;
  loss.slice = round_up(ceil_div(loss.vocabulary, blocks), 4);
  const bool fits = loss.slice * 4 + 2048 <= properties(device).shared_bytes_per_block;
  if (fits)
    launch_rows<gradient, true>(device, loss, blocks);
  else
    launch_rows<gradient, false>(device, loss, blocks);
}

template <Gradient gradient, int kPerLane>
void launch_short_rows(Device& device, const Loss& loss) {
  const unsigned int blocks = static_cast<unsigned int>(ceil_div(loss.rows, kShortThreads / kWarp));
  cross_entropy_short_rows<gradient, kPerLane><<<blocks, kShortThreads, 0, compute_stream(device)>>>(loss);
  FARSPAN_CUDA_LAUNCHED();
}

template <Gradient gradient>
void run(Device& device, const Loss& loss) {
  if (loss.vocabulary <= 16 * kWarp) return launch_short_rows<gradient, 16>(device, loss);
  if (loss.vocabulary <= 32 * kWarp) return launch_short_rows<gradient, 32>(device, loss);
  run_rows<gradient>(device, loss);
}

}  // namespace

void cross_entropy(Device& device, const Tensor& logits, const Tensor& targets, double gradient_scale,
                   const Tensor& token_loss, const Tensor& d_logits) {
  if (logits.dim(0) == 0) return;
  const bool has_gradient = d_logits.defined();
  const Loss loss = {.logits = logits.data<float>(),
                     .targets = targets.data<int32_t>(),
                     .token_loss = token_loss.data<float>(),
                     .d_logits = d_logits.raw(),
                     .rows = logits.dim(0),
                     .vocabulary = logits.dim(1),
                     .logits_stride = logits.stride(0),
                     .d_logits_stride = has_gradient ? d_logits.stride(0) : 0,
                     .gradient_scale = static_cast<float>(gradient_scale),
                     .slice = 0,
                     .pieces = 0};
  if (!has_gradient)
    run<Gradient::none>(device, loss);
  else if (d_logits.dtype() == DType::f32)
    run<Gradient::f32>(device, loss);
  else
    run<Gradient::bf16>(device, loss);
}

}  // namespace farspan::cuda
