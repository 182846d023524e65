// SPDX-License-Identifier: Apache-2.0
// Register-blocked products, exp and packing, compiled once per instruction set. Included by attention_kernels.cpp
// only, after Highway.
//
// A product: C(rows, vectors) = A(rows, k) B(k, vectors). B and C hold vectors; an element of A is broadcast. A block
// of kBlockRows x 2 vectors of C stays in registers while k runs. A comes in both orders, so none of the seven products
// of attention needs a transposed copy of a score tile.

#if defined(FARSPAN_OPS_CPU_ATTENTION_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARSPAN_OPS_CPU_ATTENTION_TILE_INL_H
#undef FARSPAN_OPS_CPU_ATTENTION_TILE_INL_H
#else
#define FARSPAN_OPS_CPU_ATTENTION_TILE_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, kMaxLanes>;
using Vec = hn::Vec<Floats>;
constexpr Floats kFloats{};
constexpr int64_t kLanes = hn::MaxLanes(Floats{});
constexpr int64_t kPanel = kPanelVectors * kLanes;

// Accumulators, one row of B and one broadcast must fit: 12 + 2 + 1 of 16 registers, or 24 + 2 + 1 of 32.
#if HWY_TARGET <= HWY_AVX3
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 6;
#endif

// How A(row, k) is stored: a[row * lda + k] or a[k * lda + row].
enum class Left { k_contiguous, rows_contiguous };

template <int kRows, int kVectors>
struct Accumulators {
  Vec v[kRows][kVectors];

  HWY_INLINE void clear() {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVectors; ++c) v[r][c] = hn::Zero(kFloats);
  }

  // += A B over k_count steps.
  template <Left kLeft>
  HWY_INLINE void add(const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b, int64_t ldb,
                      int64_t k_count) {
    for (int64_t k = 0; k < k_count; ++k) {
      Vec right[kVectors];
      for (int c = 0; c < kVectors; ++c) right[c] = hn::Load(kFloats, b + k * ldb + c * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec left = hn::Set(kFloats, kLeft == Left::k_contiguous ? a[r * lda + k] : a[k * lda + r]);
        for (int c = 0; c < kVectors; ++c) v[r][c] = hn::MulAdd(left, right[c], v[r][c]);
      }
    }
  }

  // As add, but lanes where B is negative stay as they are, whatever A holds.
  template <Left kLeft>
  HWY_INLINE void add_unless_negative(const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b,
                                      int64_t ldb, int64_t k_count) {
    for (int64_t k = 0; k < k_count; ++k) {
      Vec right[kVectors];
      for (int c = 0; c < kVectors; ++c) right[c] = hn::Load(kFloats, b + k * ldb + c * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec left = hn::Set(kFloats, kLeft == Left::k_contiguous ? a[r * lda + k] : a[k * lda + r]);
        for (int c = 0; c < kVectors; ++c)
          v[r][c] = hn::IfNegativeThenElse(right[c], v[r][c], hn::MulAdd(left, right[c], v[r][c]));
      }
    }
  }
};

// C = A B
struct Store {
  float* c;
  int64_t ldc;
  template <int kRows, int kVectors>
  HWY_INLINE void finish(int64_t row, const Accumulators<kRows, kVectors>& sum) const {
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kVectors; ++i) hn::Store(sum.v[r][i], kFloats, c + (row + r) * ldc + i * kLanes);
  }
};

// C += A B
struct Add {
  float* c;
  int64_t ldc;
  template <int kRows, int kVectors>
  HWY_INLINE void finish(int64_t row, const Accumulators<kRows, kVectors>& sum) const {
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kVectors; ++i) {
        float* at = c + (row + r) * ldc + i * kLanes;
        hn::Store(hn::Add(hn::Load(kFloats, at), sum.v[r][i]), kFloats, at);
      }
  }
};

// Calls block.template rows<R>(first_row) for register blocks that together cover [0, count).
template <typename Block>
HWY_INLINE void for_row_blocks(int64_t count, const Block& block) {
  int64_t r = 0;
  for (; r + kBlockRows <= count; r += kBlockRows) block.template rows<kBlockRows>(r);
  if constexpr (kBlockRows > 8)
    if (r + 8 <= count) {
      block.template rows<8>(r);
      r += 8;
    }
  if (r + 4 <= count) {
    block.template rows<4>(r);
    r += 4;
  }
  if (r + 2 <= count) {
    block.template rows<2>(r);
    r += 2;
  }
  if (r < count) block.template rows<1>(r);
}

// One row block of a product, `kVectors` wide.
template <Left kLeft, int kVectors, typename Finish>
struct ProductBlock {
  const float* a;
  int64_t lda;
  const float* b;
  int64_t ldb;
  int64_t k_count;
  Finish destination;
  template <int kRows>
  HWY_INLINE void rows(int64_t row) const {
    Accumulators<kRows, kVectors> sum;
    sum.clear();
    sum.template add<kLeft>(a + (kLeft == Left::k_contiguous ? row * lda : row), lda, b, ldb, k_count);
    destination.finish(row, sum);
  }
};

// Destination(kRows, stride) of A(kRows, k) B(k, stride), for a stride of padded head size.
template <int kRows, Left kLeft, typename Finish>
void channel_product(const float* a, int64_t lda, const float* b, float* c, int64_t stride, int64_t k_count) {
  int64_t d = 0;
  for (; d + kPanel <= stride; d += kPanel)
    ProductBlock<kLeft, 2, Finish>{a, lda, b + d, stride, k_count, {c + d, stride}}.template rows<kRows>(0);
  if constexpr (kPanel > kMaxLanes)
    if (d < stride)
      ProductBlock<kLeft, 1, Finish>{a, lda, b + d, stride, k_count, {c + d, stride}}.template rows<kRows>(0);
}

// y += weight x, width a multiple of kLanes.
HWY_INLINE void add_scaled(float weight, const float* HWY_RESTRICT x, float* HWY_RESTRICT y, int64_t width) {
  const Vec w = hn::Set(kFloats, weight);
  for (int64_t d = 0; d < width; d += kLanes)
    hn::Store(hn::MulAdd(w, hn::Load(kFloats, x + d), hn::Load(kFloats, y + d)), kFloats, y + d);
}

// exp(x) for x up to 88, within about 1 ulp; 0 where the result would be below the smallest normal number; NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) is 1 + r + r^2 q(r), q of degree 4 through the Chebyshev points
// of that interval (relative error 1.1e-8).
HWY_INLINE Vec exp(Vec x) {
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits; 127 more makes it an exponent field.
  const Vec shift = hn::Set(kFloats, 12582912.0f + 127.0f);
  const Vec shifted = hn::MulAdd(x, hn::Set(kFloats, 1.44269504f), shift);
  const Vec n = hn::Sub(shifted, shift);
  const hn::RebindToUnsigned<Floats> u32;
  const Vec power = hn::BitCast(kFloats, hn::ShiftLeft<23>(hn::BitCast(u32, shifted)));
  // The upper part of ln 2 has 12 bits, so n times it is exact.
  Vec r = hn::NegMulAdd(n, hn::Set(kFloats, 0.693115234f), x);
  r = hn::NegMulAdd(n, hn::Set(kFloats, 3.19461833e-05f), r);
  Vec q = hn::MulAdd(hn::Set(kFloats, 1.3926184e-3f), r, hn::Set(kFloats, 8.36317893e-3f));
  q = hn::MulAdd(q, r, hn::Set(kFloats, 4.16665561e-2f));
  q = hn::MulAdd(q, r, hn::Set(kFloats, 0.166665763f));
  q = hn::MulAdd(q, r, hn::Set(kFloats, 0.5f));
  q = hn::MulAdd(q, r, hn::Set(kFloats, 1.0f));
  q = hn::MulAdd(q, r, hn::Set(kFloats, 1.0f));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(kFloats, -87.3f)), hn::Mul(q, power));
}

// Reads one input row of D elements times `scale`; the rest of `padded` elements are 0.
HWY_INLINE void load_row(const InputRows& from, bool bf16, int64_t token, int64_t head, int64_t head_size,
                         int64_t padded, float scale, float* HWY_RESTRICT to) {
  const int64_t offset = token * from.token_stride + head * from.head_stride;
  const Vec s = hn::Set(kFloats, scale);
  int64_t d = 0;
  if (bf16) {
    const BFloat16* x = static_cast<const BFloat16*>(from.data) + offset;
    const hn::Rebind<uint16_t, Floats> u16;
    const hn::RebindToUnsigned<Floats> u32;
    for (; d + kLanes <= head_size; d += kLanes) {
      const auto bits = hn::PromoteTo(u32, hn::LoadU(u16, &x[d].bits));
      hn::Store(hn::Mul(s, hn::BitCast(kFloats, hn::ShiftLeft<16>(bits))), kFloats, to + d);
    }
    for (; d < head_size; ++d) to[d] = scale * to_float(x[d]);
  } else {
    const float* x = static_cast<const float*>(from.data) + offset;
    for (; d + kLanes <= head_size; d += kLanes) hn::Store(hn::Mul(s, hn::LoadU(kFloats, x + d)), kFloats, to + d);
    for (; d < head_size; ++d) to[d] = scale * x[d];
  }
  for (; d < padded; ++d) to[d] = 0;
}

// to[c * to_stride + r] = from[r * from_stride + c] for r in [0, rows), c in [0, columns), both multiples of 4.
HWY_INLINE void transpose(const float* HWY_RESTRICT from, int64_t from_stride, int64_t rows, int64_t columns,
                          float* HWY_RESTRICT to, int64_t to_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
#else
  const hn::CappedTag<float, 4> four;
  for (int64_t r = 0; r < rows; r += 4)
    for (int64_t c = 0; c < columns; c += 4) {
      const float* x = from + r * from_stride + c;
      const auto a = hn::LoadU(four, x);
      const auto b = hn::LoadU(four, x + from_stride);
      const auto e = hn::LoadU(four, x + 2 * from_stride);
      const auto f = hn::LoadU(four, x + 3 * from_stride);
      const auto ae_lower = hn::InterleaveLower(four, a, e);
      const auto bf_lower = hn::InterleaveLower(four, b, f);
      const auto ae_upper = hn::InterleaveUpper(four, a, e);
      const auto bf_upper = hn::InterleaveUpper(four, b, f);
      float* y = to + c * to_stride + r;
      hn::StoreU(hn::InterleaveLower(four, ae_lower, bf_lower), four, y);
      hn::StoreU(hn::InterleaveUpper(four, ae_lower, bf_lower), four, y + to_stride);
      hn::StoreU(hn::InterleaveLower(four, ae_upper, bf_upper), four, y + 2 * to_stride);
      hn::StoreU(hn::InterleaveUpper(four, ae_upper, bf_upper), four, y + 3 * to_stride);
    }
#endif
}

// to[0, head_size) += scale * x
HWY_INLINE void add_row(float scale, const float* HWY_RESTRICT x, float* HWY_RESTRICT to, int64_t head_size) {
  const Vec s = hn::Set(kFloats, scale);
  int64_t d = 0;
  for (; d + kLanes <= head_size; d += kLanes)
    hn::StoreU(hn::MulAdd(s, hn::Load(kFloats, x + d), hn::LoadU(kFloats, to + d)), kFloats, to + d);
  for (; d < head_size; ++d) to[d] += scale * x[d];
}

}  // namespace farspan::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
