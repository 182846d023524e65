// SPDX-License-Identifier: Apache-2.0
// TCP for the side channel: a few short frames between each process and rank 0's. Every call returns within a bounded
// time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace farspan {

// Owns a descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  void close();

 private:
  int descriptor_ = -1;
};

// Listens on every address of this host, on a free port. Throws CommunicationError.
Socket listen_anywhere(int* port);
// A connection that waits to be accepted; not open where there is none.
Socket accept_from(const Socket& listener);

// The numeric addresses that other hosts may reach this one by.
std::vector<std::string> addresses_of_this_host();
// Not open where nothing answers within `seconds`.
Socket connect_to(const std::string& address, int port, double seconds);

// Frames: a type and a payload. False where the other side is gone or takes nothing for seconds.
bool send_frame(const Socket& socket, int type, std::string_view payload);

struct Frame {
  int type = 0;
  std::string payload;
};

// Cuts what comes out of a socket into frames.
class FrameReader {
 public:
  // Takes what is there without waiting. False at the end of the connection.
  bool fill(const Socket& socket);
  std::optional<Frame> next();

 private:
  std::string bytes_;
};

}  // namespace farspan
