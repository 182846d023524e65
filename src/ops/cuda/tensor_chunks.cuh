// SPDX-License-Identifier: Apache-2.0
// Many tensors of any sizes as one list of chunks for one kernel: a table of the tensors goes along as the kernel's
// parameter, and a block finds the tensor of its chunk there. Tables are cut where a parameter would grow too long.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "device/cuda/cuda.h"

namespace farspan::cuda {

// A step of a model of 300 parameters takes three launches; 96 entries of up to 64 bytes are 6 KB of parameters, and a
// kernel may have 32 (CUDA C++ Programming Guide, __global__ function parameters).
inline constexpr int kTableTensors = 96;

template <typename Operands>
struct TensorChunks {
  int count = 0;
  int64_t first_chunk[kTableTensors + 1] = {};  // of each tensor, and the number of all
  int64_t elements[kTableTensors] = {};
  Operands operands[kTableTensors] = {};

  __host__ __device__ int64_t chunks() const { return first_chunk[count]; }

  struct Part {
    int tensor;
    int64_t begin, length;  // elements
  };
  // The part of its tensor that is chunk `chunk` of the list.
  __device__ __forceinline__ Part find(int64_t chunk, int64_t chunk_elements) const {
    int low = 0, high = count;  // first_chunk[low] <= chunk < first_chunk[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_chunk[middle] <= chunk)
        low = middle;
      else
        high = middle;
    }
    const int64_t begin = (chunk - first_chunk[low]) * chunk_elements;
    const int64_t rest = elements[low] - begin;
    return {low, begin, rest < chunk_elements ? rest : chunk_elements};
  }
};

// Calls launch(table) for tables that hold all items in order, but for those without elements.
template <typename Operands, typename Items, typename OperandsOf, typename ElementsOf, typename Launch>
void for_tables(const Items& items, int64_t chunk_elements, const OperandsOf& operands_of,
                const ElementsOf& elements_of, const Launch& launch) {
  TensorChunks<Operands> table;
  for (const auto& item : items) {
    const int64_t elements = elements_of(item);
    if (elements == 0) continue;
    if (table.count == kTableTensors) {
      launch(table);
      table = {};
    }
    table.operands[table.count] = operands_of(item);
    table.elements[table.count] = elements;
    table.first_chunk[table.count + 1] = table.first_chunk[table.count] + ceil_div(elements, chunk_elements);
    ++table.count;
  }
  if (table.count > 0) launch(table);
}

}  // namespace farspan::cuda
