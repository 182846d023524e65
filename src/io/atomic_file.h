// SPDX-License-Identifier: Apache-2.0
// AtomicFile: a file that appears whole or not at all. Bytes go to a file beside it, NAME.partial-..., which is brought
// to disk and renamed by commit(); without commit() it is removed. A process that is killed leaves the old file as it
// was.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace farspan {

class AtomicFile {
 public:
  // Throws DataError when the folder cannot be written to.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t written() const { return written_; }  // bytes so far

  // Appends. Throws DataError with path and cause (no space left, file too large).
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  // fsync, rename over path(), fsync of the folder. Throws DataError.
  void commit();

 private:
  [[noreturn]] void fail(std::string_view action) const;

  std::string path_;
  std::string partial_;
  int descriptor_ = -1;
  int64_t written_ = 0;
};

// The whole of a small file at once.
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace farspan
