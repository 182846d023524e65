// SPDX-License-Identifier: Apache-2.0
#include "observe/step_trace.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fmt/format.h>
#include <limits>

#include "io/json_text.h"

namespace farspan {
namespace {

constexpr std::array<std::string_view, 4> kThreadNames = {"phases", "compute", "communication", "copies"};
constexpr int kMostLanes = 100;  // of one kind: thread ids are thread * kMostLanes + lane

template <typename Clock>
int64_t nanoseconds_of() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

std::string metadata(int rank, int thread_id, std::string_view what, const std::string& arguments) {
  return fmt::format("{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"args\":{{{}}}}}", rank, thread_id, what,
                     arguments);
}

std::string thread_metadata(int rank, int thread, int lane) {
  const int id = thread * kMostLanes + lane;
  const std::string number = lane == 0 ? "" : fmt::format(" {}", lane + 1);
  return metadata(rank, id, "thread_name",
                  fmt::format("\"name\":\"{}{}\"", kThreadNames[static_cast<size_t>(thread)], number)) +
         ",\n" + metadata(rank, id, "thread_sort_index", fmt::format("\"sort_index\":{}", id));
}

// JSON fields of an amount and its rate, `scaled` a second; none of nothing.
std::string amount(std::string_view name, double value, std::string_view rate_name, double scaled, double seconds) {
  if (value <= 0) return {};
  return fmt::format("\"{}\":{:.4g},\"{}\":{:.4g}", name, value, rate_name, seconds > 0 ? scaled / seconds : 0.0);
}

// Events of one thread lie one behind the other or one inside the other; those that overlap otherwise are shown on
// further lanes. Gives each event, by its begin, the first lane that has room.
class Lanes {
 public:
  int lane_of(double begin, double end) {
    for (size_t lane = 0; lane < open_.size(); ++lane)
      if (fits(open_[lane], begin, end)) return static_cast<int>(lane);
    if (std::ssize(open_) < kMostLanes) open_.emplace_back();
    open_.back().push_back(end);
    return static_cast<int>(open_.size()) - 1;
  }

 private:
  // `ends`: of the events that enclose this place, the outermost first.
  static bool fits(std::vector<double>& ends, double begin, double end) {
    while (!ends.empty() && ends.back() <= begin) ends.pop_back();
    if (!ends.empty() && ends.back() < end) return false;
    ends.push_back(end);
    return true;
  }
  std::vector<std::vector<double>> open_;
};

}  // namespace

StepTrace::StepTrace()
    : calendar_minus_steady_(nanoseconds_of<std::chrono::system_clock>() -
                             nanoseconds_of<std::chrono::steady_clock>()) {}

void StepTrace::add(const OpCost& cost, OpTime time) {
  std::string arguments = amount("GFLOP", cost.flops / 1e9, "TFLOP/s", cost.flops / 1e12, time.seconds);
  if (cost.flops > 0 && cost.bytes > 0) arguments += ",";
  arguments += amount("MB", cost.bytes / 1e6, "GB/s", cost.bytes / 1e9, time.seconds);
  events_[compute].push_back({std::string(cost.op), time, std::move(arguments)});
}

void StepTrace::add(const Activity& activity, OpTime time) {
  const bool waiting = activity.kind == ActivityKind::waiting;
  events_[thread_of(activity.kind)].push_back(
      {fmt::format("{}{}", waiting ? "wait: " : "", activity.label), time,
       amount("MB", activity.bytes / 1e6, "GB/s", activity.bytes / 1e9, time.seconds)});
}

StepTrace::Thread StepTrace::thread_of(ActivityKind kind) {
  switch (kind) {
    case ActivityKind::phase:
      return phases;
    case ActivityKind::communication:
      return communication;
    case ActivityKind::waiting:
      return compute;
    case ActivityKind::copy:
      return copies;
  }
  return phases;
}

bool StepTrace::empty() const {
  return std::all_of(events_.begin(), events_.end(), [](const std::vector<Event>& events) { return events.empty(); });
}

int64_t StepTrace::begin_nanoseconds() const {
  if (empty()) return std::numeric_limits<int64_t>::max();
  double begin = std::numeric_limits<double>::infinity();
  for (const std::vector<Event>& events : events_)
    for (const Event& event : events) begin = std::min(begin, event.time.begin);
  return std::llround(begin * 1e9) + calendar_minus_steady_;
}

std::string StepTrace::events(int rank, int64_t base_nanoseconds) const {
  const double base = static_cast<double>(base_nanoseconds - calendar_minus_steady_) * 1e-9;  // on the steady clock
  std::string text = metadata(rank, 0, "process_name", fmt::format("\"name\":\"rank {}\"", rank)) + ",\n" +
                     metadata(rank, 0, "process_sort_index", fmt::format("\"sort_index\":{}", rank));
  for (int thread = 0; thread < kThreads; ++thread) {
    std::vector<Event> sorted = events_[static_cast<size_t>(thread)];
    std::stable_sort(sorted.begin(), sorted.end(), [](const Event& a, const Event& b) {
      if (a.time.begin != b.time.begin) return a.time.begin < b.time.begin;
      return a.time.seconds > b.time.seconds;  // the outer one first
    });
    Lanes lanes;
    int most = -1;
    for (const Event& event : sorted) {
      const int lane = lanes.lane_of(event.time.begin, event.time.begin + event.time.seconds);
      while (most < lane) text += ",\n" + thread_metadata(rank, thread, ++most);
      text += fmt::format(
          ",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f},\"name\":{},\"args\":{{{}}}}}", rank,
          thread * kMostLanes + lane, std::max(0.0, event.time.begin - base) * 1e6, event.time.seconds * 1e6,
          json_string(event.name), event.arguments);
    }
  }
  return text;
}

std::string trace_file(const std::vector<std::string>& events_by_rank) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (size_t rank = 0; rank < events_by_rank.size(); ++rank) {
    if (rank > 0) text += ",\n";
    text += events_by_rank[rank];
  }
  return text + "\n]}\n";
}

}  // namespace farspan
