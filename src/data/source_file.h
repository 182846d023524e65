// SPDX-License-Identifier: Apache-2.0
// SourceFile: one file of a corpus, read by position. A plain file is opened for each read, so a corpus of any number
// of files needs neither descriptors nor mappings, and a file that is replaced, edited or cut while training runs is
// noticed (by inode, size and time of change) instead of feeding other bytes or ending the process. A *.gz is
// decompressed once, when opened, and held in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace farspan {

class SourceFile {
 public:
  // Throws DataError when it cannot be opened or decompressed.
  explicit SourceFile(std::string path);

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // bytes, after decompression

  // Bytes [offset, offset + out.size()). Throws DataError when the file is gone or has changed. Safe from many threads.
  void read(int64_t offset, std::span<uint8_t> out) const;

  bool looks_binary() const { return looks_binary_; }  // a zero byte near the beginning
  uint64_t head_hash() const { return head_hash_; }    // of the first bytes

 private:
  struct Stamp {
    uint64_t device = 0;
    uint64_t inode = 0;
    int64_t size = 0;
    int64_t changed_seconds = 0;
    int64_t changed_nanoseconds = 0;
    bool operator==(const Stamp&) const = default;
  };
  static Stamp stamp_of(int descriptor, const std::string& path);

  void read_from(int descriptor, int64_t offset, std::span<uint8_t> out) const;
  void look_at(std::span<const uint8_t> head);

  std::string path_;
  int64_t size_ = 0;
  Stamp stamp_;
  bool in_memory_ = false;
  std::vector<uint8_t> contents_;
  bool looks_binary_ = false;
  uint64_t head_hash_ = 0;
};

}  // namespace farspan
