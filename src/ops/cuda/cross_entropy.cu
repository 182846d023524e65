// SPDX-License-Identifier: Apache-2.0
// Loss and gradient of whole rows of logits, which are read from memory once. Long rows are shared by the blocks of a
// cluster, each of which holds its slice of a row in registers from the sum to the gradient: a row (600 KB for 152K entries)
// is larger than what one multiprocessor holds. Blocks stay for many rows, and the copy engine brings the slices of those to
// come into shared memory, piece by piece, while they work on one. Short rows take a warp each.
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

// Granules of each thread in a piece.
constexpr int kGroup = 4;

// Threads of a block, and pieces of its slice of a row, all of which its registers hold.
template <int threads, int pieces>
struct Cut {
  static constexpr int kThreads = threads;
  static constexpr int kPieces = pieces;
  static constexpr int kPiece = threads * kGroup;  // granules
  // That registers allow on a multiprocessor, and pieces that shared memory has room for then.
  static constexpr int kBlocks = (pieces <= 2 ? 1024 : 512) / threads;
  static constexpr int kSlots = (224 << 10) / kBlocks / (16 * kPiece);
};
// Of short slices, so that more rows are worked on at once, and of others.
constexpr int kFewThreads = 256, kThreads = 512;
constexpr int kMaxPieces = 5;

struct Loss {
  const float* logits;
  const int32_t* targets;
  float* token_loss;
  void* d_logits;
  int64_t rows, vocabulary;
  int64_t logits_stride, d_logits_stride;
  float gradient_scale;
  // Rows are summed in slices, each the share of one block of a cluster where there is one: a multiple of 4 columns.
  int64_t slice;
  int slices;

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
  // Those of others, but elsewhere.
  __device__ __forceinline__ Granules(const float4* elsewhere, const Granules& others)
      : values(elsewhere), begin(others.begin), end(others.end) {}
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

// What all kernels of long rows do with a row's slice.
template <Gradient gradient>
struct Slice {
  using Element = ElementOf<gradient>;

  int64_t first;  // column
  int n;          // columns

  __device__ __forceinline__ Granules granules(const Loss& loss, int64_t row) const {
    return {loss.logits + row * loss.logits_stride + first, n};
  }
  // Where Granules::store puts the slice's gradient.
  __device__ __forceinline__ Element* gradients(const Loss& loss, int64_t row, const Granules& granules) const {
    return static_cast<Element*>(loss.d_logits) + row * loss.d_logits_stride + first - granules.begin;
  }
  // The target's element among the granules', or -1 where it is not in the slice.
  __device__ __forceinline__ int target_element(int32_t target, const Granules& granules) const {
    return target >= first && target < first + n ? granules.begin + static_cast<int>(target - first) : -1;
  }
};

// The target's loss and gradient, by the thread that stored its granule.
template <Gradient gradient>
__device__ __forceinline__ void finish_target(const Loss& loss, int64_t row, const ExponentialSum& all,
                                              float target_logit, ElementOf<gradient>* d_target) {
  loss.token_loss[row] = loss_of(all, target_logit);
  if constexpr (gradient != Gradient::none)
    store_one(d_target, gradient_at_target(all, target_logit, loss.gradient_scale));
}

// What the blocks of a cluster found in a row, told to each other. Two of each, used in turn: a block tells the next row's
// while others still read; when it tells that of the row after, all have told the next row's, and so have read.
struct ClusterSums {
  float2 of_blocks[2][kMaxCluster];  // maximum, sum
  CopyBarrier arrived[2];

  // By one thread, before the cluster's first barrier.
  __device__ __forceinline__ void init() {
    for (CopyBarrier& barrier : arrived) barrier_init(barrier, 1);
    barrier_init_fence();
  }
  // By all threads of the cluster's blocks, each of which has its block's sum. row: how many were before.
  __device__ __forceinline__ void tell(const ExponentialSum& sum, uint32_t row, int block, int blocks) {
    if (threadIdx.x == 0) barrier_expect(arrived[row % 2], blocks * static_cast<int>(sizeof(float2)));
    const uint64_t bits = uint64_t{__float_as_uint(sum.sum)} << 32 | __float_as_uint(sum.maximum);
    if (threadIdx.x < blocks) send_to_block(threadIdx.x, &of_blocks[row % 2][block], arrived[row % 2], bits);
  }
  __device__ __forceinline__ ExponentialSum wait(uint32_t row, int blocks) {
    barrier_wait(arrived[row % 2], static_cast<int>(row / 2 % 2));
    const int block = static_cast<int>(threadIdx.x) % kMaxCluster;
    ExponentialSum all;
    if (block < blocks) all = {of_blocks[row % 2][block].x, of_blocks[row % 2][block].y};
    all.combine_lanes(kMaxCluster);
    return all;
  }
};

// A cluster takes every gridDim.x / (blocks of a cluster)-th row.
template <Gradient gradient, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) cross_entropy_rows(const Loss loss) {
  constexpr int kThreads = C::kThreads, kWarps = kThreads / kWarp, kPiece = C::kPiece;
  extern __shared__ __align__(128) float4 slots[];
  __shared__ CopyBarrier arrived[C::kSlots];
  __shared__ ExponentialSum of_warps[2][kWarps];  // used in turn: the next row's are written while others still read
  __shared__ ClusterSums cluster_sums;
  const cg::cluster_group cluster = cg::this_cluster();
  const int block = static_cast<int>(cluster.block_rank());
  const int64_t first = block * loss.slice;
  const Slice<gradient> slice{first, static_cast<int>(min(loss.slice, loss.vocabulary - first))};
  const int64_t first_row = blockIdx.x / loss.slices, row_step = gridDim.x / loss.slices;
  const int thread = static_cast<int>(threadIdx.x);
  const bool leads = thread == 0;

  // The leading thread's: the piece that is to be copied next. Pieces take the slots in turn.
  int64_t copied_row = first_row;
  int copied_piece = 0, copied_slot = 0;
  const auto copy_next = [&] {
    if (copied_row >= loss.rows) return;
    const Granules granules = slice.granules(loss, copied_row);
    float4* const slot = slots + copied_slot * kPiece;
    const int begin = copied_piece * kPiece;
    int end = min(begin + kPiece, granules.count());
    // A granule's other elements are those of the rows beside, but behind the last row there may be no memory. What a
    // granule holds before a first row is: memory begins at a multiple of 16 bytes.
    if (copied_row == loss.rows - 1 && end == granules.count() && end > begin && granules.end % 4 != 0) {
      --end;
      for (int element = 4 * end; element < granules.end; ++element)
        if (granules.holds(element))
          reinterpret_cast<float*>(slot)[element - 4 * begin] =
              reinterpret_cast<const float*>(granules.values)[element];
    }
    const int bytes = 16 * max(0, end - begin);
    barrier_expect(arrived[copied_slot], bytes);
    if (bytes > 0) copy_bytes(slot, granules.values + begin, arrived[copied_slot], bytes);
    copied_slot = copied_slot + 1 == C::kSlots ? 0 : copied_slot + 1;
    if (++copied_piece < C::kPieces) return;
    copied_piece = 0;
    copied_row += row_step;
  };
  if (leads) {
    for (CopyBarrier& barrier : arrived) barrier_init(barrier, 1);
    cluster_sums.init();
    for (int slot = 0; slot < C::kSlots; ++slot) copy_next();
  }
  if (loss.slices > 1)
    cluster.sync();
  else
    __syncthreads();

  int32_t next_target = first_row < loss.rows ? loss.targets[first_row] : -1;
  int slot = 0, parity = 0;
  uint32_t rows_before = 0;
  for (int64_t row = first_row; row < loss.rows; row += row_step, ++rows_before) {
    const int32_t target = next_target;
    if (row + row_step < loss.rows) next_target = loss.targets[row + row_step];
    const bool counts = loss.counts(target);
    const Granules granules = slice.granules(loss, row);
    const int target_element = slice.target_element(target, granules);
    const bool stores_target = counts && target_element >= 0 && target_element / 4 % kThreads == thread;
    float target_logit = 0;

    float x[C::kPieces][kGroup][4];
    ExponentialSum own;
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      const Granules in_slot(slots + slot * kPiece - piece * kPiece, granules);
      barrier_wait(arrived[slot], parity);
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const int g = piece * kPiece + k * kThreads + thread;
        x[piece][k][0] = x[piece][k][1] = x[piece][k][2] = x[piece][k][3] = kMinusInfinity;
        if (g < granules.count()) in_slot.load<true>(g, x[piece][k]);
      }
      own.add(reinterpret_cast<const float(&)[kGroup * 4]>(x[piece]));
      if (stores_target && target_element / 4 / kPiece == piece)
        target_logit = reinterpret_cast<const float*>(in_slot.values)[target_element];
      slot = slot + 1 == C::kSlots ? 0 : slot + 1;
      if (slot == 0) parity ^= 1;
    }
    own.combine_block<kWarps>(of_warps[rows_before % 2]);
    if (loss.slices > 1) cluster_sums.tell(own, rows_before, block, loss.slices);
    if (leads)
      for (int piece = 0; piece < C::kPieces; ++piece) copy_next();  // all have read what was there

    // While the other blocks' sums are under way: the exponentials, from this block's maximum.
    const float own_shift = own.shift();
#pragma unroll
    for (int i = 0; i < C::kPieces * kGroup * 4; ++i) {
      float& value = reinterpret_cast<float(&)[C::kPieces * kGroup * 4]>(x)[i];
      value = exponential(value - own_shift);
    }
    const ExponentialSum all = loss.slices > 1 ? cluster_sums.wait(rows_before, loss.slices) : own;
    const float to_all = own.maximum == kMinusInfinity ? 0.0f : exponential(own_shift - all.shift());
    const float factor = loss.gradient_scale / all.sum * to_all;

    auto* const d_logits = slice.gradients(loss, row, granules);
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const int g = piece * kPiece + k * kThreads + thread;
        if (g >= granules.count()) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) x[piece][k][e] = counts ? x[piece][k][e] * factor : 0.0f;
        granules.store(d_logits, g, x[piece][k]);
      }
    }
    if (stores_target) finish_target<gradient>(loss, row, all, target_logit, d_logits + target_element);
    if (!counts && leads && first == 0) loss.token_loss[row] = 0;
  }
  if (loss.slices > 1) cluster.sync();  // others are told until here
}

// A block per row, which is read a second time for a gradient: losses alone, and rows too long for the registers of the
// largest cluster. Sums in the order of cross_entropy_rows.
template <Gradient gradient, int kThreads>
__global__ void __launch_bounds__(kThreads) cross_entropy_streamed(const Loss loss) {
  constexpr int kWarps = kThreads / kWarp, kPiece = kThreads * kGroup;
  __shared__ ExponentialSum of_warps[2][kWarps];
  __shared__ ExponentialSum of_slices[kMaxCluster];
  const int64_t row = blockIdx.x;
  const int32_t target = loss.targets[row];
  const int thread = static_cast<int>(threadIdx.x);
  const Slice<gradient> whole{0, static_cast<int>(loss.vocabulary)};
  const Granules granules = whole.granules(loss, row);
  auto* const d_logits = whole.gradients(loss, row, granules);
  if (!loss.counts(target)) {
    if (thread == 0) loss.token_loss[row] = 0;
    if constexpr (gradient != Gradient::none)
      for (int g = thread; g < granules.count(); g += kThreads) granules.store(d_logits, g, {0, 0, 0, 0});
    return;
  }
  for (int i = 0; i < loss.slices; ++i) {
    const int64_t first = i * loss.slice;
    const Slice<gradient> slice{first, static_cast<int>(min(loss.slice, loss.vocabulary - first))};
    const Granules of_slice = slice.granules(loss, row);
    ExponentialSum sum;
    for (int g = thread; g < of_slice.count(); g += kPiece) {
      float x[kGroup][4];
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        x[k][0] = x[k][1] = x[k][2] = x[k][3] = kMinusInfinity;
        if (g + k * kThreads < of_slice.count()) of_slice.template load<false>(g + k * kThreads, x[k]);
      }
      sum.add(reinterpret_cast<const float(&)[kGroup * 4]>(x));
    }
    sum.combine_block<kWarps>(of_warps[i % 2]);
    if (thread == 0) of_slices[i] = sum;
  }
  const int target_element = whole.target_element(target, granules);
  const bool stores_target = target_element / 4 % kThreads == thread;
  const float target_logit = stores_target ? reinterpret_cast<const float*>(granules.values)[target_element] : 0;
  __syncthreads();
  const int other = thread % kMaxCluster;
  ExponentialSum all = other < loss.slices ? of_slices[other] : ExponentialSum();
  all.combine_lanes(kMaxCluster);
  if constexpr (gradient != Gradient::none) {
    const float shift = all.shift();
    const float factor = loss.gradient_scale / all.sum;
    for (int g = thread; g < granules.count(); g += kThreads) {
      float x[4];
      granules.load<false>(g, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = exponential(x[e] - shift) * factor;
      granules.store(d_logits, g, x);
    }
  }
  if (stores_target) finish_target<gradient>(loss, row, all, target_logit, d_logits + target_element);
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

template <Gradient gradient, typename C>
void launch_rows(Device& device, const Loss& loss) {
  const auto kernel = cross_entropy_rows<gradient, C>;
  constexpr int kShared = C::kSlots * C::kPiece * 16;
  FARSPAN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(loss.slices), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(loss.slices));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kShared;
  config.stream = compute_stream(device);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  FARSPAN_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  config.gridDim.x = static_cast<unsigned>(std::clamp<int64_t>(clusters, 1, loss.rows)) * config.gridDim.x;
  FARSPAN_CUDA(cudaLaunchKernelEx(&config, kernel, loss));
}

template <Gradient gradient, int kThreads>
void launch_streamed(Device& device, const Loss& loss) {
  cross_entropy_streamed<gradient, kThreads>
      <<<static_cast<unsigned>(loss.rows), kThreads, 0, compute_stream(device)>>>(loss);
  FARSPAN_CUDA_LAUNCHED();
}

template <Gradient gradient>
void run_rows(Device& device, Loss loss) {
  // Slices that begin inside a granule have one more of these.
  const bool aligned = reinterpret_cast<uintptr_t>(loss.logits) % 16 == 0 && loss.logits_stride % 4 == 0;
  const auto pieces = [&](int threads) { return ceil_div(loss.slice / 4 + (aligned ? 0 : 1), threads * kGroup); };
  loss.slice = round_up(loss.vocabulary, 4);
  if (const int64_t few = pieces(kFewThreads); few <= 2) {
    if constexpr (gradient == Gradient::none)
      return launch_streamed<gradient, kFewThreads>(device, loss);
    else if (few == 1)
      return launch_rows<gradient, Cut<kFewThreads, 1>>(device, loss);
    else
      return launch_rows<gradient, Cut<kFewThreads, 2>>(device, loss);
  }
  while (loss.slices < kMaxCluster && pieces(kThreads) > kMaxPieces) {
    loss.slices *= 2;
    loss.slice = round_up(ceil_div(loss.vocabulary, loss.slices), 4);
  }
  if constexpr (gradient != Gradient::none) switch (pieces(kThreads)) {
      case 2: return launch_rows<gradient, Cut<kThreads, 2>>(device, loss);
      case 3: return launch_rows<gradient, Cut<kThreads, 3>>(device, loss);
      case 4: return launch_rows<gradient, Cut<kThreads, 4>>(device, loss);
      case kMaxPieces: return launch_rows<gradient, Cut<kThreads, kMaxPieces>>(device, loss);
      default: break;
    }
  launch_streamed<gradient, kThreads>(device, loss);
}

template <Gradient gradient, int kPerLane>
void launch_short_rows(Device& device, const Loss& loss) {
  const unsigned int blocks = static_cast<unsigned int>(ceil_div(loss.rows, kShortThreads / kWarp));
  cross_entropy_short_rows<gradient, kPerLane><<<blocks, kShortThreads, 0, compute_stream(device)>>>(loss);
  FARSPAN_CUDA_LAUNCHED();
}

template <Gradient gradient>
void run(Device& device, const Loss& loss) {
  if (loss.vocabulary <= 4 * kWarp) return launch_short_rows<gradient, 4>(device, loss);
  if (loss.vocabulary <= 9 * kWarp) return launch_short_rows<gradient, 9>(device, loss);  // bytes and a few more
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
                     .slices = 1};
  if (!has_gradient)
    run<Gradient::none>(device, loss);
  else if (d_logits.dtype() == DType::f32)
    run<Gradient::f32>(device, loss);
  else
    run<Gradient::bf16>(device, loss);
}

}  // namespace farspan::cuda
