// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/flow.h"

#include <algorithm>

#include "base/error.h"

namespace farspan {

void Flow::add(const std::byte* data, int64_t bytes) {
  // MPI takes what it sends as const; one pointer type serves both directions.
  if (bytes > 0) stretches_.push_back({const_cast<std::byte*>(data), bytes});
}

void Flow::start_piece(MpiLibrary& library) {
  const Stretch& stretch = stretches_[stretch_];
  Piece& piece = pieces_[(oldest_ + in_flight_) % kWindow];
  piece.bytes = std::min(piece_bytes_, stretch.bytes - offset_);
  std::byte* data = stretch.data + offset_;
  piece.request = direction_ == Direction::send ? library.send(peer_, tag_, data, piece.bytes)
                                                : library.receive(peer_, tag_, data, piece.bytes);
  ++in_flight_;
  offset_ += piece.bytes;
  if (offset_ < stretch.bytes) return;
  ++stretch_;
  offset_ = 0;
}

bool Flow::advance(MpiLibrary& library) {
  bool advanced = false;
  while (true) {
    while (stretch_ < stretches_.size() && in_flight_ < kWindow) {
      start_piece(library);
      advanced = true;
    }
    if (in_flight_ == 0) return advanced;
    Piece& piece = pieces_[oldest_];
    int64_t received = piece.bytes;
    if (!library.test(piece.request, direction_ == Direction::receive ? &received : nullptr)) return advanced;
    FARSPAN_CHECK(received == piece.bytes, "a piece of {} bytes came from rank {} where {} were agreed", received,
                  peer_, piece.bytes);
    oldest_ = (oldest_ + 1) % kWindow;
    --in_flight_;
    advanced = true;
  }
}

}  // namespace farspan
