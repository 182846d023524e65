// SPDX-License-Identifier: Apache-2.0
#include "train/run_training.h"

#include <array>
#include <chrono>
#include <cmath>
#include <optional>

#include "base/log.h"
#include "comm/mpi/processes.h"
#include "io/json_lines.h"
#include "model/flops.h"
#include "observe/power.h"
#include "observe/progress.h"
#include "observe/step_observer.h"
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
  if (start.state.step >= job.config.training.train_iters && job.runs_rank_0())
    log_warning("{} is at step {} and train_iters is {}: nothing is left to train", start.checkpoint, start.state.step,
                job.config.training.train_iters);
  return start;
}

// The dimensions that metrics tell of. Data parallelism is both its own groups and those that span context parallelism.
constexpr std::array kShownDimensions = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp};

struct DimensionUse {
  int64_t bytes_received = 0;
  double exposed_seconds = 0;
};
using StepUse = std::array<DimensionUse, kShownDimensions.size()>;

StepUse use_so_far(const RankContext& context) {
  StepUse use;
  for (size_t i = 0; i < use.size(); ++i) {
    const Traffic traffic = context.traffic(kShownDimensions[i]);
    use[i] = {traffic.bytes_received, traffic.exposed_seconds};
    if (kShownDimensions[i] != Dimension::dp) continue;
    const Traffic spanning = context.traffic(Dimension::dp_cp);
    use[i].bytes_received += spanning.bytes_received;
    use[i].exposed_seconds += spanning.exposed_seconds;
  }
  return use;
}

StepUse difference(const StepUse& after, const StepUse& before) {
  StepUse use;
  for (size_t i = 0; i < use.size(); ++i)
    use[i] = {after[i].bytes_received - before[i].bytes_received, after[i].exposed_seconds - before[i].exposed_seconds};
  return use;
}

// What rank 0 writes of the others.
struct StepOfAllRanks {
  std::vector<int64_t> peak_bytes;                          // by rank
  std::optional<double> joules;                             // of all GPUs; none where one cannot be known
  std::array<int64_t, kShownDimensions.size()> received{};  // by dimension, summed over ranks
};

// One rank's side of the run. Rank 0 alone writes and shows.
class RankRun {
 public:
  RankRun(const Job& job, const StartPoint& start, const RunPaths& paths, const Observation& observation,
          RankTrainer& trainer, World& world)
      : job_(job), start_(start), paths_(paths), observation_(observation), trainer_(trainer), world_(world) {
    if (observation.any()) observe_steps();
    if (first_on_its_gpu()) meter_.emplace(cuda_bus_id(trainer.context().device->accelerator().index()));
    if (rank() != 0) return;
    const bool resumed = start.state.step > 0;
    metrics_.emplace(paths.metrics, resumed ? JsonLinesWriter::Mode::append : JsonLinesWriter::Mode::replace);
    progress_.emplace(start.state.step, job.config.training.train_iters, job.config.training.log_interval,
                      job.processes ? Screen::launcher : Screen::maybe_terminal);
  }

  ~RankRun() { trainer_.context().observe_calls(nullptr); }
  RankRun(const RankRun&) = delete;
  RankRun& operator=(const RankRun&) = delete;

  // The highest number of the signals that asked the ranks to stop; 0: none.
  int run() {
    const TrainingConfig& training = job_.config.training;
    trainer_.initialise_weights();
    if (!start_.checkpoint.empty()) load_checkpoint(start_.checkpoint, trainer_, start_.parts);
    bool stopped = false;
    int64_t step = start_.state.step;
    if (training.train_iters == 0) save(step);  // asked for the starting weights alone
    while (step < training.train_iters && !stopped) {
      stopped = run_step(++step);
      if (training.eval_interval > 0 && step % training.eval_interval == 0 && step < training.train_iters)
        stopped = evaluate(step) || stopped;
      const int64_t interval = job_.config.output.save_interval;
      const bool last = stopped || step == training.train_iters;
      if (last) write_observations();
      if (last || (interval > 0 && step % interval == 0)) save(step);
    }
    if (!stopped && step > start_.state.step) evaluate(step);
    return StopSignal::received_by_any(everyone());
  }

 private:
  void observe_steps() {
    const RankContext& context = trainer_.context();
    observer_.emplace(observation_, *context.device, start_.state.step + 1, job_.config.training.train_iters);
    // What groups move between GPUs the device tells of.
    if (context.device->on_cuda())
      everyone().observe(&*observer_);
    else
      context.observe_calls(&*observer_);
  }

  int rank() const { return trainer_.context().rank; }
  // Of the ranks that share a GPU one reads its meter.
  bool first_on_its_gpu() const {
    if (!trainer_.context().device->on_cuda()) return false;
    const int first = job_.processes ? job_.processes->ranks_of_this_host().front() : 0;
    return rank() - first < cuda_device_count();
  }
  Communicator& everyone() { return trainer_.context().group(Dimension::world); }

  // True when some rank was asked to stop.
  bool run_step(int64_t step) {
    world_.set_position(rank(), fmt::format("step {}", step));
    const StepUse before = use_so_far(trainer_.context());
    if (meter_) meter_->joules_since_last();
    if (observer_) observer_->begin_step(step);
    const Clock::time_point start = Clock::now();
    const StepReport report = trainer_.train_step(step, StopSignal::received() != 0);
    trainer_.context().device->synchronize();  // the update is queued; its time is this step's
    const double seconds = seconds_since(start);
    if (observer_) observer_->end_step();
    const StepUse use = difference(use_so_far(trainer_.context()), before);
    const StepOfAllRanks all = gather(use);
    if (rank() == 0) record(step, report, seconds, use, all);
    return report.stop_asked;
  }

  StepOfAllRanks gather(const StepUse& use) {
    constexpr double kUnknown = -1e18;
    const double joules = meter_ ? meter_->joules_since_last().value_or(kUnknown) : 0;
    std::vector<int64_t> mine = {trainer_.context().arena->highest_byte(), std::llround(joules * 1e3)};
    const size_t own_numbers = mine.size();
    for (const DimensionUse& dimension : use) mine.push_back(dimension.bytes_received);
    const int64_t width = std::ssize(mine);
    std::vector<int64_t> all(mine.size() * static_cast<size_t>(job_.sizes.world_size));
    everyone()
        .all_gather(Tensor(mine.data(), DType::i64, {width}), Tensor(all.data(), DType::i64, {std::ssize(all)}),
                    "metrics")
        .wait();
    StepOfAllRanks gathered;
    int64_t millijoules = 0;
    for (auto of_rank = all.begin(); of_rank != all.end(); of_rank += width) {
      gathered.peak_bytes.push_back(of_rank[0]);
      millijoules += of_rank[1];
      for (size_t i = 0; i < gathered.received.size(); ++i)
        gathered.received[i] += of_rank[static_cast<std::ptrdiff_t>(i + own_numbers)];
    }
    if (millijoules > 0) gathered.joules = static_cast<double>(millijoules) * 1e-3;
    return gathered;
  }

  void record(int64_t step, const StepReport& report, double seconds, const StepUse& use, const StepOfAllRanks& all) {
    const BatchTotals& totals = report.totals;
    const double tokens_per_second = static_cast<double>(totals.tokens) / seconds;
    const double flops = model_flops(job_.config.model, totals.tokens, totals.layer_pairs);
    std::optional<double> joules_per_token;
    if (all.joules && totals.tokens > 0) joules_per_token = *all.joules / static_cast<double>(totals.tokens);
    JsonCounts bytes;
    for (size_t i = 0; i < use.size(); ++i)
      bytes.emplace_back(std::string(name_of(kShownDimensions[i])), all.received[i]);
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
                     {"mfu", utilisation(flops / seconds)},
                     {"peak_memory_bytes", all.peak_bytes},
                     {"planned_memory_bytes", job_.planned_bytes()},
                     {"tp_exposed_seconds", use[0].exposed_seconds},
                     {"cp_exposed_seconds", use[1].exposed_seconds},
                     {"dp_exposed_seconds", use[2].exposed_seconds},
                     {"pp_exposed_seconds", use[3].exposed_seconds},
                     {"bytes", std::move(bytes)},
                     {"joules_per_token", number_or_null(joules_per_token)},
                     {"skipped", report.skipped}});
    int64_t memory = 0;
    for (int64_t peak : all.peak_bytes) memory += peak;
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

  // Of all ranks' peak; none for a CPU, which has no one peak to divide by.
  JsonValue utilisation(double flops_per_second) const {
    const double peak = observation_.ceilings.peak_flops * static_cast<double>(job_.sizes.world_size);
    return peak > 0 ? JsonValue(flops_per_second / peak) : JsonValue(nullptr);
  }

  void write_observations() {
    if (!observer_) return;
    observer_->write(everyone(), paths_.folder);
    if (rank() != 0 || !observation_.profile) return;
    progress_->note(fmt::format("\nprofile of rank 0\n{}", observer_->profile_table()));
  }

  // True when some rank was asked to stop before the end; the mean of a part is not written.
  bool evaluate(int64_t step) {
    const int64_t iterations = job_.config.training.eval_iters;
    if (iterations == 0) return false;
    world_.set_position(rank(), fmt::format("evaluation after step {}", step));
    const Clock::time_point start = Clock::now();
    bool stopped = false;
    const BatchTotals totals = trainer_.evaluate(
        Split::held_out, iterations, [&] { return stopped = StopSignal::received_by_any(everyone()) != 0; });
    if (rank() != 0) return stopped;
    if (stopped) {
      progress_->note(fmt::format("evaluation after step {} stopped", step));
      return true;
    }
    metrics_->write({{"kind", std::string("eval")},
                     {"step", step},
                     {"loss", number_or_null(totals.loss)},
                     {"tokens", totals.tokens},
                     {"targets", totals.targets},
                     {"seconds", seconds_since(start)}});
    progress_->note(fmt::format("held out after step {}: loss {} over {} targets", step,
                                totals.loss ? fmt::format("{:.4f}", *totals.loss) : "none", totals.targets));
    return false;
  }

  void save(int64_t step) {
    world_.set_position(rank(), fmt::format("checkpoint of step {}", step));
    const std::string path = save_checkpoint(paths_.checkpoints, trainer_,
                                             {.step = step,
                                              .updates = trainer_.updates(),
                                              .data_identity = job_.dataset->identity(),
                                              .settings = settings_of(job_.config)},
                                             job_.config.output.keep);
    if (rank() == 0) progress_->note(fmt::format("saved {}", path));
    everyone().barrier("checkpoint");
  }

  const Job& job_;
  const StartPoint& start_;
  const RunPaths& paths_;
  const Observation& observation_;
  RankTrainer& trainer_;
  World& world_;
  std::optional<EnergyMeter> meter_;  // of this rank's GPU
  std::optional<JsonLinesWriter> metrics_;
  std::optional<Progress> progress_;
  std::optional<StepObserver> observer_;
};

}  // namespace

int run_training(const Job& job, const std::string& folder, Observation observation) {
  observation.trace = job.config.output.trace;
  const StartPoint start = start_point(job);
  const RunPaths paths(folder, job.config);
  std::optional<RunFolder> run_folder;
  if (job.runs_rank_0()) run_folder.emplace(paths, job.config, start.state.step);
  int signal = 0;
  run_job(job, [&](RankTrainer& trainer, World& world) {
    const int received = RankRun(job, start, paths, observation, trainer, world).run();
    if (trainer.context().rank == world.first_local_rank()) signal = received;
  });
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace farspan
