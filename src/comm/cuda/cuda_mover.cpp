// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/cuda_mover.h"

#include <array>
#include <optional>
#include <set>
#include <utility>

#include "comm/cuda/event_pool.h"
#include "comm/cuda/exposed_stream_time.h"
#include "comm/cuda/rank_order_sum.h"
#include "comm/cuda/transfer_stream.h"
#include "device/cuda/cuda.h"

namespace farspan {
namespace {

// When a posting's stages are reached on the GPU. An event is recorded once, by its rank's thread, before the others
// learn of the stage from the Rendezvous; so whoever knows the stage may look at its event without a lock.
class CudaTrail final : public Trail {
 public:
  CudaTrail(std::shared_ptr<cuda::EventPool> pool, int gpu) : pool_(std::move(pool)), gpu_(gpu) {}
  ~CudaTrail() override {
    for (std::optional<cuda::Event>& event : events_)
      if (event) pool_->give_back(std::move(*event));
  }
  CudaTrail(const CudaTrail&) = delete;
  CudaTrail& operator=(const CudaTrail&) = delete;

  void record(Stage stage, cudaStream_t stream) {
    std::optional<cuda::Event>& event = events_[place(stage)];
    event.emplace(pool_->take());
    event->record(stream);
  }
  // Null where the stage has not been recorded.
  const cuda::Event* event_at(Stage stage) const {
    const std::optional<cuda::Event>& event = events_[place(stage)];
    return event ? &*event : nullptr;
  }
  int gpu() const { return gpu_; }

 private:
  static size_t place(Stage stage) {
    FARSPAN_CHECK(stage == Stage::posted || stage == Stage::reduced || stage == Stage::received,
                  "no event belongs to stage {}", static_cast<int>(stage));
    return static_cast<size_t>(stage) - static_cast<size_t>(Stage::posted);
  }

  std::shared_ptr<cuda::EventPool> pool_;
  int gpu_;
  std::array<std::optional<cuda::Event>, 3> events_;
};

const CudaTrail& trail_of(const Posting& posting) {
  const auto* trail = dynamic_cast<const CudaTrail*>(posting.trail.get());
  FARSPAN_CHECK(trail != nullptr, "'{}': a rank of the group has its tensors elsewhere than on a GPU", posting.label);
  return *trail;
}

class CudaMover final : public Mover {
 public:
  explicit CudaMover(Device& device)
      : device_(device),
        compute_(cuda::compute_stream(device)),
        exposed_(compute_),
        gpu_(device.accelerator().index()) {}

  bool queues() const override { return true; }

  void offer(Posting& own) override {
    auto trail = std::make_unique<CudaTrail>(pool_, gpu_);
    trail->record(Stage::posted, compute_);
    own.trail = std::move(trail);
  }

  void follow(const Posting& posting, Stage stage) override {
    const CudaTrail& trail = trail_of(posting);
    if (trail.gpu() != gpu_) open_way_to(trail.gpu());
    trail.event_at(stage)->block(stream_);
    label_ = posting.label;
  }

  void copy(std::byte* target, const std::byte* source, int64_t bytes) override {
    observed(bytes, [&] {
      FARSPAN_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_));
    });
  }

  void sum(DType dtype, std::span<const std::byte* const> sources, int64_t offset, int64_t count,
           std::byte* out) override {
    if (sources.size() == 1) {
      const std::byte* lone = sources[0] + offset * size_of(dtype);
      if (lone != out && count > 0) copy(out, lone, count * size_of(dtype));
      return;
    }
    for (int gpu : unreadable_)
      throw ConfigError(fmt::format(
          "communication.backend threads: GPU {} cannot read the memory of GPU {}; use backend nccl", gpu_, gpu));
    observed(std::ssize(sources) * count * size_of(dtype),
             [&] { cuda::sum_in_rank_order(stream_, dtype, sources, offset, count, out); });
  }

  void reach(Posting& own, Stage stage) override { static_cast<CudaTrail&>(*own.trail).record(stage, stream_); }

  void resume(std::span<const Posting* const> postings) override {
    device_.run_observed({.kind = ActivityKind::waiting, .label = postings.front()->label}, [&] {
      exposed_.begin();
      for (const Posting* posting : postings) trail_of(*posting).event_at(Stage::received)->block(compute_);
      exposed_.end();
    });
  }

  void settle(std::span<const Posting* const> postings) noexcept override {
    cudaStreamSynchronize(stream_);
    for (const Posting* posting : postings) {
      const auto* trail = dynamic_cast<const CudaTrail*>(posting->trail.get());
      if (trail == nullptr) continue;
      for (Stage stage : {Stage::reduced, Stage::received})
        if (const cuda::Event* event = trail->event_at(stage)) cudaEventSynchronize(event->get());
    }
  }

  double take_exposed_seconds() override { return exposed_.take_seconds(); }

 private:
  template <typename Body>
  void observed(int64_t bytes, Body&& body) {
    device_.run_observed({.kind = ActivityKind::communication,
                          .label = label_,
                          .bytes = static_cast<double>(bytes),
                          .stream = stream_.get()},
                         std::forward<Body>(body));
  }

  // Lets this GPU read another's memory, once. Copies go through the host where it cannot; sums do not.
  void open_way_to(int gpu) {
    if (!opened_.insert(gpu).second) return;
    int can = 0;
    FARSPAN_CUDA(cudaDeviceCanAccessPeer(&can, gpu_, gpu));
    if (can == 0) {
      unreadable_.insert(gpu);
      return;
    }
    const cudaError_t status = cudaDeviceEnablePeerAccess(gpu, 0);
    if (status != cudaErrorPeerAccessAlreadyEnabled) FARSPAN_CUDA(status);
    static_cast<void>(cudaGetLastError());
  }

  Device& device_;
  std::string label_;  // of the call under way
  cudaStream_t compute_;
  cuda::TransferStream stream_;
  std::shared_ptr<cuda::EventPool> pool_ = std::make_shared<cuda::EventPool>();
  cuda::ExposedStreamTime exposed_;
  int gpu_;
  std::set<int> opened_;
  std::set<int> unreadable_;
};

}  // namespace

std::unique_ptr<Mover> make_cuda_mover(Device& device) { return std::make_unique<CudaMover>(device); }

}  // namespace farspan
