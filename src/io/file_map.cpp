// SPDX-License-Identifier: Apache-2.0
#include "io/file_map.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/error.h"

namespace farspan {

FileMap::FileMap(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw DataError(fmt::format("cannot read '{}': {}", path, std::strerror(errno)));
  struct stat status {};
  const bool known = ::fstat(descriptor, &status) == 0;
  const int stat_failure = errno;
  void* data = nullptr;
  int map_failure = 0;
  const bool regular = known && S_ISREG(status.st_mode);
  if (regular && status.st_size > 0) {  // mmap refuses a length of zero
    data = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (data == MAP_FAILED) map_failure = errno;
  }
  ::close(descriptor);  // the mapping keeps the file
  if (!known) throw DataError(fmt::format("cannot read '{}': {}", path, std::strerror(stat_failure)));
  if (!regular) throw DataError(fmt::format("cannot read '{}': not a regular file", path));
  if (map_failure != 0)
    throw DataError(fmt::format("cannot map {} bytes of '{}': {}", status.st_size, path, std::strerror(map_failure)));
  data_ = static_cast<const uint8_t*>(data);
  size_ = status.st_size;
}

FileMap::~FileMap() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
}

FileMap::FileMap(FileMap&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

FileMap& FileMap::operator=(FileMap&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace farspan
