// SPDX-License-Identifier: Apache-2.0
// What ranks with a GPU each receive from each other, by call and size of message: what `link_bandwidth` of
// plan/machine.cpp stands for.
//
//   cuda_link_bench [ranks, default one for each GPU] [seconds for each figure]
//
// GB/s that a rank receives. Ranks that share a GPU are joined by copies, others by NCCL.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

#include "comm/threads/thread_world.h"
#include "device/accelerator.h"
#include "device/device.h"

namespace farspan {
namespace {

constexpr double kTimeoutSeconds = 60;

// One rank's part of a message of `bytes`, which calls divide by the number of ranks.
class Rank {
 public:
  Rank(int rank, World& world, int64_t bytes)
      : device_(DeviceKind::cuda, 1, world.gpu_of(rank)),
        memory_(device_, 2 * bytes),
        group_(world.group(rank, everyone(world.size()), Dimension::cp, device_)),
        sent_(memory_.data(), DType::f32, {bytes / 4}),
        received_(static_cast<char*>(memory_.data()) + bytes, DType::f32, {bytes / 4}) {
    group_->register_memory(memory_.data(), memory_.bytes());
  }

  // GB/s that the rank receives in calls of `body`, about `seconds` of them.
  template <typename Body>
  double rate(int64_t received_bytes, double seconds, Body&& body) {
    constexpr double kGuess = 200e9;  // all ranks must call as often, whatever they measure
    const auto bytes = static_cast<double>(received_bytes);
    const int times = std::max(5, static_cast<int>(seconds * kGuess / bytes));
    double took = 0;
    for (const int count : {3, times}) {
      group_->barrier("start");
      device_.synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < count; ++i) body(*group_).wait();
      device_.synchronize();
      took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / count;
    }
    return bytes / took * 1e-9;
  }

  const Tensor& sent() const { return sent_; }
  const Tensor& received() const { return received_; }
  Tensor piece(const Tensor& x) const {
    const int64_t length = x.numel() / group_->size();
    return x.slice(0, group_->rank() * length, (group_->rank() + 1) * length);
  }

 private:
  static std::vector<int> everyone(int size) {
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  Device device_;
  DeviceMemory memory_;
  std::unique_ptr<Communicator> group_;
  Tensor sent_, received_;
};

int run(int ranks, double seconds) {
  std::printf("%d ranks, GB/s received by rank 0\n%12s %10s %10s %14s %10s %10s\n", ranks, "bytes", "exchange",
              "all_gather", "reduce_scatter", "all_reduce", "all_to_all");
  for (int64_t bytes = int64_t{1} << 20; bytes <= int64_t{1} << 28; bytes *= 4)
    run_thread_ranks(ranks, kTimeoutSeconds, [&](int number, World& world) {
      Rank rank(number, world, bytes);
      const Tensor sent = rank.sent(), received = rank.received();
      const int64_t from_others = bytes / ranks * (ranks - 1);
      const int next = (number + 1) % ranks, previous = (number + ranks - 1) % ranks;
      const double exchange = rank.rate(bytes, seconds, [&](Communicator& group) {
        return group.exchange(std::vector<Message>{{next, sent}}, std::vector<Message>{{previous, received}}, "ring");
      });
      const double all_gather = rank.rate(from_others, seconds, [&](Communicator& group) {
        return group.all_gather(rank.piece(sent), received, "all_gather");
      });
      const double reduce_scatter = rank.rate(from_others, seconds, [&](Communicator& group) {
        return group.reduce_scatter(sent, rank.piece(received), "reduce_scatter");
      });
      const double all_reduce = rank.rate(
          2 * from_others, seconds, [&](Communicator& group) { return group.all_reduce(received, "all_reduce"); });
      const double all_to_all = rank.rate(
          from_others, seconds, [&](Communicator& group) { return group.all_to_all(sent, received, "all_to_all"); });
      if (number == 0)
        std::printf("%12lld %10.1f %10.1f %14.1f %10.1f %10.1f\n", static_cast<long long>(bytes), exchange, all_gather,
                    reduce_scatter, all_reduce, all_to_all);
      std::fflush(stdout);
    });
  return 0;
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : farspan::cuda_device_count();
  if (ranks < 2) {
    std::fprintf(stderr, "cuda_link_bench: %d ranks, needs 2 at least\n", ranks);
    return 2;
  }
  return farspan::run(ranks, argc > 2 ? std::atof(argv[2]) : 0.3);
}
