// SPDX-License-Identifier: Apache-2.0
// A rank's part of a pass over micro-batches: its stage's model chunks, in the order of the pipeline schedule, with the
// hidden stream coming in from the stage before and going out to the one after. Without pipeline parallelism a
// micro-batch's backward follows its forward and nothing is sent.
#pragma once

#include <functional>
#include <map>

#include "model/transformer.h"
#include "parallel/pipeline/links.h"
#include "train/batch_loader.h"

namespace farspan {

class PipelinePass {
 public:
  using RowsOf = std::function<std::vector<Row>(int64_t micro_batch)>;

  PipelinePass(const LayerContext& context, ParameterAccess& access, const BatchLoader& loader,
               std::vector<ModelChunk> chunks, PipelineLinks& links);

  // Both return how many labels of this rank count, on the last stage; 0 on the others.
  // Forward and backward of `micro_batches`, adding to the gradients; the loss is scaled by `gradient_scale`.
  int64_t train(int64_t micro_batches, const RowsOf& rows, double gradient_scale);
  // Forward of one micro-batch.
  int64_t evaluate(const std::vector<Row>& rows);

 private:
  // A micro-batch of one chunk between its forward and its backward.
  struct InFlight {
    LoadedBatch loaded;
    SavedChunk saved;
  };
  using Key = std::pair<int64_t, int>;  // micro-batch, chunk

  int64_t forward(Key key, const std::vector<Row>& rows);
  void backward(Key key, double gradient_scale);
  Buffer receive_stream(const ModelChunk& chunk);

  const LayerContext& context_;
  ParameterAccess& access_;
  const BatchLoader& loader_;
  std::vector<ModelChunk> chunks_;
  PipelineLinks& links_;
  std::map<Key, InFlight> in_flight_;
};

}  // namespace farspan
