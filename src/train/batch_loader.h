// SPDX-License-Identifier: Apache-2.0
// From rows of the dataset to one rank's share of a micro-batch: tokens, labels, rotary table and visible intervals of
// the tokens this rank owns, and nothing of the others'.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "config/config.h"
#include "data/dataset.h"
#include "model/layer_context.h"
#include "parallel/sequence_layout.h"

namespace farspan {

// The micro-batch and the buffers it lives in.
struct LoadedBatch {
  Buffer tokens;      // (B, s) i32
  Buffer labels;      // (B, s) i32
  Buffer positions;   // (B, s) i64
  Buffer lo;          // (B, s) i64
  Buffer hi;          // (B, s) i64
  Buffer rope_table;  // (B s, 2, D / 2) f32
  MicroBatch batch;
  int64_t local_targets = 0;  // labels of this rank that count
};

class BatchLoader {
 public:
  // `dataset` is null on the dry device, where buffers are taken but not filled.
  BatchLoader(const Config& config, const SequenceLayout& layout, int cp_rank, const Dataset* dataset);

  // Rows that a batch lacks are given as Row{}: all padding.
  LoadedBatch load(Device& device, Arena& arena, std::span<const Row> rows) const;

  // The mask of a row under this configuration.
  IntervalMask mask_of(const Row& row) const;

 private:
  void fill(const Row& row, int64_t index, LoadedBatch& loaded) const;

  const Config& config_;
  const SequenceLayout& layout_;
  int cp_rank_;
  const Dataset* dataset_;
  std::vector<double> inverse_frequencies_;
  double attention_factor_;
};

}  // namespace farspan
