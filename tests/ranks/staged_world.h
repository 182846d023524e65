// SPDX-License-Identifier: Apache-2.0
// StagedWorld: what a test has in the CPU's memory goes through the memory of the rank's GPU, so that cases written for
// any backend (communicator_cases.h) run on GPUs too. Each call copies its tensors there, has the rank's group for
// that memory do it, and copies all of them back when it is waited for, inputs too: they must come back unchanged.
#pragma once

#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/world.h"
#include "device/device.h"

namespace farspan {

// Stretches of the CPU's memory and where they lie on the GPU. One that is part of another added before shares it.
class Twins {
 public:
  Twins(std::byte* memory, int64_t bytes) : memory_(memory), bytes_(bytes) {}

  Tensor add(const Tensor& tensor) {
    if (tensor.bytes() == 0) return tensor;
    auto* begin = static_cast<std::byte*>(tensor.raw());
    for (const Twin& twin : twins_)
      if (begin >= twin.host && begin + tensor.bytes() <= twin.host + twin.bytes)
        return Tensor(twin.gpu + (begin - twin.host), tensor.dtype(), tensor.shape());
    constexpr int64_t kAlignment = 256;
    twins_.push_back({begin, memory_ + used_, tensor.bytes()});
    used_ += (tensor.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    FARSPAN_CHECK(used_ <= bytes_, "a test stages {} bytes, there are {}", used_, bytes_);
    return Tensor(twins_.back().gpu, tensor.dtype(), tensor.shape());
  }
  void to_gpu(Device& device) const {
    for (const Twin& twin : twins_) copy_to_device(device, twin.host, twin.gpu, twin.bytes);
  }
  void to_host(Device& device) const {
    for (const Twin& twin : twins_) copy_to_host(device, twin.gpu, twin.host, twin.bytes);
  }

 private:
  struct Twin {
    std::byte* host;
    std::byte* gpu;
    int64_t bytes;
  };
  std::byte* memory_;
  int64_t bytes_;
  int64_t used_ = 0;
  std::vector<Twin> twins_;
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> group, Device& device)
      : Communicator(group->dimension(), group->rank(), group->ranks()),
        group_(std::move(group)),
        device_(device),
        memory_(device, kSlots * kSlotBytes),
        taken_(kSlots) {}

  Work all_reduce(Tensor data, std::string_view label) override {
    auto call = begin();
    const Tensor on_gpu = call->twins.add(data);
    return start(std::move(call), [&] { return group_->all_reduce(on_gpu, label); });
  }
  Work all_gather(const Tensor& part, Tensor whole, std::string_view label) override {
    auto call = begin();
    const Tensor whole_on_gpu = call->twins.add(whole);
    const Tensor part_on_gpu = call->twins.add(part);
    return start(std::move(call), [&] { return group_->all_gather(part_on_gpu, whole_on_gpu, label); });
  }
  Work reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) override {
    auto call = begin();
    const Tensor whole_on_gpu = call->twins.add(whole);
    const Tensor part_on_gpu = call->twins.add(part);
    return start(std::move(call), [&] { return group_->reduce_scatter(whole_on_gpu, part_on_gpu, label); });
  }
  Work all_to_all(const Tensor& send, Tensor receive, std::string_view label) override {
    auto call = begin();
    const Tensor send_on_gpu = call->twins.add(send);
    const Tensor receive_on_gpu = call->twins.add(receive);
    return start(std::move(call), [&] { return group_->all_to_all(send_on_gpu, receive_on_gpu, label); });
  }
  Work exchange(std::span<const Message> sends, std::span<const Message> receives, std::string_view label) override {
    auto call = begin();
    const auto stage = [&](std::span<const Message> messages) {
      std::vector<Message> staged;
      for (const Message& message : messages) staged.push_back({message.peer, call->twins.add(message.data)});
      return staged;
    };
    const std::vector<Message> sent = stage(sends), received = stage(receives);
    return start(std::move(call), [&] { return group_->exchange(sent, received, label); });
  }
  void barrier(std::string_view label) override { group_->barrier(label); }

 private:
  static constexpr int64_t kSlots = 4;  // calls open at a time
  static constexpr int64_t kSlotBytes = int64_t{16} << 20;

  struct Call final : Work::State {
    Call(StagedCommunicator& communicator, size_t number)
        : owner(communicator),
          slot(number),
          twins(static_cast<std::byte*>(owner.memory_.data()) + static_cast<int64_t>(slot) * kSlotBytes, kSlotBytes) {}
    ~Call() override { owner.taken_[slot] = false; }
    void wait() override {
      work.wait();
      twins.to_host(owner.device_);
    }
    StagedCommunicator& owner;
    size_t slot;
    Twins twins;
    Work work;
  };

  std::unique_ptr<Call> begin() {
    for (size_t slot = 0; slot < taken_.size(); ++slot)
      if (!taken_[slot]) {
        taken_[slot] = true;
        return std::make_unique<Call>(*this, slot);
      }
    throw InternalError("a test has too many calls open");
  }
  template <typename Start>
  Work start(std::unique_ptr<Call> call, Start on_gpu) {
    call->twins.to_gpu(device_);
    call->work = on_gpu();
    return Work(std::move(call));
  }
  void update_traffic() override {
    const Traffic more = group_->traffic();
    group_->reset_traffic();
    traffic_.bytes_sent += more.bytes_sent;
    traffic_.bytes_received += more.bytes_received;
    traffic_.calls += more.calls;
  }

  std::unique_ptr<Communicator> group_;
  Device& device_;
  DeviceMemory memory_;
  std::vector<bool> taken_;
};

class StagedWorld final : public World {
 public:
  StagedWorld(World& world, Device& device) : world_(world), device_(device) {}

  int size() const override { return world_.size(); }
  int first_local_rank() const override { return world_.first_local_rank(); }
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension) override {
    return group(world_rank, std::move(ranks), dimension, device_);
  }
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                      Device& device) override {
    return std::make_unique<StagedCommunicator>(world_.group(world_rank, std::move(ranks), dimension, device), device);
  }
  int gpu_of(int world_rank) const override { return world_.gpu_of(world_rank); }
  void set_position(int world_rank, std::string position) override {
    world_.set_position(world_rank, std::move(position));
  }
  void abort(int world_rank, const std::string& reason) override { world_.abort(world_rank, reason); }
  bool aborted() const override { return world_.aborted(); }
  std::string report() const override { return world_.report(); }

 private:
  World& world_;
  Device& device_;
};

}  // namespace farspan
