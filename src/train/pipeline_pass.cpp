// SPDX-License-Identifier: Apache-2.0
#include "train/pipeline_pass.h"

#include "parallel/pipeline/schedule.h"

namespace farspan {

PipelinePass::PipelinePass(const LayerContext& context, ParameterAccess& access, const BatchLoader& loader,
                           std::vector<ModelChunk> chunks, PipelineLinks& links)
    : context_(context), access_(access), loader_(loader), chunks_(std::move(chunks)), links_(links) {}

PassResult PipelinePass::train(int64_t micro_batches, const RowsOf& rows, double gradient_scale) {
  PassResult result;
  for (const PipelineTask& task :
       pipeline_schedule(links_.stages(), links_.stage(), micro_batches, static_cast<int>(chunks_.size()))) {
    const Key key = {task.micro_batch, task.chunk};
    if (task.action == PipelineAction::forward)
      forward(key, rows(task.micro_batch), result);
    else
      backward(key, gradient_scale, result);
  }
  links_.finish();
  return result;
}

// A stream that the stage before has sent.
Buffer PipelinePass::receive_stream(const ModelChunk& chunk) {
  if (chunk.first) return {};
  Buffer stream = take_chunk_input(context_);
  links_.receive_forward(stream.tensor());
  return stream;
}

void PipelinePass::forward(Key key, const std::vector<Row>& rows, PassResult& result) {
  const ModelChunk& chunk = chunks_[static_cast<size_t>(key.second)];
  InFlight& batch = in_flight_[key];
  batch.loaded = loader_.load(context_.device, context_.arena, rows);
  if (chunk.last) result.local_targets += batch.loaded.local_targets;
  Buffer input = receive_stream(chunk);
  Buffer output = chunk_forward(context_, access_, chunk, batch.loaded.batch, std::move(input), batch.saved);
  if (!chunk.last) links_.send_forward(std::move(output));
}

void PipelinePass::backward(Key key, double gradient_scale, PassResult& result) {
  const ModelChunk& chunk = chunks_[static_cast<size_t>(key.second)];
  InFlight& batch = in_flight_.at(key);
  Buffer d_output;
  if (!chunk.last) {
    d_output = context_.take("d_stream", {context_.stream_tokens(), context_.config.hidden_size}, Purpose::workspace);
    links_.receive_backward(d_output.tensor());
  }
  ChunkGradient gradient =
      chunk_backward(context_, access_, chunk, batch.loaded.batch, gradient_scale, batch.saved, std::move(d_output));
  if (chunk.last) result.loss += gradient.loss;
  if (!chunk.first) links_.send_backward(std::move(gradient.d_input));
  in_flight_.erase(key);
}

PassResult PipelinePass::evaluate(const std::vector<Row>& rows) {
  PassResult result;
  for (const ModelChunk& chunk : chunks_) {
    const LoadedBatch loaded = loader_.load(context_.device, context_.arena, rows);
    Buffer input = receive_stream(chunk);
    ChunkOutput output = chunk_evaluate(context_, access_, chunk, loaded.batch, std::move(input));
    if (!chunk.last) {
      links_.send_forward(std::move(output.output));
    } else {
      result.loss += output.loss;
      result.local_targets += loaded.local_targets;
    }
  }
  links_.finish();
  return result;
}

}  // namespace farspan
