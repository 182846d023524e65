// SPDX-License-Identifier: Apache-2.0
// Mover: how one rank moves data among threads. In the CPU's memory everything is done at once, by the rank's own
// thread, and a stage that a rank has reached is reached. On a GPU (comm/cuda/cuda_mover.h) everything is queued: a
// stage that a rank's thread has reached is a point in its queues, and the others' queues wait for that point. The
// threads themselves meet in the same way in both cases, and never wait for the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "comm/threads/posting.h"

namespace farspan {

class Mover {
 public:
  virtual ~Mover() = default;

  // Work is queued and done later.
  virtual bool queues() const = 0;

  // The rank is about to post `own`: its memory is ready when all that it has queued so far is done.
  virtual void offer(Posting& own) = 0;
  // What is moved from now on comes after the point at which `posting`'s rank reached `stage`, as it has.
  virtual void follow(const Posting& posting, Stage stage) = 0;
  virtual void copy(std::byte* target, const std::byte* source, int64_t bytes) = 0;
  // As sum_in_rank_order of comm/rank_order_sum.h.
  virtual void sum(DType dtype, std::span<const std::byte* const> sources, int64_t offset, int64_t count,
                   std::byte* out) = 0;
  // With what has been moved so far, `own` reaches `stage`.
  virtual void reach(Posting& own, Stage stage) = 0;
  // What the rank computes from now on comes after the point at which each of `postings` was received.
  virtual void resume(std::span<const Posting* const> postings) = 0;
  // Returns when nothing is moved any more in the calls of `postings`, as far as they have come. Of a call that failed.
  virtual void settle(std::span<const Posting* const> postings) noexcept = 0;

  // Time since the last call of this in which the rank's computing waited in `resume`.
  virtual double take_exposed_seconds() = 0;
};

// The CPU's memory.
std::unique_ptr<Mover> make_host_mover();

}  // namespace farspan
