// SPDX-License-Identifier: Apache-2.0
// The safetensors format: 8 bytes, little endian, that give the length of a JSON header; the header, an object that
// gives each tensor's "dtype", "shape" and "data_offsets" [begin, end) behind the header, and an optional
// "__metadata__" of strings; then the data, which the tensors' ranges cover exactly, without gap or overlap. Source:
// https://github.com/huggingface/safetensors, README, "Format".
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/atomic_file.h"
#include "io/file_map.h"
#include "tensor/dtype.h"
#include "tensor/tensor.h"

namespace farspan {

struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  int64_t begin = 0;  // bytes [begin, end) behind the header
  int64_t end = 0;
};

// "F32", "BF16", "F64", "I32", "I64", "U8".
std::string_view safetensors_name(DType dtype);

// A file open for reading. The bytes are mapped: a tensor is read from disk when it is touched.
class SafetensorsFile {
 public:
  // Checks the whole header and layout; reads no data. Throws DataError, one line with path, what was found and what is
  // needed, for anything that is not exactly a safetensors file of dtypes Farspan has.
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<TensorEntry>& entries() const { return entries_; }  // in the order of their data
  const TensorEntry* find(std::string_view name) const;                 // null when there is none
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Bytes of an entry of this file, valid as long as the file. They need not be aligned for their dtype.
  std::span<const std::byte> data(const TensorEntry& entry) const;

 private:
  SafetensorsFile(std::string path, FileMap map) : path_(std::move(path)), map_(std::move(map)) {}

  std::string path_;
  FileMap map_;
  int64_t data_offset_ = 0;
  std::vector<TensorEntry> entries_;
  std::map<std::string, int64_t, std::less<>> by_name_;
  std::map<std::string, std::string> metadata_;
};

// Writes a file tensor by tensor; only what is handed over is in memory. All tensors are declared first, since the
// header comes first, then written in that order. The file appears under its name with finish(), or not at all. The
// header is padded with spaces so that data begin at a multiple of 8 bytes; tensors of one element size therefore stay
// aligned.
class SafetensorsWriter {
 public:
  explicit SafetensorsWriter(std::string path, std::map<std::string, std::string> metadata = {});

  // Throws DataError for a name given twice, InternalError after the first write.
  void declare(std::string name, DType dtype, const Shape& shape);

  // The next bytes of tensor `name`: all of it, or one piece after the other. Throws InternalError for another tensor
  // than the one that is due and for more bytes than it has; DataError when the disk is full.
  void write(std::string_view name, std::span<const std::byte> bytes);

  // Brings the file to disk under its name. Throws InternalError when a tensor is not complete.
  void finish();

 private:
  void write_header();
  void skip_complete_entries();

  AtomicFile file_;
  std::map<std::string, std::string> metadata_;
  std::vector<TensorEntry> entries_;
  std::map<std::string, int64_t, std::less<>> by_name_;
  bool header_written_ = false;
  size_t due_ = 0;            // entry being written
  int64_t data_written_ = 0;  // bytes behind the header
};

}  // namespace farspan
