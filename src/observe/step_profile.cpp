// SPDX-License-Identifier: Apache-2.0
#include "observe/step_profile.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>

#include "io/json_text.h"

namespace farspan {
namespace {

std::string_view name_of(OpClass op_class) {
  switch (op_class) {
    case OpClass::gemm:
      return "gemm";
    case OpClass::attention:
      return "attention";
    case OpClass::memory:
      return "memory";
    case OpClass::gemm_fp8:
      return "gemm_fp8";
  }
  return "";
}

std::string_view name_of(ActivityKind kind) {
  switch (kind) {
    case ActivityKind::phase:
      return "phase";
    case ActivityKind::communication:
      return "communication";
    case ActivityKind::waiting:
      return "waiting";
    case ActivityKind::copy:
      return "copy";
  }
  return "";
}

std::string percent(double share) { return fmt::format("{:.1f}%", 100 * share); }

std::string json_or_null(double value, bool known) { return known ? json_number(value) : "null"; }

}  // namespace

double Ceilings::flops_of(const OpCost& cost) const {
  if (cost.op_class == OpClass::gemm) return gemm_flops;
  if (cost.op_class == OpClass::gemm_fp8) return fp8_gemm_flops;
  if (cost.op_class == OpClass::memory) return 0;
  return cost.op.find("backward") == std::string_view::npos ? attention_forward_flops : attention_backward_flops;
}

void StepProfile::add(const OpCost& cost, double seconds) {
  Op& op = ops_[std::string(cost.op)];
  op.op_class = cost.op_class;
  op.ceiling = cost.op_class == OpClass::memory ? ceilings_.memory_bandwidth : ceilings_.flops_of(cost);
  for (Sum* sum : {&op.sum, &op.by_cost[{cost.flops, cost.bytes}]}) {
    sum->calls += 1;
    sum->seconds += seconds;
    sum->flops += cost.flops;
    sum->bytes += cost.bytes;
  }
}

void StepProfile::add(const Activity& activity, double seconds) {
  const bool own_name = activity.kind == ActivityKind::phase || activity.kind == ActivityKind::copy;
  Sum& sum = activities_[{activity.kind, std::string(own_name ? activity.label : "all messages")}];
  sum.calls += 1;
  sum.seconds += seconds;
  sum.bytes += activity.bytes;
}

void StepProfile::end_step(double seconds) {
  ++steps_;
  seconds_ += seconds;
}

void StepProfile::forget() {
  steps_ = 0;
  seconds_ = 0;
  ops_.clear();
  activities_.clear();
}

double StepProfile::rate(OpClass op_class, const Sum& sum) {
  if (sum.seconds <= 0) return 0;
  return (op_class == OpClass::memory ? sum.bytes : sum.flops) / sum.seconds;
}

std::vector<StepProfile::NamedOp> StepProfile::longest_first() const {
  std::vector<NamedOp> ops(ops_.begin(), ops_.end());
  std::stable_sort(ops.begin(), ops.end(),
                   [](const NamedOp& a, const NamedOp& b) { return a.second.sum.seconds > b.second.sum.seconds; });
  return ops;
}

double StepProfile::outside_seconds() const {
  double inside = 0;
  for (const auto& [name, op] : ops_) inside += op.sum.seconds;
  return seconds_ - inside;
}

std::string StepProfile::op_line(const NamedOp& named) const {
  const auto& [name, op] = named;
  const double value = rate(op.op_class, op.sum);
  const bool memory = op.op_class == OpClass::memory;
  const std::string speed =
      memory ? fmt::format("{:.0f} GB/s", value / 1e9) : fmt::format("{:.3g} TFLOP/s", value / 1e12);
  return fmt::format("{:<28} {:>8.0f} {:>11.3f} {:>7} {:>15} {:>10}\n", name, a_step(op.sum.calls),
                     1e3 * a_step(op.sum.seconds), percent(share(op.sum.seconds)), speed,
                     op.ceiling > 0 ? percent(value / op.ceiling) : "");
}

std::string StepProfile::table() const {
  if (steps_ == 0) return "no step was profiled\n";
  std::string text = fmt::format("{} steps of {:.3f} ms\n", steps_, 1e3 * a_step(seconds_));
  text += fmt::format("{:<28} {:>8} {:>11} {:>7} {:>15} {:>10}\n", "op", "calls", "ms", "share", "rate", "of ceiling");
  for (const NamedOp& named : longest_first()) text += op_line(named);
  const double outside = outside_seconds();
  text +=
      fmt::format("{:<28} {:>8} {:>11.3f} {:>7}\n", "outside ops", "", 1e3 * a_step(outside), percent(share(outside)));
  for (const auto& [named, sum] : activities_)
    text +=
        fmt::format("{:<28} {:>8.0f} {:>11.3f} {:>7}{}\n", fmt::format("{}: {}", name_of(named.first), named.second),
                    a_step(sum.calls), 1e3 * a_step(sum.seconds), percent(share(sum.seconds)),
                    sum.bytes > 0 ? fmt::format(" {:>10.3g} GB/s", sum.bytes / sum.seconds / 1e9) : "");
  text += fmt::format(
      "ceilings of {}: GEMM {:.3g} TFLOP/s; attention {:.3g} forward, {:.3g} backward; memory {:.0f} GB/s\n",
      ceilings_.machine, ceilings_.gemm_flops / 1e12, ceilings_.attention_forward_flops / 1e12,
      ceilings_.attention_backward_flops / 1e12, ceilings_.memory_bandwidth / 1e9);
  return text;
}

std::string StepProfile::op_json(const NamedOp& named) const {
  const auto& name = named.first;
  const auto& op = named.second;
  const auto fields = [&](const Sum& sum) {
    return fmt::format("\"calls\":{},\"seconds\":{},\"flops\":{},\"bytes\":{},\"of_ceiling\":{}",
                       json_number(a_step(sum.calls)), json_number(a_step(sum.seconds)), json_number(a_step(sum.flops)),
                       json_number(a_step(sum.bytes)),
                       json_or_null(rate(op.op_class, sum) / op.ceiling, op.ceiling > 0));
  };
  std::string by_cost;
  for (const auto& [key, sum] : op.by_cost) by_cost += fmt::format("{}{{{}}}", by_cost.empty() ? "" : ",", fields(sum));
  return fmt::format("{{\"op\":{},\"class\":\"{}\",\"share\":{},{},\"by_cost\":[{}]}}", json_string(name),
                     name_of(op.op_class), json_number(share(op.sum.seconds)), fields(op.sum), by_cost);
}

std::string StepProfile::json() const {
  if (steps_ == 0) return "{\"steps\":0}";
  std::string ops, activities;
  for (const NamedOp& named : longest_first()) ops += fmt::format("{}{}", ops.empty() ? "" : ",", op_json(named));
  for (const auto& [named, sum] : activities_)
    activities +=
        fmt::format("{}{{\"kind\":\"{}\",\"label\":{},\"calls\":{},\"seconds\":{},\"bytes\":{}}}",
                    activities.empty() ? "" : ",", name_of(named.first), json_string(named.second),
                    json_number(a_step(sum.calls)), json_number(a_step(sum.seconds)), json_number(a_step(sum.bytes)));
  return fmt::format("{{\"steps\":{},\"seconds_per_step\":{},\"outside_seconds\":{},\"ops\":[{}],\"activities\":[{}]}}",
                     steps_, json_number(a_step(seconds_)), json_number(a_step(outside_seconds())), ops, activities);
}

std::string StepProfile::ceilings_json() const {
  const auto rate = [](double value) { return json_or_null(value, value > 0); };
  return fmt::format(
      "{{\"machine\":{},\"gemm_flops\":{},\"attention_forward_flops\":{},\"attention_backward_flops\":{},"
      "\"memory_bytes_per_second\":{}}}",
      json_string(ceilings_.machine), rate(ceilings_.gemm_flops), rate(ceilings_.attention_forward_flops),
      rate(ceilings_.attention_backward_flops), rate(ceilings_.memory_bandwidth));
}

}  // namespace farspan
