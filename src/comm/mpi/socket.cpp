// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/socket.h"

#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include <utility>

#include "base/error.h"

namespace farspan {
namespace {

// No frame is near this: a larger length means that something else has connected.
constexpr uint32_t kLargestFrame = 64u << 20;

struct FrameHead {
  uint32_t type = 0;
  uint32_t length = 0;
};

void set_option(int descriptor, int level, int name, int value) {
  setsockopt(descriptor, level, name, &value, sizeof(value));
}

// Small frames at once; a host that vanishes is noticed within half a minute; no send blocks for longer than seconds.
void prepare(int descriptor) {
  set_option(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, 20'000);
  const timeval send_limit = {.tv_sec = 2, .tv_usec = 0};
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &send_limit, sizeof(send_limit));
}

void set_blocking(int descriptor, bool blocking) {
  const int flags = fcntl(descriptor, F_GETFL);
  fcntl(descriptor, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

socklen_t length_of(const Address& address) {
  return address.any.sa_family == AF_INET6 ? sizeof(address.v6) : sizeof(address.v4);
}

std::optional<Address> parse(const std::string& text, int port) {
  Address address{};
  if (inet_pton(AF_INET, text.c_str(), &address.v4.sin_addr) == 1) {
    address.v4.sin_family = AF_INET;
    address.v4.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }
  address = {};
  if (inet_pton(AF_INET6, text.c_str(), &address.v6.sin6_addr) != 1) return std::nullopt;
  address.v6.sin6_family = AF_INET6;
  address.v6.sin6_port = htons(static_cast<uint16_t>(port));
  return address;
}

// IPv6 with IPv4 inside it where the system has IPv6, else IPv4 alone.
Socket listen_on_family(int family) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) return socket;
  if (family == AF_INET6) set_option(socket.descriptor(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  Address address{};
  address.any.sa_family = static_cast<sa_family_t>(family);
  if (bind(socket.descriptor(), &address.any, length_of(address)) != 0 || listen(socket.descriptor(), SOMAXCONN) != 0)
    socket.close();
  return socket;
}

}  // namespace

Socket::Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

void Socket::close() {
  if (open()) ::close(std::exchange(descriptor_, -1));
}

Socket listen_anywhere(int* port) {
  Socket socket = listen_on_family(AF_INET6);
  if (!socket.open()) socket = listen_on_family(AF_INET);
  Address bound{};
  socklen_t length = sizeof(bound);
  if (!socket.open() || getsockname(socket.descriptor(), &bound.any, &length) != 0)
    throw CommunicationError(fmt::format("rank 0 cannot listen for the other processes: {}", std::strerror(errno)));
  *port = ntohs(bound.any.sa_family == AF_INET6 ? bound.v6.sin6_port : bound.v4.sin_port);
  return socket;
}

Socket accept_from(const Socket& listener) {
  Socket socket(accept4(listener.descriptor(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.open()) prepare(socket.descriptor());
  return socket;
}

std::vector<std::string> addresses_of_this_host() {
  std::vector<std::string> addresses;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return addresses;
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    const auto* address = reinterpret_cast<const Address*>(entry->ifa_addr);
    char text[INET6_ADDRSTRLEN] = {};
    if (address->any.sa_family == AF_INET) {
      inet_ntop(AF_INET, &address->v4.sin_addr, text, sizeof(text));
      addresses.insert(addresses.begin(), text);  // before IPv6, which is set up less often
    } else if (address->any.sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&address->v6.sin6_addr)) {
      inet_ntop(AF_INET6, &address->v6.sin6_addr, text, sizeof(text));
      addresses.emplace_back(text);
    }
  }
  freeifaddrs(all);
  return addresses;
}

Socket connect_to(const std::string& text, int port, double seconds) {
  const std::optional<Address> address = parse(text, port);
  if (!address) return {};
  Socket socket(::socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) return {};
  if (connect(socket.descriptor(), &address->any, length_of(*address)) != 0) {
    pollfd writable = {.fd = socket.descriptor(), .events = POLLOUT, .revents = 0};
    int error = errno;
    socklen_t length = sizeof(error);
    if (error != EINPROGRESS || poll(&writable, 1, static_cast<int>(seconds * 1000)) != 1 ||
        getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0)
      return {};
  }
  set_blocking(socket.descriptor(), true);
  prepare(socket.descriptor());
  return socket;
}

bool send_frame(const Socket& socket, int type, std::string_view payload) {
  if (!socket.open()) return false;
  const FrameHead head = {static_cast<uint32_t>(type), static_cast<uint32_t>(payload.size())};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof(head));
  bytes += payload;
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = send(socket.descriptor(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    sent += static_cast<size_t>(n);
  }
  return true;
}

bool FrameReader::fill(const Socket& socket) {
  while (true) {
    char chunk[16384];
    const ssize_t n = recv(socket.descriptor(), chunk, sizeof(chunk), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (n == 0) return false;
    bytes_.append(chunk, static_cast<size_t>(n));
  }
}

std::optional<Frame> FrameReader::next() {
  FrameHead head;
  if (bytes_.size() < sizeof(head)) return std::nullopt;
  std::memcpy(&head, bytes_.data(), sizeof(head));
  if (head.length > kLargestFrame) throw CommunicationError("a connection that is none of this job's processes");
  if (bytes_.size() < sizeof(head) + head.length) return std::nullopt;
  Frame frame = {static_cast<int>(head.type), bytes_.substr(sizeof(head), head.length)};
  bytes_.erase(0, sizeof(head) + head.length);
  return frame;
}

}  // namespace farspan
