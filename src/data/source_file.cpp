// SPDX-License-Identifier: Apache-2.0
#include "data/source_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/philox.h"
#include "io/gzip.h"

namespace farspan {
namespace {

constexpr int64_t kHeadBytes = 8192;  // enough to meet a zero byte in any common binary format

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : value_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (value_ < 0) throw DataError(fmt::format("cannot read '{}': {}", path, std::strerror(errno)));
  }
  ~Descriptor() { ::close(value_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

}  // namespace

SourceFile::SourceFile(std::string path) : path_(std::move(path)), in_memory_(path_.ends_with(".gz")) {
  if (in_memory_) {
    contents_ = read_gzip(path_);
    size_ = static_cast<int64_t>(contents_.size());
    look_at(std::span(contents_).first(static_cast<size_t>(std::min(size_, kHeadBytes))));
    return;
  }
  const Descriptor file(path_);
  stamp_ = stamp_of(file.get(), path_);
  size_ = stamp_.size;
  std::vector<uint8_t> head(static_cast<size_t>(std::min(size_, kHeadBytes)));
  read_from(file.get(), 0, head);
  look_at(head);
}

void SourceFile::look_at(std::span<const uint8_t> head) {
  looks_binary_ = std::find(head.begin(), head.end(), uint8_t{0}) != head.end();
  head_hash_ = name_hash({reinterpret_cast<const char*>(head.data()), head.size()});
}

SourceFile::Stamp SourceFile::stamp_of(int descriptor, const std::string& path) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0)
    throw DataError(fmt::format("cannot read '{}': {}", path, std::strerror(errno)));
  return {status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

void SourceFile::read(int64_t offset, std::span<uint8_t> out) const {
  FARSPAN_CHECK(offset >= 0 && offset + static_cast<int64_t>(out.size()) <= size_, "{}: bytes {} to {} of {}", path_,
                offset, offset + static_cast<int64_t>(out.size()), size_);
  if (out.empty()) return;
  if (in_memory_) {
    std::memcpy(out.data(), contents_.data() + offset, out.size());
    return;
  }
  const Descriptor file(path_);
  const Stamp now = stamp_of(file.get(), path_);
  if (now != stamp_)
    throw DataError(
        fmt::format("'{}' has changed since it was opened ({} bytes then, {} now); start again with the data "
                    "at rest",
                    path_, stamp_.size, now.size));
  read_from(file.get(), offset, out);
}

void SourceFile::read_from(int descriptor, int64_t offset, std::span<uint8_t> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor, out.data(), out.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw DataError(fmt::format("cannot read '{}' at byte {}: {}", path_, offset, std::strerror(errno)));
    if (got == 0) throw DataError(fmt::format("'{}' ends at byte {}, expected {}", path_, offset, size_));
    out = out.subspan(static_cast<size_t>(got));
    offset += got;
  }
}

}  // namespace farspan
