// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/mpi/mpi_library.h"
#include "tensor/dtype.h"

namespace farspan {

// Memory of one process for received pieces that wait to be summed, whatever the tensors' sizes; taken at the first
// sum, and used by one call at a time.
inline constexpr int64_t kStagingBytes = int64_t{4} << 20;

struct Staging {
  std::vector<std::byte> memory;
  const void* user = nullptr;

  // The memory, for this user until it releases it; null while another has it.
  std::byte* take(const void* by);
  void release() { user = nullptr; }
};

// The sum in rank order of equal stretches of all ranks of a group, this rank's own among them. The peers' stretches
// come in pieces, two of each peer in staging memory at a time: one that is summed and one that arrives.
class RankOrderReduction {
 public:
  // Bytes of a piece; senders cut by it too. A multiple of every element size.
  static int64_t piece_bytes(int group_size);

  struct Source {
    int peer = 0;  // process; unused for the own stretch
    int tag = 0;
    const std::byte* own = nullptr;  // null: received
  };
  // `sources`: of every rank of the group, in its order.
  RankOrderReduction(DType dtype, std::vector<Source> sources, int64_t bytes, std::byte* out);

  // Receives and sums what is there; `staging` has kStagingBytes. True when something was done.
  bool advance(MpiLibrary& library, std::byte* staging);
  bool done() const { return summed_ == pieces_; }

 private:
  static constexpr int64_t kSlots = 2;
  int64_t bytes_of(int64_t piece) const;
  std::byte* slot(std::byte* staging, int64_t piece, size_t source) const;
  void start_piece(MpiLibrary& library, std::byte* staging);
  bool arrived(MpiLibrary& library);
  void sum_piece(std::byte* staging);

  DType dtype_;
  std::vector<Source> sources_;
  int64_t bytes_;
  std::byte* out_;
  int64_t piece_bytes_;
  int64_t pieces_;
  int64_t started_ = 0;
  int64_t summed_ = 0;
  struct Arrival {
    MpiLibrary::Request request;
    bool over = false;
  };
  std::array<std::vector<Arrival>, kSlots> arrivals_;  // by piece modulo kSlots and source
};

}  // namespace farspan
