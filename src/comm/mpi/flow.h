// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/mpi/mpi_library.h"

namespace farspan {

// Bytes of one call in one direction between this process and one other: stretches of memory in order, cut in pieces of
// at most `piece_bytes` each, of which a few are in flight at a time. Both sides must add equal stretches. No memory of
// its own.
class Flow {
 public:
  enum class Direction { send, receive };
  Flow(Direction direction, int peer, int tag, int64_t piece_bytes)
      : direction_(direction), peer_(peer), tag_(tag), piece_bytes_(piece_bytes) {}

  void add(const std::byte* data, int64_t bytes);
  // Starts what may be started and notes what is over. True when something was.
  bool advance(MpiLibrary& library);
  bool done() const { return stretch_ == stretches_.size() && in_flight_ == 0; }

 private:
  // Enough for one piece to be on the way while the next is being agreed upon.
  static constexpr size_t kWindow = 4;
  struct Stretch {
    std::byte* data;
    int64_t bytes;
  };
  struct Piece {
    MpiLibrary::Request request;
    int64_t bytes = 0;
  };
  void start_piece(MpiLibrary& library);

  Direction direction_;
  int peer_;
  int tag_;
  int64_t piece_bytes_;
  std::vector<Stretch> stretches_;
  size_t stretch_ = 0;  // the first not wholly started
  int64_t offset_ = 0;  // bytes of it that are
  std::array<Piece, kWindow> pieces_;
  size_t oldest_ = 0;  // of those in flight
  size_t in_flight_ = 0;
};

}  // namespace farspan
