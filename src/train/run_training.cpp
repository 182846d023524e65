// SPDX-License-Identifier: Apache-2.0
#include "train/run_training.h"

#include <chrono>
#include <optional>

#include "base/log.h"
#include "io/json_lines.h"
#include "model/flops.h"
#include "observe/progress.h"
#include "train/checkpoint.h"
#include "train/run_folder.h"
#include "train/saved_settings.h"
#include "train/stop_signal.h"

namespace farspan {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

JsonValue number_or_null(const std::optional<double>& value) { return value ? JsonValue(*value) : JsonValue(nullptr); }

// Where a run starts: step 0, or after the checkpoint's last step.
struct StartPoint {
  std::string checkpoint;  // empty: fresh weights
  CheckpointState state;
  CheckpointParts parts = CheckpointParts::everything;
};

StartPoint start_point(const Job& job) {
  StartPoint start;
  const OutputConfig& output = job.config.output;
  if (output.load.empty()) return start;
  start.checkpoint = find_checkpoint(output.load);
  const CheckpointState saved = read_checkpoint_state(start.checkpoint);
  check_settings(start.checkpoint, saved.settings, job.config,
                 output.load_weights_only ? LoadUse::weights : LoadUse::resume);
  if (output.load_weights_only) {
    start.parts = CheckpointParts::weights;
    return start;
  }
  start.state = saved;
  if (start.state.data_identity != job.dataset->identity())
    throw DataError(
        fmt::format("{}: was saved while training on other data or another packing (identity {}, now {}); give the "
                    "same data, or set "
                    "load_weights_only: true to start from its weights at step 0",
                    start.checkpoint, start.state.data_identity, job.dataset->identity()));
  if (start.state.step >= job.config.training.train_iters)
    log_warning("{} is at step {} and train_iters is {}: nothing is left to train", start.checkpoint, start.state.step,
                job.config.training.train_iters);
  return start;
}

// One rank's side of the run. Rank 0 alone writes and shows.
class RankRun {
 public:
  RankRun(const Job& job, const StartPoint& start, const RunFolder& folder, RankTrainer& trainer, ThreadWorld& world)
      : job_(job), start_(start), folder_(folder), trainer_(trainer), world_(world) {
    if (rank() != 0) return;
    const bool resumed = start.state.step > 0;
    metrics_.emplace(folder.metrics(), resumed ? JsonLinesWriter::Mode::append : JsonLinesWriter::Mode::replace);
    progress_.emplace(start.state.step, job.config.training.train_iters, job.config.training.log_interval);
  }

  void run() {
    const TrainingConfig& training = job_.config.training;
    trainer_.initialise_weights();
    if (!start_.checkpoint.empty()) load_checkpoint(start_.checkpoint, trainer_, start_.parts);
    bool stopped = false;
    int64_t step = start_.state.step;
    if (training.train_iters == 0) save(step);  // asked for the starting weights alone
    while (step < training.train_iters && !stopped) {
      stopped = run_step(++step);
      if (training.eval_interval > 0 && step % training.eval_interval == 0 && step < training.train_iters)
        evaluate(step);
      const int64_t interval = job_.config.output.save_interval;
      if (stopped || step == training.train_iters || (interval > 0 && step % interval == 0)) save(step);
    }
    if (!stopped && step > start_.state.step) evaluate(step);
  }

 private:
  int rank() const { return trainer_.context().rank; }

  // True when some rank was asked to stop.
  bool run_step(int64_t step) {
    world_.set_position(rank(), fmt::format("step {}", step));
    Communicator& cp = trainer_.context().group(Dimension::cp);
    const double exposed_before = cp.traffic().exposed_seconds;
    const Clock::time_point start = Clock::now();
    const StepReport report = trainer_.train_step(step, StopSignal::received() != 0);
    const double seconds = seconds_since(start);
    const std::vector<int64_t> peaks = peak_bytes();
    if (rank() == 0) record(step, report, seconds, cp.traffic().exposed_seconds - exposed_before, peaks);
    return report.stop_asked;
  }

  // Highest byte used so far, of every rank.
  std::vector<int64_t> peak_bytes() {
    int64_t mine = trainer_.context().arena->highest_byte();
    std::vector<int64_t> all(static_cast<size_t>(job_.sizes.world_size));
    trainer_.context()
        .group(Dimension::world)
        .all_gather(Tensor(&mine, DType::i64, {1}), Tensor(all.data(), DType::i64, {std::ssize(all)}), "peak memory")
        .wait();
    return all;
  }

  void record(int64_t step, const StepReport& report, double seconds, double exposed,
              const std::vector<int64_t>& peaks) {
    const BatchTotals& totals = report.totals;
    const double tokens_per_second = static_cast<double>(totals.tokens) / seconds;
    const double flops = model_flops(job_.config.model, totals.tokens, totals.visible_pairs);
    metrics_->write({{"kind", std::string("train")},
                     {"step", step},
                     {"loss", number_or_null(totals.loss)},
                     {"grad_norm", report.gradient_norm},
                     {"lr", report.learning_rate},
                     {"tokens", totals.tokens},
                     {"targets", totals.targets},
                     {"seconds", seconds},
                     {"tokens_per_second", tokens_per_second},
                     {"model_tflops", flops / seconds / 1e12},
                     {"mfu", nullptr},  // a CPU has no one peak to divide by
                     {"peak_memory_bytes", peaks},
                     {"planned_memory_bytes", job_.planned_bytes()},
                     {"cp_exposed_seconds", exposed},
                     {"joules_per_token", nullptr},  // no meter
                     {"skipped", report.skipped}});
    int64_t memory = 0;
    for (int64_t bytes : peaks) memory += bytes;
    const int64_t samples = step * job_.config.training.global_batch_size - 1;
    progress_->show({.step = step,
                     .loss = totals.loss,
                     .gradient_norm = report.gradient_norm,
                     .learning_rate = report.learning_rate,
                     .tokens_per_second = tokens_per_second,
                     .memory_bytes = memory,
                     .epoch = samples / job_.dataset->rows(Split::train),
                     .skipped = report.skipped});
    if (totals.targets == 0)
      log_warning("step {}: the batch has no target; weights are left as they are", step);
    else if (report.skipped)
      log_warning("step {}: the gradient norm is {}; weights are left as they are", step, report.gradient_norm);
  }

  void evaluate(int64_t step) {
    const int64_t iterations = job_.config.training.eval_iters;
    if (iterations == 0) return;
    world_.set_position(rank(), fmt::format("evaluation after step {}", step));
    const Clock::time_point start = Clock::now();
    const BatchTotals totals = trainer_.evaluate(Split::held_out, iterations);
    if (rank() != 0) return;
    metrics_->write({{"kind", std::string("eval")},
                     {"step", step},
                     {"loss", number_or_null(totals.loss)},
                     {"tokens", totals.tokens},
                     {"targets", totals.targets},
                     {"seconds", seconds_since(start)}});
    progress_->note(fmt::format("held out after step {}: loss {} over {} targets", step,
                                totals.loss ? fmt::format("{:.4f}", *totals.loss) : "none", totals.targets));
  }

  void save(int64_t step) {
    world_.set_position(rank(), fmt::format("checkpoint of step {}", step));
    if (rank() == 0) {
      const std::string path = save_checkpoint(folder_.checkpoints(), trainer_,
                                               {.step = step,
                                                .updates = trainer_.updates(),
                                                .data_identity = job_.dataset->identity(),
                                                .settings = settings_of(job_.config)},
                                               job_.config.output.keep);
      progress_->note(fmt::format("saved {}", path));
    }
    trainer_.context().group(Dimension::world).barrier("checkpoint");
  }

  const Job& job_;
  const StartPoint& start_;
  const RunFolder& folder_;
  RankTrainer& trainer_;
  ThreadWorld& world_;
  std::optional<JsonLinesWriter> metrics_;
  std::optional<Progress> progress_;
};

}  // namespace

int run_training(const Job& job, const std::string& folder) {
  const StartPoint start = start_point(job);
  const RunFolder run_folder(folder, job.config, start.state.step);
  const StopSignal stop_signal;
  run_job(job,
          [&](RankTrainer& trainer, ThreadWorld& world) { RankRun(job, start, run_folder, trainer, world).run(); });
  const int signal = StopSignal::received();
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace farspan
