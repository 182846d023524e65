// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/attention_scratch.h"
#include "ops/cuda/document_tables.h"

namespace farspan::cuda {
namespace {

// The documents travel as an argument of the kernel, so no copy from the CPU's memory has to be waited for.
struct Documents {
  Document documents[kMostDocuments];
  OffsetTable tables[kMostOffsetTables];
};

__global__ void fill_tables(const __grid_constant__ Documents d, int given, int count, int32_t* query_lengths,
                            int32_t* key_lengths) {
  for (int i = static_cast<int>(threadIdx.x); i <= count; i += static_cast<int>(blockDim.x)) {
    if (i < count) {
      query_lengths[i] = i < given ? static_cast<int32_t>(d.documents[i].queries) : 0;
      key_lengths[i] = i < given ? static_cast<int32_t>(d.documents[i].keys) : 0;
    }
    const Document& last = d.documents[given - 1];
    const int64_t query = i < given ? d.documents[i].query_begin : last.query_begin + last.queries;
    const int64_t key = i < given ? d.documents[i].key_begin : last.key_begin + last.keys;
    for (const OffsetTable& table : d.tables)
      if (table.offsets != nullptr) table.offsets[i] = (table.of_keys ? key : query) * table.stride;
  }
}

}  // namespace

void write_document_tables(cudaStream_t stream, std::span<const Document> documents, int64_t count,
                           int32_t* query_lengths, int32_t* key_lengths,
                           const std::array<OffsetTable, kMostOffsetTables>& tables) {
  FARSPAN_CHECK(!documents.empty() && std::ssize(documents) <= count && count <= kMostDocuments,
                "document tables: {} documents in tables of {}, at most {}", documents.size(), count, kMostDocuments);
  Documents d{};
  std::copy(documents.begin(), documents.end(), d.documents);
  std::copy(tables.begin(), tables.end(), d.tables);
  fill_tables<<<1, 160, 0, stream>>>(d, static_cast<int>(documents.size()), static_cast<int>(count), query_lengths,
                                     key_lengths);
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace farspan::cuda
