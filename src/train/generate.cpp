// SPDX-License-Identifier: Apache-2.0
#include "train/generate.h"

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "base/philox.h"
#include "train/checkpoint.h"
#include "train/job.h"

namespace farspan {
namespace {

// One row that grows: the tokens so far.
class GrowingRow : public Dataset {
 public:
  GrowingRow(std::vector<int32_t> tokens, int64_t vocab_size) : tokens_(std::move(tokens)), vocab_size_(vocab_size) {}

  void append(int32_t token, int64_t longest) {
    tokens_.push_back(token);
    if (std::ssize(tokens_) > longest) tokens_.erase(tokens_.begin());
  }
  Row whole() const {
    const int64_t length = std::ssize(tokens_);
    return {.id = 0, .length = length, .documents = {Span{0, length}}, .targets = 0};
  }

  int64_t rows(Split split) const override { return split == Split::train ? 1 : 0; }
  Row row(Split, int64_t) const override { return whole(); }
  void read(const Row&, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    for (int64_t i = 0; i < span.length(); ++i) {
      const int64_t at = span.begin + i;
      tokens[static_cast<size_t>(i)] = at < std::ssize(tokens_) ? tokens_[static_cast<size_t>(at)] : 0;
    }
    std::fill(labels.begin(), labels.end(), kIgnoredLabel);
  }
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t total_tokens() const override { return std::ssize(tokens_); }
  int64_t documents() const override { return 1; }
  std::string identity() const override { return "prompt"; }
  std::string summary() const override { return "a prompt"; }

 private:
  std::vector<int32_t> tokens_;
  int64_t vocab_size_;
};

// The token whose share of the softmax at this temperature covers the draw in [0, 1).
int32_t draw_token(const std::vector<float>& logits, double temperature, double draw) {
  const auto most_likely = std::max_element(logits.begin(), logits.end());
  if (temperature <= 0) return static_cast<int32_t>(most_likely - logits.begin());
  std::vector<double> share(logits.size());
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) total += share[i] = std::exp((logits[i] - *most_likely) / temperature);
  double sum = 0;
  for (size_t i = 0; i < share.size(); ++i) {
    sum += share[i] / total;
    if (draw < sum) return static_cast<int32_t>(i);
  }
  return static_cast<int32_t>(most_likely - logits.begin());
}

}  // namespace

void generate(const Config& given, const GenerateOptions& options, const std::function<void(int32_t)>& emit) {
  if (given.parallel.context_parallel_size > 1)
    log_info("generation runs on one rank; context_parallel_size {} is for training",
             given.parallel.context_parallel_size);
  Config config = given;
  config.parallel.context_parallel_size = 1;
  config.training.micro_batch_size = 1;
  config.training.global_batch_size = 1;
  const int64_t wanted = std::ssize(options.prompt) + options.max_tokens;
  if (wanted > config.data.seq_length)
    log_warning(
        "a prompt of {} tokens and {} more pass seq_length {}: each new token sees the last {} alone; --max-tokens {} "
        "or --seq-length {} would keep all in sight",
        std::ssize(options.prompt), options.max_tokens, config.data.seq_length, config.data.seq_length,
        std::max<int64_t>(1, config.data.seq_length - std::ssize(options.prompt)), wanted);
  config.data.seq_length = std::max<int64_t>(2, std::min(config.data.seq_length, wanted));
  std::vector<int32_t> prompt = options.prompt;
  if (std::ssize(prompt) > config.data.seq_length) prompt.erase(prompt.begin(), prompt.end() - config.data.seq_length);
  const auto row = std::make_shared<GrowingRow>(std::move(prompt), config.model.vocab_size);
  const Job job = make_job(config, 1, RunKind::generate, row);
  check_settings(options.checkpoint, read_checkpoint_state(options.checkpoint).settings, job.config, LoadUse::evaluate);
  const Philox random(static_cast<uint64_t>(config.training.seed), "generate");
  run_job(job, [&](RankTrainer& trainer, World&) {
    load_checkpoint(options.checkpoint, trainer, CheckpointParts::weights);
    for (int64_t i = 0; i < options.max_tokens; ++i) {
      const std::vector<float> logits = trainer.next_token_logits(row->whole());
      const int32_t token = draw_token(logits, options.temperature, random.uniform(static_cast<uint64_t>(i)));
      if (token == options.end_token) return;
      emit(token);
      row->append(token, config.data.seq_length);
    }
  });
}

}  // namespace farspan
