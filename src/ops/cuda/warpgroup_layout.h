// SPDX-License-Identifier: Apache-2.0
// Where Hopper's copy engine and matrix units put things, as plain numbers that a CPU can check
// (tests/unit/warpgroup_layout_test.cpp). Sources: PTX ISA, "Asynchronous warpgroup level matrix instructions": matrix
// descriptors, canonical layouts, register fragments; "setmaxnreg".
//
// Shared memory: tiles of `rows` rows of 64 bf16 elements (128 bytes), 1024-byte aligned, each 16-byte chunk c of row r
// at chunk c ^ (r % 8), as the copy engine's 128-byte swizzle writes them. A wider tile is several of these, one after
// the other.
#pragma once

#include <cstdint>

namespace farspan::cuda {

// Bytes from the beginning of a tile of `rows` rows to an element.
constexpr uint32_t tile_offset(int rows, int row, int column) {
  return static_cast<uint32_t>(column / 64 * rows * 128 + row * 128 + ((column % 64 / 8) ^ (row % 8)) * 16 +
                               column % 8 * 2);
}

// Which of an operand's two indices runs along a tile's rows of 128 bytes: the one that is summed over, or the other.
enum class Major { summed = 0, kept = 1 };

// The descriptor of an operand of 16 summed elements. Major::summed: rows are the kept index, from `address` (of the
// first row, plus 2 bytes for every summed element before the 16) on. Major::kept: rows are the summed index, 16 from
// `address` (of the first of them) on; the next 64 elements of the kept index lie `next_64` bytes further.
template <Major kMajor>
constexpr uint64_t operand(uint32_t address, uint32_t next_64 = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = 1024 >> 4;
  const uint64_t leading = kMajor == Major::kept ? next_64 >> 4 : 1;
  return kSwizzle128 | kEightRows << 32 | leading << 16 | (address & 0x3ffff) >> 4;
}

// Where the operand of columns 16 k and on begins in a tile whose columns are summed over.
template <int kRows>
constexpr uint32_t summed_offset(int k) {
  return static_cast<uint32_t>(k / 4 * kRows * 128 + k % 4 * 32);
}

// And where that of rows 16 k and on, and of columns from a multiple of 64 on, does in one whose rows are.
template <int kRows>
constexpr uint32_t kept_offset(int k, int column = 0) {
  return static_cast<uint32_t>(column / 64 * kRows * 128 + k * 16 * 128);
}

// Element i of the results that a warpgroup's thread holds. Elements i and i + 1, i even, are neighbours in a row;
// those 2 apart, i % 4 < 2, are 8 rows apart.
constexpr int fragment_row(int thread, int i = 0) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
constexpr int fragment_column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

// Registers that a thread is launched with where a kernel's bound is one block of `threads` on a multiprocessor. A
// block can only deal out again what it has: a warpgroup that asks for more than the others gave back waits forever.
constexpr int launched_registers(int threads) {
  const int most = 65536 / threads / 8 * 8;
  return most < 255 ? most : 255;
}
constexpr bool registers_suffice(int producer, int consumer, int consumers) {
  return producer + consumers * consumer <= (consumers + 1) * launched_registers(128 * (consumers + 1));
}

}  // namespace farspan::cuda
