// SPDX-License-Identifier: Apache-2.0
// Who sees whom, counted in keys that do not stand together in the row: a block of attention takes keys one behind the
// other, and a rank's keys are several pieces of the row. Positions ascend from piece to piece, so that an interval of
// positions is an interval of these keys too.
#pragma once

#include <cstdint>
#include <span>

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// Row positions of keys that stand together.
struct KeyPiece {
  int64_t begin = 0;
  int64_t length = 0;
  int64_t end() const { return begin + length; }
};

// Numbers [begin, end) of queries.
struct QueryRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// More pieces of keys, or ranges of queries, than this are not taken: they travel as an argument of a kernel.
inline constexpr int64_t kMostKeyPieces = 64;

// key_lo and key_hi (n) i64: how many keys of the pieces lie before lo and hi (n) i64, row positions; 0 and 0 for
// queries outside `queries`. Both lists ascend and have 1 to kMostKeyPieces entries. Throws InternalError otherwise,
// and on shapes or types that do not fit. On the device's compute stream.
void key_intervals(Device& device, std::span<const KeyPiece> pieces, std::span<const QueryRange> queries,
                   const Tensor& lo, const Tensor& hi, Tensor key_lo, Tensor key_hi);

}  // namespace farspan
