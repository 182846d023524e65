// SPDX-License-Identifier: Apache-2.0
#include "ops/key_intervals.h"

#include <algorithm>

#include "ops/cuda/ops.h"

namespace farspan {
namespace {

int64_t keys_before(std::span<const KeyPiece> pieces, int64_t position) {
  int64_t keys = 0;
  for (const KeyPiece& piece : pieces) keys += std::clamp<int64_t>(position - piece.begin, 0, piece.length);
  return keys;
}

}  // namespace

void key_intervals(Device& device, std::span<const KeyPiece> pieces, std::span<const QueryRange> queries,
                   const Tensor& lo, const Tensor& hi, Tensor key_lo, Tensor key_hi) {
  constexpr std::string_view op = "key_intervals";
  FARSPAN_CHECK(!pieces.empty() && std::ssize(pieces) <= kMostKeyPieces, "{}: {} pieces of keys, needs 1 to {}", op,
                pieces.size(), kMostKeyPieces);
  for (size_t i = 0; i < pieces.size(); ++i)
    FARSPAN_CHECK(pieces[i].length >= 0 && (i == 0 || pieces[i].begin >= pieces[i - 1].end()),
                  "{}: piece {} is of {} keys from position {} on, needs to lie behind the one before", op, i,
                  pieces[i].length, pieces[i].begin);
  FARSPAN_CHECK(!queries.empty() && std::ssize(queries) <= kMostKeyPieces, "{}: {} ranges of queries, needs 1 to {}",
                op, queries.size(), kMostKeyPieces);
  for (size_t i = 0; i < queries.size(); ++i)
    FARSPAN_CHECK(queries[i].begin >= (i == 0 ? 0 : queries[i - 1].end) && queries[i].end >= queries[i].begin,
                  "{}: range {} is of queries {} to {}, needs to lie behind the one before", op, i, queries[i].begin,
                  queries[i].end);
  for (const Tensor* x : {&lo, &hi, &static_cast<const Tensor&>(key_lo), &static_cast<const Tensor&>(key_hi)})
    FARSPAN_CHECK(x->dtype() == DType::i64 && x->shape() == lo.shape() && x->rank() == 1 && x->contiguous(),
                  "{}: a tensor is {} {}, needs i64 {}", op, name_of(x->dtype()), x->shape().str(), lo.shape().str());
  device.run({op, OpClass::memory, 0, static_cast<double>(4 * lo.bytes())}, [&] {
    if (device.on_cuda()) return cuda::key_intervals(device, pieces, queries, lo, hi, key_lo, key_hi);
    std::fill_n(key_lo.data<int64_t>(), lo.dim(0), 0);
    std::fill_n(key_hi.data<int64_t>(), lo.dim(0), 0);
    for (const QueryRange& range : queries)
      for (int64_t i = range.begin; i < std::min(range.end, lo.dim(0)); ++i) {
        key_lo.data<int64_t>()[i] = keys_before(pieces, lo.data<int64_t>()[i]);
        key_hi.data<int64_t>()[i] = keys_before(pieces, hi.data<int64_t>()[i]);
      }
  });
}

}  // namespace farspan
