// SPDX-License-Identifier: Apache-2.0
// Where the documents of one attention call lie, written to tables on the device without waiting for it.
#pragma once

#include <array>
#include <cstdint>
#include <cuda_runtime.h>
#include <span>

namespace farspan::cuda {

// Queries and keys of a block that see each other and nothing else, in the block's tokens.
struct Document {
  int64_t query_begin = 0;
  int64_t queries = 0;
  int64_t key_begin = 0;
  int64_t keys = 0;
};

// One table of offsets: entry i = begin of document i, counted in tokens, times `stride`.
struct OffsetTable {
  int64_t* offsets = nullptr;  // null: none
  int64_t stride = 0;
  bool of_keys = false;
};

inline constexpr int kMostOffsetTables = 5;

// Fills lengths of `count` documents and offsets of one more; those behind the given ones have length 0. At most
// kMostDocuments (attention_scratch.h).
void write_document_tables(cudaStream_t stream, std::span<const Document> documents, int64_t count,
                           int32_t* query_lengths, int32_t* key_lengths,
                           const std::array<OffsetTable, kMostOffsetTables>& tables);

}  // namespace farspan::cuda
