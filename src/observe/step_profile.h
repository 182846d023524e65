// SPDX-License-Identifier: Apache-2.0
// StepProfile: where one rank's steps spend their time, op by op, against what the machine can do.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device/device.h"

namespace farspan {

// The rates that one rank can reach, which shares are of (plan/machine.h). 0: unknown.
struct Ceilings {
  std::string machine;  // "NVIDIA H200"
  double gemm_flops = 0;
  double fp8_gemm_flops = 0;
  double attention_forward_flops = 0;
  double attention_backward_flops = 0;
  double memory_bandwidth = 0;  // of a copy, read plus written
  double peak_flops = 0;        // what MFU divides by

  double flops_of(const OpCost& cost) const;
};

class StepProfile {
 public:
  explicit StepProfile(Ceilings ceilings) : ceilings_(std::move(ceilings)) {}

  void add(const OpCost& cost, double seconds);
  void add(const Activity& activity, double seconds);
  void end_step(double seconds);
  // Drops the steps so far.
  void forget();

  int64_t steps() const { return steps_; }
  // What a person reads: a line an op, the longest first.
  std::string table() const;
  // {"steps":..,"seconds_per_step":..,"ops":[..],"activities":[..],"outside_seconds":..}, everything a step.
  std::string json() const;
  std::string ceilings_json() const;

 private:
  struct Sum {
    double calls = 0;
    double seconds = 0;
    double flops = 0;
    double bytes = 0;
  };
  // Ops of one name and size: the same product, say.
  struct CostKey {
    double flops = 0;
    double bytes = 0;
    auto operator<=>(const CostKey&) const = default;
  };
  struct Op {
    OpClass op_class = OpClass::memory;
    double ceiling = 0;  // FLOP/s, or bytes a second of a memory-bound op
    Sum sum;
    std::map<CostKey, Sum> by_cost;
  };
  using NamedOp = std::pair<std::string, Op>;

  static double rate(OpClass op_class, const Sum& sum);
  double a_step(double total) const { return total / static_cast<double>(steps_); }
  std::vector<NamedOp> longest_first() const;
  double outside_seconds() const;
  double share(double seconds) const { return seconds_ > 0 ? seconds / seconds_ : 0; }
  std::string op_line(const NamedOp& named) const;
  std::string op_json(const NamedOp& named) const;

  Ceilings ceilings_;
  int64_t steps_ = 0;
  double seconds_ = 0;
  std::map<std::string, Op> ops_;
  std::map<std::pair<ActivityKind, std::string>, Sum> activities_;  // all messages under one name
};

}  // namespace farspan
