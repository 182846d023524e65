// SPDX-License-Identifier: Apache-2.0
// From rows of the dataset to one rank's share of a micro-batch: tokens, labels, rotary table and visible intervals of
// the tokens this rank owns, and nothing of the others'. Layers whose windows differ see the same rows through
// different masks: there is one for each distinct window of the model, and one layout for all of them.
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
  Buffer tokens;       // (B, s) i32
  Buffer labels;       // (B, s) i32
  Buffer positions;    // (B, s) i64
  Buffer lo;           // (M, B, s) i64, M masks
  Buffer hi;           // (M, B, s) i64
  Buffer rope_table;   // (B s, 2, D / 2) f32
  Buffer token_index;  // (B, s) i64; taken only with hidden dropout
  MicroBatch batch;
  int64_t local_targets = 0;  // labels of this rank that count
};

class BatchLoader {
 public:
  // `dataset` is null on the dry device, where buffers are taken but not filled.
  BatchLoader(const Config& config, const SequenceLayout& layout, int cp_rank, const Dataset* dataset);

  // Rows that a batch lacks are given as Row{}: all padding.
  LoadedBatch load(Device& device, Arena& arena, std::span<const Row> rows) const;

  // The mask of a row under this configuration, for the layers that have mask `mask`.
  IntervalMask mask_of(const Row& row, size_t mask = 0) const;
  // (query, key) pairs of a row, summed over all layers.
  int64_t visible_pairs_of_layers(const Row& row) const;

 private:
  struct Window {
    int64_t size = 0;
    int64_t layers = 0;  // that have it
  };
  // One mask per window, and the layout that suits them together.
  void add_row(const Row& row, MicroBatch& batch) const;
  // The same tensors as LoadedBatch's, where the CPU can write them.
  struct HostBatch;
  void fill(const Row& row, int64_t index, LoadedBatch& loaded, const HostBatch& host) const;

  const Config& config_;
  const SequenceLayout& layout_;
  int cp_rank_;
  std::vector<Window> windows_;        // the model's distinct ones, in the order of their first layers
  std::vector<size_t> mask_of_layer_;  // (L): index into windows_
  const Dataset* dataset_;
  std::vector<double> inverse_frequencies_;
  double attention_factor_;
};

}  // namespace farspan
