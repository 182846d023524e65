// SPDX-License-Identifier: Apache-2.0
// farspan eval: loss and perplexity of a checkpoint on the held-out rows.
#include <cmath>
#include <fmt/format.h>

#include "command.h"
#include "config/command_line.h"
#include "config/validate.h"
#include "train/checkpoint.h"
#include "train/job.h"
#include "train/stop_signal.h"

namespace farspan {

int run_eval(const CommandLine& line, Session& session) {
  const StopSignal stop_signal;
  const Config config = load_config(line);
  if (config.output.load.empty()) throw ConfigError("eval: no checkpoint given; say --load DIR");
  const std::string checkpoint = find_checkpoint(config.output.load);
  const int ranks = world_size(config, line.ranks);
  const Job job = make_job(config, ranks, RunKind::evaluate, JobData::open, session.processes_for(config, ranks));
  check_settings(checkpoint, read_checkpoint_state(checkpoint).settings, job.config, LoadUse::evaluate);
  const int64_t rows = job.dataset->rows(Split::held_out);
  if (rows == 0)
    throw DataError(fmt::format("eval: split {} holds out no row of {}; give the second part more weight",
                                job.config.data.split, job.dataset->rows(Split::train)));
  BatchTotals totals;
  int signal = 0;
  run_job(job, [&](RankTrainer& trainer, World& world) {
    load_checkpoint(checkpoint, trainer, CheckpointParts::weights);
    int received = 0;
    const BatchTotals result = trainer.evaluate(Split::held_out, rows, [&] {
      return (received = StopSignal::received_by_any(trainer.context().group(Dimension::world))) != 0;
    });
    if (trainer.context().rank != world.first_local_rank()) return;
    totals = result;
    signal = received;
  });
  if (signal != 0) {
    log_info("eval: stopped by signal {} before the end", signal);
    return 128 + signal;
  }
  if (!totals.loss) throw DataError("eval: the held-out rows have no target");
  fmt::print("{}: loss {:.6f}, perplexity {:.4f} over {} targets in {} held-out rows\n", checkpoint, *totals.loss,
             std::exp(*totals.loss), totals.targets, rows);
  return 0;
}

}  // namespace farspan
