// SPDX-License-Identifier: Apache-2.0
// Numbers and texts as bytes, for the frames of the side channel.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"

namespace farspan {

class WireWriter {
 public:
  WireWriter& number(int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  WireWriter& text(std::string_view value) {
    number(std::ssize(value));
    bytes_.append(value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Throws CommunicationError where the bytes end early.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}
  int64_t number() {
    int64_t value = 0;
    const std::string_view taken = take(sizeof(value));
    std::memcpy(&value, taken.data(), sizeof(value));
    return value;
  }
  std::string text() { return std::string(take(static_cast<size_t>(number()))); }

 private:
  std::string_view take(size_t count) {
    if (count > bytes_.size()) throw CommunicationError("a message between processes is cut off");
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  std::string_view bytes_;
};

}  // namespace farspan
