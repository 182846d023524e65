// SPDX-License-Identifier: Apache-2.0
#include "comm/dry/dry_communicator.h"

#include "comm/collective_rules.h"

namespace farspan {
namespace {

class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(Dimension dimension, int rank, std::vector<int> ranks)
      : Communicator(dimension, rank, std::move(ranks)) {}

  Work all_reduce(Tensor data, std::string_view label) override {
    return completed(check_all_reduce(data, rank(), size(), label));
  }
  Work all_gather(const Tensor& part, Tensor whole, std::string_view label) override {
    return completed(check_all_gather(part, whole, size(), label));
  }
  Work reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) override {
    return completed(check_reduce_scatter(whole, part, size(), label));
  }
  Work all_to_all(const Tensor& send, Tensor receive, std::string_view label) override {
    return completed(check_all_to_all(send, receive, size(), label));
  }
  Work exchange(std::span<const Message> sends, std::span<const Message> receives, std::string_view label) override {
    return completed(check_exchange(sends, receives, rank(), size(), label));
  }
  void barrier(std::string_view) override { completed({}); }

 private:
  Work completed(const CallBytes& bytes) {
    count(bytes, traffic_);
    return Work();
  }
};

}  // namespace

std::unique_ptr<Communicator> make_dry_communicator(Dimension dimension, int rank, std::vector<int> ranks) {
  FARSPAN_CHECK(rank >= 0 && rank < static_cast<int>(ranks.size()), "{} group of {}: there is no rank {}",
                name_of(dimension), ranks.size(), rank);
  return std::make_unique<DryCommunicator>(dimension, rank, std::move(ranks));
}

}  // namespace farspan
