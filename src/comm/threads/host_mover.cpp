// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "comm/rank_order_sum.h"
#include "comm/threads/mover.h"

namespace farspan {
namespace {

class HostMover final : public Mover {
 public:
  bool queues() const override { return false; }
  void offer(Posting&) override {}
  void follow(const Posting&, Stage) override {}
  void copy(std::byte* target, const std::byte* source, int64_t bytes) override {
    std::memcpy(target, source, static_cast<size_t>(bytes));
  }
  void sum(DType dtype, std::span<const std::byte* const> sources, int64_t offset, int64_t count,
           std::byte* out) override {
    sum_in_rank_order(dtype, sources, offset, count, out);
  }
  void reach(Posting&, Stage) override {}
  void resume(std::span<const Posting* const>) override {}
  void settle(std::span<const Posting* const>) noexcept override {}
  double take_exposed_seconds() override { return 0; }
};

}  // namespace

std::unique_ptr<Mover> make_host_mover() { return std::make_unique<HostMover>(); }

}  // namespace farspan
