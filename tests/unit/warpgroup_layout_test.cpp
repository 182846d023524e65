// SPDX-License-Identifier: Apache-2.0
// What Hopper's matrix units read through the descriptors that the attention kernels make, against the tile that is
// meant. Both sides are written here from PTX ISA, apart from the code under test: how the copy engine lays out a box,
// and how wgmma finds an element.
#include "ops/cuda/warpgroup_layout.h"

#include <gtest/gtest.h>
#include <set>
#include <vector>

namespace farspan::cuda {
namespace {

// Shared memory of which each pair of bytes holds one element.
using Memory = std::vector<int>;

// Bits 4 to 6 of every address are exchanged for their sum with bits 7 to 9.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

int element_number(int row, int column) { return row * 1000 + column; }

// A tile at `begin`, as boxes of 64 columns, one 128-byte row after the other.
void copy_tile(Memory& memory, uint32_t begin, int rows, int columns) {
  uint32_t at = begin;
  for (int box = 0; box < columns; box += 64)
    for (int row = 0; row < rows; ++row)
      for (int column = box; column < box + 64; ++column, at += 2)
        memory[swizzled(at) / 2] = element_number(row, column);
}

// Element (kept, summed) of the operand that a descriptor describes, in the canonical layouts of 128-byte swizzle:
// K-major ((8, n), k) with 128 bytes between rows and the stride offset between groups of eight; MN-major ((64, m),
// (8, k)) with the leading offset between 64 elements of the kept index and the stride offset between eight summed.
int read(const Memory& memory, uint64_t descriptor, Major major, int kept, int summed) {
  const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  EXPECT_EQ(descriptor >> 62, 1u) << "swizzle of 128 bytes";
  EXPECT_EQ(descriptor >> 49 & 7, 0u) << "base offset";
  const uint32_t leading = field(16), stride = field(32);
  const auto at = [](int count, uint32_t bytes) { return static_cast<uint32_t>(count) * bytes; };
  const uint32_t address = major == Major::summed ? field(0) + at(kept / 8, stride) + at(kept % 8, 128) + at(summed, 2)
                                                  : field(0) + at(kept / 64, leading) + at(kept % 64, 2) +
                                                        at(summed / 8, stride) + at(summed % 8, 128);
  return memory.at(swizzled(address) / 2);
}

struct TileCase {
  uint32_t begin;
  int rows, columns;
};
const TileCase kTiles[] = {
    {0, 64, 64}, {1024, 64, 128}, {5 * 1024, 128, 64}, {16 * 1024, 128, 128}, {0x20000, 64, 256}};

Memory memory_with(const TileCase& tile) {
  Memory memory(0x40000 / 2, -1);
  copy_tile(memory, tile.begin, tile.rows, tile.columns);
  return memory;
}

TEST(WarpgroupLayout, ElementsAreWhereTheCopyEnginePutsThem) {
  for (const TileCase& tile : kTiles) {
    const Memory memory = memory_with(tile);
    for (int row = 0; row < tile.rows; ++row)
      for (int column = 0; column < tile.columns; ++column)
        ASSERT_EQ(memory[(tile.begin + tile_offset(tile.rows, row, column)) / 2], element_number(row, column));
  }
}

template <int kRows>
void expect_summed(const TileCase& tile) {
  const Memory memory = memory_with(tile);
  for (int k = 0; k < tile.columns / 16; ++k) {
    const uint64_t descriptor = operand<Major::summed>(tile.begin + summed_offset<kRows>(k));
    for (int row = 0; row < tile.rows; ++row)
      for (int summed = 0; summed < 16; ++summed)
        ASSERT_EQ(read(memory, descriptor, Major::summed, row, summed), element_number(row, 16 * k + summed));
  }
}

template <int kRows>
void expect_kept(const TileCase& tile) {
  const Memory memory = memory_with(tile);
  for (int first = 0; first < tile.columns; first += 64)
    for (int k = 0; k < tile.rows / 16; ++k) {
      const uint64_t descriptor = operand<Major::kept>(tile.begin + kept_offset<kRows>(k, first), kRows * 128);
      for (int column = first; column < tile.columns; ++column)
        for (int summed = 0; summed < 16; ++summed)
          ASSERT_EQ(read(memory, descriptor, Major::kept, column - first, summed),
                    element_number(16 * k + summed, column));
    }
}

TEST(WarpgroupLayout, OperandsSummedOverColumns) {
  for (const TileCase& tile : kTiles) tile.rows == 64 ? expect_summed<64>(tile) : expect_summed<128>(tile);
}

TEST(WarpgroupLayout, OperandsSummedOverRows) {
  for (const TileCase& tile : kTiles) tile.rows == 64 ? expect_kept<64>(tile) : expect_kept<128>(tile);
}

TEST(WarpgroupLayout, FragmentsCoverTheResult) {
  for (int columns : {64, 128}) {
    std::set<std::pair<int, int>> seen;
    for (int thread = 0; thread < 128; ++thread)
      for (int i = 0; i < columns / 2; ++i) {
        const int row = fragment_row(thread, i), column = fragment_column(thread, i);
        EXPECT_TRUE(row >= 0 && row < 64 && column >= 0 && column < columns);
        seen.insert({row, column});
      }
    EXPECT_EQ(static_cast<int>(seen.size()), 64 * columns);
  }
  // PTX ISA, fragment of D of wgmma m64nNk16: rows of warp w from 16 w on, lane / 4 within, i % 4 >= 2 eight further.
  EXPECT_EQ(fragment_row(37, 0), 16 + 1);
  EXPECT_EQ(fragment_row(37, 2), 16 + 9);
  EXPECT_EQ(fragment_column(37, 5), 8 + 2 + 1);
}

TEST(WarpgroupLayout, RegistersThatABlockCanDealOut) {
  EXPECT_EQ(launched_registers(384), 168);
  EXPECT_EQ(launched_registers(512), 128);
  EXPECT_TRUE(registers_suffice(24, 240, 2));
  EXPECT_FALSE(registers_suffice(32, 240, 2));  // waits forever
  EXPECT_TRUE(registers_suffice(32, 160, 3));
}

}  // namespace
}  // namespace farspan::cuda
