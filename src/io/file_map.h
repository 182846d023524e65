// SPDX-License-Identifier: Apache-2.0
// FileMap: a file's bytes as memory, read only. Pages come from disk when they are touched.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace farspan {

class FileMap {
 public:
  // Throws DataError when `path` is not a regular file that can be read and mapped.
  explicit FileMap(const std::string& path);
  ~FileMap();
  FileMap(FileMap&& other) noexcept;
  FileMap& operator=(FileMap&& other) noexcept;
  FileMap(const FileMap&) = delete;
  FileMap& operator=(const FileMap&) = delete;

  int64_t size() const { return size_; }
  std::span<const uint8_t> bytes() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  const uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace farspan
