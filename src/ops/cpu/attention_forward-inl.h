// SPDX-License-Identifier: Apache-2.0
// The forward attention task, compiled once per instruction set. Included by attention_kernels.cpp only.
//
// Lanes are rows throughout. Per key tile and panel of rows:
//
//   S = K Q^T;  m' = max(m, max_j S_j);  P = exp(S - m');  alpha = exp(m - m');  l = alpha l + sum_j P_j;  O = alpha O
//   + V^T P
//
// Dropout acts on P between its sum and the product with V.
//
// Online softmax: Milakov and Gimelshein (2018), algorithm 3; Dao et al., FlashAttention (2022), algorithm 1.

#if defined(FARSPAN_OPS_CPU_ATTENTION_FORWARD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARSPAN_OPS_CPU_ATTENTION_FORWARD_INL_H
#undef FARSPAN_OPS_CPU_ATTENTION_FORWARD_INL_H
#else
#define FARSPAN_OPS_CPU_ATTENTION_FORWARD_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu::HWY_NAMESPACE {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// transpose works on fours.
constexpr int64_t panel_channels(int64_t head_size) { return round_up(head_size, 4); }

// kPanel rows with their running state.
struct ForwardPanel {
  int64_t first_row = 0;
  int64_t rows = 0;          // lanes in use
  float* query = nullptr;    // (D, kPanel), times scale
  float* out = nullptr;      // (D, kPanel), not yet divided by sum
  float* highest = nullptr;  // (kPanel) m: largest score so far
  float* sum = nullptr;      // (kPanel) l: sum of exp(score - m)
  KeyRange some;             // no row sees a key outside
  KeyRange all;              // every row that sees anything sees these; may be empty
  // Dropout: key of the draws and position of each lane's query.
  alignas(64) uint64_t draw_key[kPanel];
  alignas(64) uint64_t query_position[kPanel];
};

// The key tile that passes by.
struct ForwardTile {
  KeyRange keys;
  const float* key = nullptr;    // (kForwardKeys, padded D)
  const float* value = nullptr;  // (kForwardKeys, padded D)
};

// Tile-relative key ranges of a panel: [some.begin, all.begin) and [all.end, some.end) need a look at each pair.
struct TileRanges {
  KeyRange some;
  KeyRange all;
};

HWY_INLINE TileRanges tile_ranges(const ForwardPanel& panel, const ForwardTile& tile) {
  const KeyRange some = intersect(panel.some, tile.keys);
  KeyRange all = intersect(panel.all, some);
  if (all.empty()) all = {some.end, some.end};
  const int64_t origin = tile.keys.begin;
  return {{some.begin - origin, some.end - origin}, {all.begin - origin, all.end - origin}};
}

// Tile-relative first and past-last visible key of each lane, as floats: exact, and comparable without another type.
struct LaneBounds {
  alignas(64) float lo[kPanel];
  alignas(64) float hi[kPanel];
};

inline void fill_bounds(const KernelBlock& block, const ForwardPanel& panel, const ForwardTile& tile,
                        LaneBounds& bounds) {
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    KeyRange range;
    if (lane < panel.rows) range = block.visible(panel.first_row + lane);
    const int64_t size = tile.keys.end - tile.keys.begin;
    bounds.lo[lane] = static_cast<float>(std::clamp<int64_t>(range.begin - tile.keys.begin, 0, size));
    bounds.hi[lane] = static_cast<float>(std::clamp<int64_t>(range.end - tile.keys.begin, 0, size));
  }
}

// Scores -> weights in place, and the state's maxima and sums. `scores` is (kForwardKeys, kPanel); `alpha` (kPanel)
// receives the factor for what was summed before. Weights of pairs that may not see each other become -1, which
// add_unless_negative passes over.
struct PanelSoftmax {
  float* scores;
  float* alpha;
  const LaneBounds* bounds;

  HWY_INLINE hn::Mask<Floats> visible(int64_t key, int64_t lane) const {
    const Vec k = hn::Set(kFloats, static_cast<float>(key));
    return hn::And(hn::Ge(k, hn::Load(kFloats, bounds->lo + lane)), hn::Lt(k, hn::Load(kFloats, bounds->hi + lane)));
  }

  HWY_INLINE Vec masked_highest(KeyRange keys, int64_t lane, Vec highest) const {
    for (int64_t k = keys.begin; k < keys.end; ++k) {
      const Vec s = hn::Load(kFloats, scores + k * kPanel + lane);
      highest = hn::IfThenElse(visible(k, lane), hn::Max(highest, s), highest);
    }
    return highest;
  }

  HWY_INLINE Vec masked_weights(KeyRange keys, int64_t lane, Vec shift, Vec sum) const {
    for (int64_t k = keys.begin; k < keys.end; ++k) {
      float* at = scores + k * kPanel + lane;
      // Without its sign bit a NaN too stays a visible weight.
      const Vec p = hn::Abs(exp(hn::Sub(hn::Load(kFloats, at), shift)));
      const auto seen = visible(k, lane);
      sum = hn::Add(sum, hn::IfThenElseZero(seen, p));
      hn::Store(hn::IfThenElse(seen, p, hn::Set(kFloats, -1.0f)), kFloats, at);
    }
    return sum;
  }

  HWY_INLINE void run(const TileRanges& ranges, float* highest, float* total) const {
    const KeyRange before{ranges.some.begin, ranges.all.begin};
    const KeyRange after{ranges.all.end, ranges.some.end};
    for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
      const Vec old = hn::Load(kFloats, highest + lane);
      Vec top = masked_highest(before, lane, old);
      for (int64_t k = ranges.all.begin; k < ranges.all.end; ++k)
        top = hn::Max(top, hn::Load(kFloats, scores + k * kPanel + lane));
      top = masked_highest(after, lane, top);
      // While nothing of weight was seen m is -inf; subtracting 0 instead gives weights 0, not NaN.
      const Vec shift = hn::IfThenZeroElse(hn::Eq(top, hn::Set(kFloats, kMinusInfinity)), top);

      Vec sum = masked_weights(before, lane, shift, hn::Zero(kFloats));
      for (int64_t k = ranges.all.begin; k < ranges.all.end; ++k) {
        float* at = scores + k * kPanel + lane;
        const Vec p = exp(hn::Sub(hn::Load(kFloats, at), shift));
        sum = hn::Add(sum, p);
        hn::Store(p, kFloats, at);
      }
      sum = masked_weights(after, lane, shift, sum);
      const Vec a = exp(hn::Sub(old, shift));
      hn::Store(a, kFloats, alpha + lane);
      hn::Store(top, kFloats, highest + lane);
      hn::Store(hn::MulAdd(hn::Load(kFloats, total + lane), a, sum), kFloats, total + lane);
    }
  }
};

// Weights of visible pairs become 0 or the weight over the share kept, after their sums were taken; -1 stays.
struct PanelDropout {
  const ForwardPanel& panel;
  const DropoutRule& rule;
  int64_t origin;  // position of the tile's first key
  KeyRange keys;   // of the tile
  float* weights;  // (kForwardKeys, kPanel)

  HWY_INLINE void key(WordVec draws, int64_t position, int64_t lane) const {
    const int64_t k = position - origin;
    if (k < keys.begin || k >= keys.end) return;
    const hn::Rebind<uint32_t, Words> draw_tag;
    const hn::Rebind<float, Words> weight_tag;
    float* const at = weights + k * kPanel + lane;
    const auto drops = hn::Lt(hn::TruncateTo(draw_tag, draws), hn::Set(draw_tag, rule.threshold));
    const auto weight = hn::Load(weight_tag, at);
    const auto kept =
        hn::IfThenZeroElse(hn::RebindMask(weight_tag, drops), hn::Mul(weight, hn::Set(weight_tag, rule.scale)));
    hn::Store(hn::IfNegativeThenElse(weight, weight, kept), weight_tag, at);
  }

  HWY_INLINE void run() const {
    for (int64_t position = round_down(origin + keys.begin, 4); position < origin + keys.end; position += 4)
      for (int64_t lane = 0; lane < kPanel; lane += hn::MaxLanes(kWords)) {
        const WordVec key_words = hn::Load(kWords, panel.draw_key + lane);
        WordVec c0 = hn::Set(kWords, static_cast<uint64_t>(position / 4));
        WordVec c1 = hn::ShiftRight<32>(c0);
        WordVec c2 = hn::Load(kWords, panel.query_position + lane);
        WordVec c3 = hn::ShiftRight<32>(c2);
        philox(c0, c1, c2, c3, key_words, hn::ShiftRight<32>(key_words));
        key(c0, position, lane);
        key(c1, position + 1, lane);
        key(c2, position + 2, lane);
        key(c3, position + 3, lane);
      }
  }
};

// O = alpha O + V^T P for one block of channels.
struct ValueBlock {
  const float* value;
  int64_t value_stride;
  const float* weights;
  const float* alpha;
  float* out;
  TileRanges ranges;

  template <int kRows>
  void rows(int64_t channel) const {
    constexpr Left kOrder = Left::rows_contiguous;
    const float* v = value + channel;
    Accumulators<kRows, kPanelVectors> sum;
    sum.clear();
    const auto [some, all] = ranges;
    sum.template add_unless_negative<kOrder>(v + some.begin * value_stride, value_stride, weights + some.begin * kPanel,
                                             kPanel, all.begin - some.begin);
    sum.template add<kOrder>(v + all.begin * value_stride, value_stride, weights + all.begin * kPanel, kPanel,
                             all.end - all.begin);
    sum.template add_unless_negative<kOrder>(v + all.end * value_stride, value_stride, weights + all.end * kPanel,
                                             kPanel, some.end - all.end);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kPanelVectors; ++c) {
        float* at = out + (channel + r) * kPanel + c * kLanes;
        hn::Store(hn::MulAdd(hn::Load(kFloats, at), hn::Load(kFloats, alpha + c * kLanes), sum.v[r][c]), kFloats, at);
      }
  }
};

HWY_INLINE void attend(const KernelBlock& block, const ForwardPanel& panel, const ForwardTile& tile, float* scores,
                       float* alpha) {
  const TileRanges ranges = tile_ranges(panel, tile);
  if (ranges.some.empty()) return;
  LaneBounds bounds;
  if (ranges.some.begin < ranges.all.begin || ranges.all.end < ranges.some.end) fill_bounds(block, panel, tile, bounds);
  const int64_t stride = padded_head_size(block.head_size);
  const int64_t first = ranges.some.begin;
  for_row_blocks(
      ranges.some.end - first,
      ProductBlock<Left::k_contiguous, kPanelVectors, Store>{
          tile.key + first * stride, stride, panel.query, kPanel, block.head_size, {scores + first * kPanel, kPanel}});
  PanelSoftmax{scores, alpha, &bounds}.run(ranges, panel.highest, panel.sum);
  if (block.drops()) PanelDropout{panel, block.drop, block.key_begin + tile.keys.begin, ranges.some, scores}.run();
  for_row_blocks(block.head_size, ValueBlock{tile.value, stride, scores, alpha, panel.out, ranges});
}

// Packs queries and state. A row that has seen nothing yet starts from zero, whatever its output holds; one that sees
// nothing of this block computes on zeros, and nothing of it is written back. `rows` is scratch for (kPanel, padded D).
inline void open_panel(const ForwardArguments& args, int64_t kv_head, float* rows, ForwardPanel& panel) {
  const KernelBlock& block = args.block;
  const int64_t padded = padded_head_size(block.head_size);
  const int64_t channels = panel_channels(block.head_size);
  panel.some = {block.keys, 0};
  panel.all = {0, block.keys};
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    const int64_t r = panel.first_row + lane;
    const KeyRange range = lane < panel.rows ? block.visible(r) : KeyRange{};
    if (range.empty()) {
      std::fill_n(rows + lane * padded, padded, 0.0f);
      continue;
    }
    panel.some = {std::min(panel.some.begin, range.begin), std::max(panel.some.end, range.end)};
    panel.all = intersect(panel.all, range);
    load_row(block.query, block.bf16, block.query_of(r), block.head_of(r, kv_head), block.head_size, padded,
             block.scale, rows + lane * padded);
  }
  transpose(rows, padded, kPanel, channels, panel.query, kPanel);

  if (block.drops())
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t r = panel.first_row + std::min(lane, panel.rows - 1);
      panel.draw_key[lane] = block.draw_keys[block.head_of(r, kv_head)];
      panel.query_position[lane] = static_cast<uint64_t>(block.query_begin + block.query_of(r));
    }

  bool any_started = false;
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    panel.highest[lane] = kMinusInfinity;
    panel.sum[lane] = 0;
    std::fill_n(rows + lane * padded, padded, 0.0f);
    const int64_t r = panel.first_row + lane;
    if (lane >= panel.rows || block.visible(r).empty()) continue;
    const int64_t i = block.query_of(r);
    const int64_t a = block.head_of(r, kv_head);
    const float lse = args.lse.at(i, a);
    if (lse == kMinusInfinity) continue;
    any_started = true;
    panel.highest[lane] = lse;
    panel.sum[lane] = 1;
    std::copy_n(args.out.row(i, a), block.head_size, rows + lane * padded);
  }
  if (any_started)
    transpose(rows, padded, kPanel, channels, panel.out, kPanel);
  else
    std::fill_n(panel.out, channels * kPanel, 0.0f);
}

// out = O / l, lse = m + log l
inline void close_panel(const ForwardArguments& args, int64_t kv_head, float* rows, const ForwardPanel& panel) {
  const KernelBlock& block = args.block;
  const int64_t padded = padded_head_size(block.head_size);
  for (int64_t d = 0; d < block.head_size; ++d)
    for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
      float* at = panel.out + d * kPanel + lane;
      hn::Store(hn::Div(hn::Load(kFloats, at), hn::Load(kFloats, panel.sum + lane)), kFloats, at);
    }
  transpose(panel.out, kPanel, panel_channels(block.head_size), kPanel, rows, padded);
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    const int64_t r = panel.first_row + lane;
    const float sum = panel.sum[lane];
    if (sum == 0 || block.visible(r).empty()) continue;
    const int64_t i = block.query_of(r);
    const int64_t a = block.head_of(r, kv_head);
    std::copy_n(rows + lane * padded, block.head_size, args.out.row(i, a));
    args.lse.at(i, a) = static_cast<float>(panel.highest[lane] + std::log(static_cast<double>(sum)));
  }
}

// Floats of scratch that a forward task takes.
inline int64_t forward_scratch(int64_t head_size) {
  const int64_t rows = forward_rows(head_size);
  const int64_t padded = padded_head_size(head_size);
  const int64_t state = rows / kPanel * 2 * round_up(kPanel, kMaxLanes);
  return 2 * rows * padded + state + 2 * kForwardKeys * padded + (kForwardKeys + 1) * round_up(kPanel, kMaxLanes) +
         kPanel * padded;
}

// One tile of rows of one key/value head.
void forward_task(const ForwardArguments& args, int64_t kv_head, int64_t row_tile, float* scratch) {
  const KernelBlock& block = args.block;
  const int64_t padded = padded_head_size(block.head_size);
  const int64_t tile_rows = forward_rows(block.head_size);
  const int64_t row_begin = row_tile * tile_rows;
  const int64_t row_end = std::min(row_begin + tile_rows, block.rows());
  ScratchCursor cursor(scratch);
  float* const key = cursor.take(kForwardKeys * padded);
  float* const value = cursor.take(kForwardKeys * padded);
  float* const scores = cursor.take(kForwardKeys * kPanel);
  float* const alpha = cursor.take(kPanel);
  float* const rows = cursor.take(kPanel * padded);

  ForwardPanel panels[kMaxForwardRows / kPanel];
  int64_t panel_count = 0;
  KeyRange seen{block.keys, 0};
  for (int64_t r = row_begin; r < row_end; r += kPanel) {
    ForwardPanel& panel = panels[panel_count++];
    panel.first_row = r;
    panel.rows = std::min(kPanel, row_end - r);
    panel.query = cursor.take(panel_channels(block.head_size) * kPanel);
    panel.out = cursor.take(panel_channels(block.head_size) * kPanel);
    panel.highest = cursor.take(kPanel);
    panel.sum = cursor.take(kPanel);
    open_panel(args, kv_head, rows, panel);
    seen = {std::min(seen.begin, panel.some.begin), std::max(seen.end, panel.some.end)};
  }
  // Tiles begin at multiples of kForwardKeys, so a row's sums do not depend on its neighbours.
  for (int64_t begin = round_down(seen.begin, kForwardKeys); begin < seen.end; begin += kForwardKeys) {
    const KeyRange keys{begin, std::min(begin + kForwardKeys, block.keys)};
    const KeyRange used = intersect(keys, seen);
    for (int64_t j = used.begin; j < used.end; ++j) {
      load_row(block.key, block.bf16, j, kv_head, block.head_size, padded, 1.0f, key + (j - begin) * padded);
      load_row(block.value, block.bf16, j, kv_head, block.head_size, padded, 1.0f, value + (j - begin) * padded);
    }
    const ForwardTile tile{keys, key, value};
    for (int64_t p = 0; p < panel_count; ++p) attend(block, panels[p], tile, scores, alpha);
  }
  for (int64_t p = 0; p < panel_count; ++p) close_panel(args, kv_head, rows, panels[p]);
}

}  // namespace farspan::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
