// SPDX-License-Identifier: Apache-2.0
#include "observe/step_observer.h"

#include <algorithm>
#include <fmt/format.h>

#include "io/atomic_file.h"
#include "observe/gather_text.h"
#include "observe/profiler_ranges.h"

namespace farspan {
namespace {

// The smallest of all ranks' numbers, on every rank.
int64_t minimum(Communicator& group, int64_t own) {
  std::vector<int64_t> all(static_cast<size_t>(group.size()));
  group
      .all_gather(Tensor(&own, DType::i64, {1}), Tensor(all.data(), DType::i64, {std::ssize(all)}),
                  "begin of the trace")
      .wait();
  return *std::min_element(all.begin(), all.end());
}

void write_trace(const StepTrace& trace, Communicator& world, const std::string& folder) {
  const int64_t base = minimum(world, trace.begin_nanoseconds());
  const std::vector<std::string> events = gather_text(world, trace.events(world.rank(), base));
  if (world.rank() == 0) write_file_atomically(folder + "/trace.json", trace_file(events));
}

void write_profile(const StepProfile& profile, Communicator& world, const std::string& folder) {
  const std::vector<std::string> profiles = gather_text(world, profile.json());
  if (world.rank() == 0)
    write_file_atomically(folder + "/profile.json", fmt::format("{{\"ceilings\":{},\"ranks\":[\n{}\n]}}\n",
                                                                profile.ceilings_json(), fmt::join(profiles, ",\n")));
}

}  // namespace

StepObserver::StepObserver(const Observation& what, Device& device, int64_t first_step, int64_t last_step)
    : device_(device),
      first_step_(first_step),
      last_step_(last_step),
      traced_step_(std::min(first_step + 2, last_step)) {
  if (what.profile) profile_.emplace(what.ceilings);
  if (what.trace) trace_.emplace();
}

StepObserver::~StepObserver() { device_.observe(nullptr); }

void StepObserver::begin_step(int64_t step) {
  step_ = step;
  in_step_ = true;
  if (!watching()) return;
  device_.synchronize();
  begin_profiler_range(fmt::format("step {}", step));
  device_.observe(this);
  step_begin_ = std::chrono::steady_clock::now();
}

void StepObserver::end_step() {
  const bool watched = watching();
  in_step_ = false;
  if (!watched) return;
  device_.synchronize();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - step_begin_).count();
  device_.report_timings();
  device_.observe(nullptr);
  end_profiler_range();
  if (!profile_) return;
  profile_->end_step(seconds);
  if (step_ == first_step_ && first_step_ < last_step_) profile_->forget();
}

void StepObserver::write(Communicator& world, const std::string& folder) const {
  if (trace_) write_trace(*trace_, world, folder);
  if (profile_) write_profile(*profile_, world, folder);
}

std::string StepObserver::profile_table() const { return profile_ ? profile_->table() : ""; }

void StepObserver::on_op(const OpCost& cost, OpTime time) {
  if (profile_) profile_->add(cost, time.seconds);
  if (tracing()) trace_->add(cost, time);
}

void StepObserver::on_activity(const Activity& activity, OpTime time) {
  if (profile_) profile_->add(activity, time.seconds);
  if (tracing()) trace_->add(activity, time);
}

void StepObserver::on_call(std::string_view label, int64_t bytes, double started, double waited_from, double done) {
  if (!watching()) return;
  on_activity({.kind = ActivityKind::communication, .label = label, .bytes = static_cast<double>(bytes)},
              {started, done - started});
  on_activity({.kind = ActivityKind::waiting, .label = label}, {waited_from, done - waited_from});
}

void StepObserver::before(std::string_view name) { begin_profiler_range(name); }

void StepObserver::after() { end_profiler_range(); }

}  // namespace farspan
