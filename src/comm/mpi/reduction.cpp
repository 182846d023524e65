// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/reduction.h"

#include <algorithm>

#include "base/error.h"
#include "comm/rank_order_sum.h"

namespace farspan {

std::byte* Staging::take(const void* by) {
  if (user != nullptr && user != by) return nullptr;
  user = by;
  if (memory.empty()) memory.resize(static_cast<size_t>(kStagingBytes));
  return memory.data();
}

int64_t RankOrderReduction::piece_bytes(int group_size) {
  constexpr int64_t kAlignment = 64;
  const int64_t share = kStagingBytes / (kSlots * std::max(group_size - 1, 1));
  FARSPAN_CHECK(share >= kAlignment, "a sum over {} ranks: staging memory is for {} at most", group_size,
                kStagingBytes / (kSlots * kAlignment) + 1);
  return share / kAlignment * kAlignment;
}

RankOrderReduction::RankOrderReduction(DType dtype, std::vector<Source> sources, int64_t bytes, std::byte* out)
    : dtype_(dtype),
      sources_(std::move(sources)),
      bytes_(bytes),
      out_(out),
      piece_bytes_(piece_bytes(static_cast<int>(sources_.size()))),
      pieces_((bytes + piece_bytes_ - 1) / piece_bytes_) {
  for (std::vector<Arrival>& of_slot : arrivals_) of_slot.resize(sources_.size());
}

int64_t RankOrderReduction::bytes_of(int64_t piece) const {
  return std::min(piece_bytes_, bytes_ - piece * piece_bytes_);
}

std::byte* RankOrderReduction::slot(std::byte* staging, int64_t piece, size_t source) const {
  // The own stretch needs no slot: peers after it move up by one.
  const auto own = std::find_if(sources_.begin(), sources_.end(), [](const Source& s) { return s.own != nullptr; });
  const int64_t index = static_cast<int64_t>(source) - (own - sources_.begin() < static_cast<int64_t>(source) ? 1 : 0);
  const int64_t peers = std::ssize(sources_) - 1;
  return staging + ((piece % kSlots) * peers + index) * piece_bytes_;
}

void RankOrderReduction::start_piece(MpiLibrary& library, std::byte* staging) {
  std::vector<Arrival>& arrivals = arrivals_[static_cast<size_t>(started_ % kSlots)];
  for (size_t q = 0; q < sources_.size(); ++q) {
    arrivals[q].over = sources_[q].own != nullptr;
    if (!arrivals[q].over)
      arrivals[q].request =
          library.receive(sources_[q].peer, sources_[q].tag, slot(staging, started_, q), bytes_of(started_));
  }
  ++started_;
}

// Whether all of the next piece to sum is there.
bool RankOrderReduction::arrived(MpiLibrary& library) {
  bool all = true;
  for (Arrival& arrival : arrivals_[static_cast<size_t>(summed_ % kSlots)]) {
    if (arrival.over) continue;
    int64_t received = 0;
    arrival.over = library.test(arrival.request, &received);
    FARSPAN_CHECK(!arrival.over || received == bytes_of(summed_), "a piece of {} bytes came where {} were agreed",
                  received, bytes_of(summed_));
    all = all && arrival.over;
  }
  return all;
}

void RankOrderReduction::sum_piece(std::byte* staging) {
  const int64_t offset = summed_ * piece_bytes_;
  std::vector<const std::byte*> pieces;
  for (size_t q = 0; q < sources_.size(); ++q)
    pieces.push_back(sources_[q].own != nullptr ? sources_[q].own + offset : slot(staging, summed_, q));
  sum_in_rank_order(dtype_, pieces, 0, bytes_of(summed_) / size_of(dtype_), out_ + offset);
  ++summed_;
}

bool RankOrderReduction::advance(MpiLibrary& library, std::byte* staging) {
  bool advanced = false;
  while (!done()) {
    while (started_ < std::min(pieces_, summed_ + kSlots)) {
      start_piece(library, staging);
      advanced = true;
    }
    if (!arrived(library)) return advanced;
    sum_piece(staging);
    advanced = true;
  }
  return advanced;
}

}  // namespace farspan
