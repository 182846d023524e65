// SPDX-License-Identifier: Apache-2.0
#include "parallel/pipeline/schedule.h"

#include <algorithm>

#include "base/error.h"
#include "base/math.h"

namespace farspan {
namespace {

// Task `index` of all forward tasks, or of all backward tasks, of a stage.
PipelineTask task_at(PipelineAction action, int64_t index, int stages, int chunks) {
  const int64_t group_tasks = static_cast<int64_t>(stages) * chunks;
  const int64_t in_group = index % group_tasks;
  const int chunk = static_cast<int>(in_group / stages);
  return {action, index / group_tasks * stages + in_group % stages,
          action == PipelineAction::forward ? chunk : chunks - 1 - chunk};
}

}  // namespace

std::vector<PipelineTask> pipeline_schedule(int stages, int stage, int64_t micro_batches, int chunks) {
  FARSPAN_CHECK(stages >= 1 && stage >= 0 && stage < stages && micro_batches >= 0 && chunks >= 1,
                "pipeline schedule: stage {} of {}, {} micro-batches, {} chunks", stage, stages, micro_batches, chunks);
  const int64_t total = checked_mul(round_up(micro_batches, stages), chunks);
  const int64_t after = stages - 1 - stage;
  const int64_t ahead = std::min(total, chunks == 1 ? after : 2 * after + static_cast<int64_t>(chunks - 1) * stages);
  std::vector<PipelineTask> tasks;
  const auto add = [&](PipelineAction action, int64_t index) {
    const PipelineTask task = task_at(action, index, stages, chunks);
    if (task.micro_batch < micro_batches) tasks.push_back(task);
  };
  for (int64_t i = 0; i < total + ahead; ++i) {
    if (i < total) add(PipelineAction::forward, i);
    if (i >= ahead) add(PipelineAction::backward, i - ahead);
  }
  return tasks;
}

}  // namespace farspan
