// SPDX-License-Identifier: Apache-2.0
// The gradient of the embedding table, added up in a fixed order and without atomics. The tokens are sorted by their row
// of the table, stably, so that a row's tokens are a run in ascending order. A run is cut from its begin on into pieces
// of kRunPiece tokens, so that a row's sum depends on its own tokens only. A run of one piece goes straight to its row;
// of longer ones each piece leaves its sum in the scratch, and those are added in order.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>

#include "base/math.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;
// Sorted positions whose pieces one block sums, those that begin there; one warp looks for them.
constexpr int kPositions = kWarp;
// Rows whose loads are under way together.
constexpr int kRowsAtOnce = 8;

struct Runs {
  const uint32_t* row;      // (count) of each sorted token; table_rows where it is another rank's
  const int32_t* token;     // (count)
  const int32_t* begin_of;  // (table_rows + 1) where a row's run begins, for rows that have one
  float* pieces;            // (embedding_pieces(count), columns)
  int64_t count, columns, table_rows;
  int64_t d_y_stride, d_weight_stride;
};

__global__ void __launch_bounds__(kThreads) rows_of_tokens(const int32_t* tokens, int64_t count, int64_t first_id,
                                                           int64_t table_rows, uint32_t* row, int32_t* token) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t local = tokens[i] - first_id;
  row[i] = static_cast<uint32_t>(local >= 0 && local < table_rows ? local : table_rows);
  token[i] = static_cast<int32_t>(i);
}

__global__ void __launch_bounds__(kThreads) find_runs(const uint32_t* row, int64_t count, int32_t* begin_of) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count && (i == 0 || row[i] != row[i - 1])) begin_of[row[i]] = static_cast<int32_t>(i);
}

// Where the piece that begins at sorted position `head` of a long run leaves its sum. At most two pieces of long runs
// begin within kRunPiece positions: then the first belongs to a run that began earlier, and the second begins its own.
__device__ __forceinline__ int64_t slot_of(int64_t head, int64_t run_begin) {
  return head / kRunPiece * 2 + (head == run_begin ? 1 : 0);
}

// The sum of the d_y rows of sorted positions [begin, end), in order.
template <typename T, int N>
__device__ __forceinline__ void sum_rows(const Runs& runs, const T* d_y, int64_t begin, int64_t end,
                                         float (&sum)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) sum[e] = 0;
  for (int64_t i = begin; i < end; i += kRowsAtOnce) {
    Vector<T, N> rows[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
      if (i + r < end) rows[r].load(d_y + runs.token[i + r] * runs.d_y_stride);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (i + r >= end) continue;
      float values[N];
      rows[r].get(values);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += values[e];
    }
  }
}

// Where the piece that begins at `head` ends. All threads of the warp call it alike.
__device__ __forceinline__ int64_t end_of_piece(const Runs& runs, int64_t head, uint32_t row) {
  const int64_t limit = min(head + kRunPiece, runs.count);
  for (int64_t base = head; base < limit; base += kWarp) {
    const int64_t mine = base + threadIdx.x % kWarp;
    const unsigned int others = __ballot_sync(0xffffffffu, mine >= limit || runs.row[mine] != row);
    if (others != 0) return base + __ffs(static_cast<int>(others)) - 1;
  }
  return limit;
}

// Pieces that begin at the block's positions, for the block's columns.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) sum_pieces(const Runs runs, const T* d_y, float* d_weight) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPositions;
  // Every warp looks at the positions by itself.
  const int64_t mine = first + threadIdx.x % kWarp;
  const uint32_t my_row = mine < runs.count ? runs.row[mine] : static_cast<uint32_t>(runs.table_rows);
  const int64_t my_begin = my_row < runs.table_rows ? runs.begin_of[my_row] : 0;
  const bool is_head = my_row < runs.table_rows && (mine - my_begin) % kRunPiece == 0;
  unsigned int heads = __ballot_sync(0xffffffffu, is_head);
  for (; heads != 0; heads &= heads - 1) {
    const int lane = __ffs(static_cast<int>(heads)) - 1;
    const int64_t head = first + lane;
    const uint32_t row = __shfl_sync(0xffffffffu, my_row, lane);
    const int64_t run_begin = __shfl_sync(0xffffffffu, my_begin, lane);
    const int64_t end = end_of_piece(runs, head, row);
    const bool longer = head != run_begin || (end == head + kRunPiece && end < runs.count && runs.row[end] == row);
    if (column >= runs.columns) continue;
    float* const target = longer ? runs.pieces + slot_of(head, run_begin) * runs.columns + column
                                 : d_weight + row * runs.d_weight_stride + column;
    Vector<float, N> before;  // on its way while the rows are summed
    before.clear();
    if (!longer) before.load(target);
    float sum[N], start[N];
    sum_rows<T, N>(runs, d_y + column, head, end, sum);
    before.get(start);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] += start[e];
    Vector<float, N> after;
    after.set(sum);
    after.store(target);
  }
}

// Adds up the pieces of runs that are longer than one. Each block looks at kRunPiece positions, in which at most one
// such run begins.
template <int N>
__global__ void __launch_bounds__(kRunPiece) add_pieces(const Runs runs, float* d_weight) {
  __shared__ int64_t begin;
  if (threadIdx.x == 0) begin = -1;
  __syncthreads();
  const int64_t mine = static_cast<int64_t>(blockIdx.x) * kRunPiece + threadIdx.x;
  if (mine + kRunPiece < runs.count) {
    const uint32_t row = runs.row[mine];
    if (row < runs.table_rows && runs.begin_of[row] == mine && runs.row[mine + kRunPiece] == row) begin = mine;
  }
  __syncthreads();
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kRunPiece + threadIdx.x) * N;
  if (begin < 0 || column >= runs.columns) return;
  const uint32_t row = runs.row[begin];
  float* const target = d_weight + row * runs.d_weight_stride + column;
  float sum[N];
#pragma unroll
  for (int e = 0; e < N; ++e) sum[e] = 0;
  bool more = true;
  for (int64_t head = begin; more; head += kRunPiece * kRowsAtOnce) {
    Vector<float, N> pieces[kRowsAtOnce];
    bool there[kRowsAtOnce];
#pragma unroll
    for (int p = 0; p < kRowsAtOnce; ++p) {
      const int64_t at = head + p * kRunPiece;
      there[p] = at < runs.count && runs.row[at] == row;
      if (there[p]) pieces[p].load(runs.pieces + slot_of(at, begin) * runs.columns + column);
    }
#pragma unroll
    for (int p = 0; p < kRowsAtOnce; ++p) {
      if (!there[p]) continue;
      float values[N];
      pieces[p].get(values);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += values[e];
    }
    more = there[kRowsAtOnce - 1];
  }
  Vector<float, N> vector;
  float before[N];
  vector.load(target);
  vector.get(before);
#pragma unroll
  for (int e = 0; e < N; ++e) sum[e] += before[e];
  vector.set(sum);
  vector.store(target);
}

// The parts of the op's scratch (ops/cuda/scratch.h).
class Scratch {
 public:
  explicit Scratch(void* memory) : next_(static_cast<std::byte*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* const part = reinterpret_cast<T*>(next_);
    next_ += scratch_part(count * static_cast<int64_t>(sizeof(T)));
    return part;
  }

 private:
  std::byte* next_;
};

struct Sorted {
  const uint32_t* row;
  const int32_t* token;
};

// The tokens of the table's rows [first_id, first_id + table_rows) by row, then by number; all others follow.
Sorted sort_tokens(Device& device, Scratch& scratch, const Tensor& tokens, int64_t first_id, int64_t table_rows) {
  const int64_t count = tokens.dim(0);
  cub::DoubleBuffer<uint32_t> row(scratch.take<uint32_t>(count), scratch.take<uint32_t>(count));
  cub::DoubleBuffer<int32_t> token(scratch.take<int32_t>(count), scratch.take<int32_t>(count));
  const cudaStream_t stream = compute_stream(device);
  rows_of_tokens<<<grid_size(ceil_div(count, kThreads)), kThreads, 0, stream>>>(
      tokens.data<int32_t>(), count, first_id, table_rows, row.Current(), token.Current());
  FARSPAN_CUDA_LAUNCHED();
  const int bits = std::bit_width(static_cast<uint64_t>(table_rows));
  const int items = static_cast<int>(count);
  size_t bytes = 0;
  FARSPAN_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, bytes, row, token, items, 0, bits, stream));
  FARSPAN_CHECK(static_cast<int64_t>(bytes) <= embedding_sort_bytes(count),
                "embedding_backward: sorting {} tokens asks for {} bytes, {} are set aside", count, bytes,
                embedding_sort_bytes(count));
  void* const memory = scratch.take<std::byte>(embedding_sort_bytes(count));
  FARSPAN_CUDA(cub::DeviceRadixSort::SortPairs(memory, bytes, row, token, items, 0, bits, stream));
  return {row.Current(), token.Current()};
}

template <typename T, int N>
void add_runs(Device& device, const Runs& runs, const Tensor& d_y, const Tensor& d_weight) {
  const int64_t vectors = ceil_div(runs.columns, N);
  const int threads = static_cast<int>(std::min<int64_t>(kThreads, round_up(vectors, kWarp)));
  const auto columns_of = [&](int across) { return static_cast<unsigned>(ceil_div(vectors, across)); };
  const cudaStream_t stream = compute_stream(device);
  const dim3 grid(grid_size(ceil_div(runs.count, kPositions)), columns_of(threads));
  sum_pieces<T, N><<<grid, threads, 0, stream>>>(runs, d_y.data<T>(), d_weight.data<float>());
  FARSPAN_CUDA_LAUNCHED();
  if (runs.count <= kRunPiece) return;
  const dim3 pieces_grid(grid_size(ceil_div(runs.count, kRunPiece)), columns_of(kRunPiece));
  add_pieces<N><<<pieces_grid, kRunPiece, 0, stream>>>(runs, d_weight.data<float>());
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace

void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, const VocabularyPart& part,
                        const Tensor& d_weight) {
  if (d_y.numel() == 0 || d_weight.numel() == 0) return;
  const int64_t count = d_y.dim(0), rows = d_weight.dim(0);
  FARSPAN_CHECK(count < std::numeric_limits<int32_t>::max(), "embedding_backward: {} tokens in one call", count);
  Scratch scratch(device.scratch());
  const Sorted sorted = sort_tokens(device, scratch, tokens, part.first_id, rows);
  int32_t* const begin_of = scratch.take<int32_t>(rows + 1);
  find_runs<<<grid_size(ceil_div(count, kThreads)), kThreads, 0, compute_stream(device)>>>(sorted.row, count, begin_of);
  FARSPAN_CUDA_LAUNCHED();
  const Runs runs = {.row = sorted.row,
                     .token = sorted.token,
                     .begin_of = begin_of,
                     .pieces = scratch.take<float>(embedding_pieces(count) * d_y.dim(1)),
                     .count = count,
                     .columns = d_y.dim(1),
                     .table_rows = rows,
                     .d_y_stride = d_y.stride(0),
                     .d_weight_stride = d_weight.stride(0)};
  const bool bf16 = d_y.dtype() == DType::bf16;
  const int n = bf16 ? kVectorElements<BFloat16> : kVectorElements<float>;
  const bool vectors = holds_vectors(d_y, n) && holds_vectors(d_weight, n);
  if (bf16 && vectors)
    add_runs<BFloat16, kVectorElements<BFloat16>>(device, runs, d_y, d_weight);
  else if (bf16)
    add_runs<BFloat16, 1>(device, runs, d_y, d_weight);
  else if (vectors)
    add_runs<float, kVectorElements<float>>(device, runs, d_y, d_weight);
  else
    add_runs<float, 1>(device, runs, d_y, d_weight);
}

}  // namespace farspan::cuda
