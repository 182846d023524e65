// SPDX-License-Identifier: Apache-2.0
// The backward attention task, compiled once per instruction set. Included by attention_kernels.cpp only.
//
// Per row tile and the task's chunk of keys (rows of S are rows, lanes are keys; products below have lanes of
// channels):
//
//   P = exp(Q K^T - lse);  dS = P (dO V^T - delta);  dV += P^T dO;  dK += dS^T Q;  dQ += scale dS K
//
// With dropout, M holding 0 or the inverse of the share kept:  dS = P (M dO V^T - delta);  dV += (M P)^T dO.
//
// Q is packed times scale. P and dS are computed for whole register blocks; what is read from them afterwards are runs
// of visible pairs only, so a forbidden pair's value, NaN or not, goes nowhere.
//
// Source: Dao, FlashAttention-2 (2023), algorithm 2.

#if defined(FARSPAN_OPS_CPU_ATTENTION_BACKWARD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARSPAN_OPS_CPU_ATTENTION_BACKWARD_INL_H
#undef FARSPAN_OPS_CPU_ATTENTION_BACKWARD_INL_H
#else
#define FARSPAN_OPS_CPU_ATTENTION_BACKWARD_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu::HWY_NAMESPACE {

// A task's keys, packed, and their gradients.
struct KeyChunk {
  KeyRange keys;                      // of the block
  int64_t count = 0;                  // keys in the chunk
  float* key = nullptr;               // (kBackwardKeys, padded D)
  float* key_transposed = nullptr;    // panels of (padded D, kPanel)
  float* value_transposed = nullptr;  // panels of (padded D, kPanel)
  float* d_key = nullptr;             // (kBackwardKeys, padded D)
  float* d_value = nullptr;           // (kBackwardKeys, padded D)
};

// The row tile that passes by.
struct RowTile {
  int64_t first_row = 0;
  int64_t rows = 0;
  float* query = nullptr;       // (kBackwardRows, padded D), times scale
  float* d_out = nullptr;       // (kBackwardRows, padded D)
  float* d_query = nullptr;     // (kBackwardRows, padded D), this chunk's share before scale
  float* weights = nullptr;     // P (kBackwardRows, kBackwardKeys)
  float* d_scores = nullptr;    // dS (kBackwardRows, kBackwardKeys)
  float* lse = nullptr;         // (kBackwardRows)
  float* delta = nullptr;       // (kBackwardRows)
  float* kept = nullptr;        // M (kBackwardRows, kBackwardKeys); null: no dropout
  KeyRange* visible = nullptr;  // (kBackwardRows), counted from the chunk's first key, inside the chunk
};

// P = exp(Q K^T - lse)
struct WeightsFinish {
  float* weights;
  const float* lse;
  template <int kRows, int kVectors>
  HWY_INLINE void finish(int64_t row, const Accumulators<kRows, kVectors>& sum) const {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVectors; ++c) {
        const Vec x = hn::Sub(sum.v[r][c], hn::Set(kFloats, lse[row + r]));
        // At most 0 but for rounding, unless lse is not that of these keys; then large, and not wrapped around.
        hn::Store(exp(hn::Min(hn::Set(kFloats, 88.0f), x)), kFloats, weights + (row + r) * kBackwardKeys + c * kLanes);
      }
  }
};

// dS = P (dO V^T - delta)
struct ScoresFinish {
  float* weights;
  float* d_scores;
  const float* delta;
  template <int kRows, int kVectors>
  HWY_INLINE void finish(int64_t row, const Accumulators<kRows, kVectors>& sum) const {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVectors; ++c) {
        const int64_t at = (row + r) * kBackwardKeys + c * kLanes;
        const Vec difference = hn::Sub(sum.v[r][c], hn::Set(kFloats, delta[row + r]));
        hn::Store(hn::Mul(hn::Load(kFloats, weights + at), difference), kFloats, d_scores + at);
      }
  }
};

// dS = P (M dO V^T - delta), then P = M P, which is all that is still asked of it.
struct DroppedScoresFinish {
  float* weights;
  float* d_scores;
  const float* delta;
  const float* kept;
  template <int kRows, int kVectors>
  HWY_INLINE void finish(int64_t row, const Accumulators<kRows, kVectors>& sum) const {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVectors; ++c) {
        const int64_t at = (row + r) * kBackwardKeys + c * kLanes;
        const Vec factor = hn::Load(kFloats, kept + at), weight = hn::Load(kFloats, weights + at);
        const Vec difference = hn::MulSub(factor, sum.v[r][c], hn::Set(kFloats, delta[row + r]));
        hn::Store(hn::Mul(weight, difference), kFloats, d_scores + at);
        hn::Store(hn::Mul(weight, factor), kFloats, weights + at);
      }
  }
};

// P and dS of a register block of rows, if any of them sees a key of the panel. Finish: ScoresFinish or
// DroppedScoresFinish.
template <typename Finish>
struct ScoreBlock {
  const RowTile& tile;
  int64_t head_size;
  int64_t stride;
  KeyRange panel;  // of the chunk
  const float* key_transposed;
  const float* value_transposed;
  Finish finish;

  template <int kRows>
  void rows(int64_t row) const {
    bool any = false;
    for (int r = 0; r < kRows; ++r) any = any || !intersect(tile.visible[row + r], panel).empty();
    if (!any) return;
    using WeightBlock = ProductBlock<Left::k_contiguous, kPanelVectors, WeightsFinish>;
    WeightBlock{tile.query, stride, key_transposed, kPanel, head_size, {finish.weights, tile.lse}}.template rows<kRows>(
        row);
    using GradientBlock = ProductBlock<Left::k_contiguous, kPanelVectors, Finish>;
    GradientBlock{tile.d_out, stride, value_transposed, kPanel, head_size, finish}.template rows<kRows>(row);
  }
};

HWY_INLINE void compute_scores(const KeyChunk& chunk, const RowTile& tile, int64_t head_size) {
  const int64_t padded = padded_head_size(head_size);
  for (int64_t k = 0; k < chunk.count; k += kPanel) {
    const auto compute = [&](const auto& finish) HWY_ATTR {
      using Finish = std::remove_cvref_t<decltype(finish)>;
      const float* const key = chunk.key_transposed + k * padded;
      const float* const value = chunk.value_transposed + k * padded;
      for_row_blocks(tile.rows, ScoreBlock<Finish>{tile, head_size, padded, {k, k + kPanel}, key, value, finish});
    };
    if (tile.kept == nullptr)
      compute(ScoresFinish{tile.weights + k, tile.d_scores + k, tile.delta});
    else
      compute(DroppedScoresFinish{tile.weights + k, tile.d_scores + k, tile.delta, tile.kept + k});
  }
}

// Adds to d_key and d_value of a register block of keys: runs of rows that see all of its keys by products, the rows
// that see some by single pairs.
struct KeyGradientBlock {
  const KeyChunk& chunk;
  const RowTile& tile;
  int64_t stride;

  template <int kKeys>
  HWY_INLINE void add_run(int64_t key, int64_t row, int64_t count) const {
    const int64_t at = row * kBackwardKeys + key;
    const auto add = channel_product<kKeys, Left::rows_contiguous, Add>;
    add(tile.weights + at, kBackwardKeys, tile.d_out + row * stride, chunk.d_value + key * stride, stride, count);
    add(tile.d_scores + at, kBackwardKeys, tile.query + row * stride, chunk.d_key + key * stride, stride, count);
  }

  template <int kKeys>
  void rows(int64_t key) const {
    const KeyRange block{key, key + kKeys};
    int64_t row = 0;
    while (row < tile.rows) {
      int64_t end = row;
      while (end < tile.rows && tile.visible[end].begin <= block.begin && block.end <= tile.visible[end].end) ++end;
      if (end > row) {
        add_run<kKeys>(key, row, end - row);
        row = end;
        continue;
      }
      const KeyRange seen = intersect(tile.visible[row], block);
      for (int64_t k = seen.begin; k < seen.end; ++k) {
        const int64_t at = row * kBackwardKeys + k;
        add_scaled(tile.weights[at], tile.d_out + row * stride, chunk.d_value + k * stride, stride);
        add_scaled(tile.d_scores[at], tile.query + row * stride, chunk.d_key + k * stride, stride);
      }
      ++row;
    }
  }
};

// d_query of a register block of rows: the keys that all of them see by products, the others by single pairs.
struct QueryGradientBlock {
  const KeyChunk& chunk;
  const RowTile& tile;
  int64_t stride;

  template <int kRows>
  void rows(int64_t row) const {
    KeyRange all{0, chunk.count};
    for (int r = 0; r < kRows; ++r) all = intersect(all, tile.visible[row + r]);
    if (all.empty()) all = {};
    channel_product<kRows, Left::k_contiguous, Store>(tile.d_scores + row * kBackwardKeys + all.begin, kBackwardKeys,
                                                      chunk.key + all.begin * stride, tile.d_query + row * stride,
                                                      stride, all.end - all.begin);
    for (int r = 0; r < kRows; ++r) {
      const KeyRange seen = tile.visible[row + r];
      add_pairs(row + r, {seen.begin, std::min(seen.end, all.begin)});
      add_pairs(row + r, {std::max(seen.begin, all.end), seen.end});
    }
  }

  HWY_INLINE void add_pairs(int64_t row, KeyRange keys) const {
    for (int64_t k = keys.begin; k < keys.end; ++k)
      add_scaled(tile.d_scores[row * kBackwardKeys + k], chunk.key + k * stride, tile.d_query + row * stride, stride);
  }
};

// Packs keys and values. Lanes past the last key hold zeros.
inline void open_chunk(const KernelBlock& block, int64_t kv_head, KeyChunk& chunk) {
  const int64_t padded = padded_head_size(block.head_size);
  const int64_t lanes = round_up(chunk.count, kPanel);
  float* const value = chunk.d_value;  // lies here until it is transposed
  for (int64_t k = 0; k < chunk.count; ++k) {
    const int64_t j = chunk.keys.begin + k;
    load_row(block.key, block.bf16, j, kv_head, block.head_size, padded, 1.0f, chunk.key + k * padded);
    load_row(block.value, block.bf16, j, kv_head, block.head_size, padded, 1.0f, value + k * padded);
  }
  std::fill_n(chunk.key + chunk.count * padded, (lanes - chunk.count) * padded, 0.0f);
  std::fill_n(value + chunk.count * padded, (lanes - chunk.count) * padded, 0.0f);
  for (int64_t at = 0; at < lanes * padded; at += kPanel * padded) {
    transpose(chunk.key + at, padded, kPanel, padded, chunk.key_transposed + at, kPanel);
    transpose(value + at, padded, kPanel, padded, chunk.value_transposed + at, kPanel);
  }
  std::fill_n(chunk.d_key, chunk.count * padded, 0.0f);
  std::fill_n(chunk.d_value, chunk.count * padded, 0.0f);
}

inline void open_row_tile(const BackwardArguments& args, int64_t kv_head, const KeyChunk& chunk, RowTile& tile) {
  const KernelBlock& block = args.block;
  const int64_t padded = padded_head_size(block.head_size);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const KeyRange range = intersect(block.visible(tile.first_row + r), chunk.keys);
    tile.visible[r] =
        range.empty() ? KeyRange{} : KeyRange{range.begin - chunk.keys.begin, range.end - chunk.keys.begin};
    const int64_t i = block.query_of(tile.first_row + r);
    const int64_t a = block.head_of(tile.first_row + r, kv_head);
    load_row(block.query, block.bf16, i, a, block.head_size, padded, block.scale, tile.query + r * padded);
    load_row(args.d_out, block.bf16, i, a, block.head_size, padded, 1.0f, tile.d_out + r * padded);
    // Keys whose weights were all zero leave lse at -inf; they pass nothing back.
    const float lse = args.lse.at(i, a);
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    tile.lse[r] = lse == -kInfinity ? kInfinity : lse;
    tile.delta[r] = args.delta.at(i, a);
    const KeyRange seen = tile.visible[r];
    if (tile.kept != nullptr && !seen.empty())
      dropout_factors(block.draw_keys[a], static_cast<uint64_t>(block.query_begin + i),
                      block.key_begin + chunk.keys.begin + seen.begin, seen.end - seen.begin, block.drop,
                      tile.kept + r * kBackwardKeys + seen.begin);
  }
}

// Adds the tile's d_query once the chunk before this one has, if that one sees the tile at all.
inline void add_d_query(const BackwardArguments& args, int64_t kv_head, int64_t chunk_index, int64_t tile_index,
                        const RowTile& tile) {
  const KernelBlock& block = args.block;
  if (args.tile_ranges[tile_index].begin < chunk_index * kBackwardKeys) {
    const std::atomic<int64_t>& before = args.progress[(chunk_index - 1) * block.kv_heads + kv_head];
    while (before.load(std::memory_order_acquire) <= tile_index) std::this_thread::yield();
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (tile.visible[r].empty()) continue;
    const int64_t i = block.query_of(tile.first_row + r);
    const int64_t a = block.head_of(tile.first_row + r, kv_head);
    add_row(block.scale, tile.d_query + r * padded_head_size(block.head_size), args.d_query.row(i, a), block.head_size);
  }
}

// Floats of scratch that a backward task takes.
inline int64_t backward_scratch(int64_t head_size) {
  const int64_t padded = padded_head_size(head_size);
  constexpr int64_t kRangeFloats = static_cast<int64_t>(sizeof(KeyRange) / sizeof(float));
  return (5 * kBackwardKeys + 3 * kBackwardRows) * padded + 3 * kBackwardRows * kBackwardKeys +
         (2 + kRangeFloats) * kBackwardRows;
}

// One chunk of keys of one key/value head.
void backward_task(const BackwardArguments& args, int64_t kv_head, int64_t chunk_index, float* scratch) {
  const KernelBlock& block = args.block;
  const int64_t padded = padded_head_size(block.head_size);
  ScratchCursor cursor(scratch);
  KeyChunk chunk;
  chunk.keys = {chunk_index * kBackwardKeys, std::min((chunk_index + 1) * kBackwardKeys, block.keys)};
  chunk.count = chunk.keys.end - chunk.keys.begin;
  for (float** part : {&chunk.key, &chunk.key_transposed, &chunk.value_transposed, &chunk.d_key, &chunk.d_value})
    *part = cursor.take(kBackwardKeys * padded);
  RowTile tile;
  for (float** part : {&tile.query, &tile.d_out, &tile.d_query}) *part = cursor.take(kBackwardRows * padded);
  for (float** part : {&tile.weights, &tile.d_scores}) *part = cursor.take(kBackwardRows * kBackwardKeys);
  for (float** part : {&tile.lse, &tile.delta}) *part = cursor.take(kBackwardRows);
  tile.visible = cursor.take_ranges(kBackwardRows);
  if (block.drops()) {
    // Register blocks read it whole; outside what a row sees, what they find there goes nowhere.
    tile.kept = cursor.take(kBackwardRows * kBackwardKeys);
    std::fill_n(tile.kept, kBackwardRows * kBackwardKeys, 0.0f);
  }
  open_chunk(block, kv_head, chunk);

  std::atomic<int64_t>& progress = args.progress[chunk_index * block.kv_heads + kv_head];
  const int64_t tiles = ceil_div(block.rows(), kBackwardRows);
  for (int64_t t = 0; t < tiles; ++t) {
    if (!intersect(args.tile_ranges[t], chunk.keys).empty()) {
      tile.first_row = t * kBackwardRows;
      tile.rows = std::min(kBackwardRows, block.rows() - tile.first_row);
      open_row_tile(args, kv_head, chunk, tile);
      compute_scores(chunk, tile, block.head_size);
      for_row_blocks(chunk.count, KeyGradientBlock{chunk, tile, padded});
      for_row_blocks(tile.rows, QueryGradientBlock{chunk, tile, padded});
      add_d_query(args, kv_head, chunk_index, t, tile);
    }
    progress.store(t + 1, std::memory_order_release);
  }
  for (int64_t k = 0; k < chunk.count; ++k) {
    add_row(1.0f, chunk.d_key + k * padded, args.d_key.row(chunk.keys.begin + k, kv_head), block.head_size);
    add_row(1.0f, chunk.d_value + k * padded, args.d_value.row(chunk.keys.begin + k, kv_head), block.head_size);
  }
}

}  // namespace farspan::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
