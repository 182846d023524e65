// SPDX-License-Identifier: Apache-2.0
#include "io/atomic_file.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

#include "base/error.h"

namespace farspan {
namespace {

// Unlike any other in use: thread ranks may write the same name at once, and so may processes on one file system.
std::string partial_name(const std::string& path) {
  static std::atomic<int64_t> counter = 0;
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return fmt::format("{}.partial-{}-{}-{}", path, host, ::getpid(), counter++);
}

void sync_folder(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw DataError(fmt::format("cannot open folder '{}': {}", folder, std::strerror(errno)));
  const bool done = ::fsync(descriptor) == 0 || errno == EINVAL;  // some network file systems have no fsync of folders
  const int failure = errno;
  ::close(descriptor);
  if (!done) throw DataError(fmt::format("cannot bring folder '{}' to disk: {}", folder, std::strerror(failure)));
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), partial_(partial_name(path_)) {
  descriptor_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail("create");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(partial_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  FARSPAN_CHECK(descriptor_ >= 0, "write to '{}' after commit", path_);
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(descriptor_, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail("write");
    bytes = bytes.subspan(static_cast<size_t>(wrote));
    written_ += wrote;
  }
}

void AtomicFile::commit() {
  FARSPAN_CHECK(descriptor_ >= 0, "second commit of '{}'", path_);
  if (::fsync(descriptor_) != 0) fail("bring to disk");
  if (std::rename(partial_.c_str(), path_.c_str()) != 0) fail("rename");
  ::close(descriptor_);
  descriptor_ = -1;
  sync_folder(path_);
}

void AtomicFile::fail(std::string_view action) const {
  throw DataError(fmt::format("cannot {} '{}' after {} bytes: {}", action, path_, written_, std::strerror(errno)));
}

void write_file_atomically(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

}  // namespace farspan
