// SPDX-License-Identifier: Apache-2.0
// The training run: start or resume, the step loop, evaluation, checkpoints, metrics, and an orderly stop on a signal.
#pragma once

#include <string>

#include "observe/step_observer.h"
#include "train/job.h"

namespace farspan {

// Runs the job and writes `output`/metrics.jsonl, config.yaml and checkpoints. Returns 0, or 128 + the signal that
// stopped it after saving (a StopSignal of the caller must be alive to catch it).
// `observation`: what to watch of the steps beside what the configuration asks for, and the machine's rates;
// profile.json and trace.json then lie beside the metrics, and the profile of rank 0 is printed.
int run_training(const Job& job, const std::string& output, Observation observation = {});

}  // namespace farspan
