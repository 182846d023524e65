// SPDX-License-Identifier: Apache-2.0
// The order in which a pipeline stage works through micro-batches: pure data, no communication.
//
// The model is cut into stages * chunks virtual stages; stage s holds virtual stages s, stages + s, 2 stages + s, ...
// as its chunks. A micro-batch goes forward through all of them and back. A stage first runs some forward tasks ahead,
// then takes forward and backward tasks in turn, then runs the backward tasks that are left:
//
//   chunks   tasks ahead                                     order of the forward tasks
//   1        stages - 1 - stage                              micro-batch 0, 1, 2, ...
//   more     2 (stages - 1 - stage) + (chunks - 1) stages    groups of `stages` micro-batches; a group through chunk 0,
//                                                            then through chunk 1, ...
//
// Backward tasks run in the same order with the chunks reversed. Sources: Narayanan et al., PipeDream (2019), section
// 3.2 (1F1B); Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section 2.2.
//
// Any number of micro-batches: the order is that of the next multiple of `stages`, without the tasks of the
// micro-batches that do not exist. What is left out of an order that comes to an end cannot hold up the rest.
//
// With equal times of all forward and of all backward tasks a step takes (chunks n + stages - 1) of both, n the number
// of micro-batches (rounded up to a multiple of `stages` where chunks > 1): a share of (stages - 1) / (chunks n) on top
// of the work. At no time is a stage between the forward and the backward task of more than (tasks ahead + 1) pairs of
// micro-batch and chunk. That holds where a stage sends the result of a task before it starts the next one, to its
// neighbour (the last stage to the first) over one link for each direction, on which one message is under way at a
// time.
#pragma once

#include <cstdint>
#include <vector>

namespace farspan {

enum class PipelineAction { forward, backward };

struct PipelineTask {
  PipelineAction action = PipelineAction::forward;
  int64_t micro_batch = 0;
  int chunk = 0;  // which of this stage's model chunks
  bool operator==(const PipelineTask&) const = default;
};

// The order in which stage `stage` of `stages` works through `micro_batches`, with `chunks` model chunks a stage (1:
// 1F1B; more: interleaved 1F1B). Throws InternalError on sizes that make no sense.
std::vector<PipelineTask> pipeline_schedule(int stages, int stage, int64_t micro_batches, int chunks);

}  // namespace farspan
