// SPDX-License-Identifier: Apache-2.0
#include "train/pipeline_pass.h"

#include "parallel/pipeline/schedule.h"

namespace farspan {

PipelinePass::PipelinePass(const LayerContext& context, ParameterAccess& access, const BatchLoader& loader,
                           std::vector<ModelChunk> chunks, PipelineLinks& links)
    : context_(context), access_(access), loader_(loader), chunks_(std::move(chunks)), links_(links) {}

int64_t PipelinePass::train(int64_t micro_batches, const RowsOf& rows, double gradient_scale) {
  int64_t targets = 0;
  for (const PipelineTask& task :
       pipeline_schedule(links_.stages(), links_.stage(), micro_batches, static_cast<int>(chunks_.size()))) {
    const Key key = {task.micro_batch, task.chunk};
    if (task.action == PipelineAction::forward)
      context_.device.run_observed({.label = "forward"}, [&] { targets += forward(key, rows(task.micro_batch)); });
    else
      context_.device.run_observed({.label = "backward"}, [&] { backward(key, gradient_scale); });
  }
  links_.finish();
  return targets;
}

// A stream that the stage before has sent.
Buffer PipelinePass::receive_stream(const ModelChunk& chunk) {
  if (chunk.first) return {};
  Buffer stream = take_chunk_input(context_);
  links_.receive_forward(stream.tensor());
  return stream;
}

int64_t PipelinePass::forward(Key key, const std::vector<Row>& rows) {
  const ModelChunk& chunk = chunks_[static_cast<size_t>(key.second)];
  InFlight& batch = in_flight_[key];
  context_.device.run_observed({.label = "load rows"},
                               [&] { batch.loaded = loader_.load(context_.device, context_.arena, rows); });
  Buffer input = receive_stream(chunk);
  Buffer output = chunk_forward(context_, access_, chunk, batch.loaded.batch, std::move(input), batch.saved);
  if (chunk.last) return batch.loaded.local_targets;
  links_.send_forward(std::move(output));
  return 0;
}

void PipelinePass::backward(Key key, double gradient_scale) {
  const ModelChunk& chunk = chunks_[static_cast<size_t>(key.second)];
  InFlight& batch = in_flight_.at(key);
  Buffer d_output;
  if (!chunk.last) {
    d_output = context_.take("d_stream", {context_.stream_tokens(), context_.config.hidden_size}, Purpose::workspace);
    links_.receive_backward(d_output.tensor());
  }
  Buffer d_input =
      chunk_backward(context_, access_, chunk, batch.loaded.batch, gradient_scale, batch.saved, std::move(d_output));
  if (!chunk.first) links_.send_backward(std::move(d_input));
  in_flight_.erase(key);
}

int64_t PipelinePass::evaluate(const std::vector<Row>& rows) {
  int64_t targets = 0;
  for (const ModelChunk& chunk : chunks_) {
    const LoadedBatch loaded = loader_.load(context_.device, context_.arena, rows);
    Buffer input = receive_stream(chunk);
    Buffer output = chunk_evaluate(context_, access_, chunk, loaded.batch, std::move(input));
    if (chunk.last)
      targets += loaded.local_targets;
    else
      links_.send_forward(std::move(output));
  }
  links_.finish();
  return targets;
}

}  // namespace farspan
