// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "io/json_text.h"
#include "io/safetensors_header.h"

namespace farspan {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data are little endian");

constexpr int64_t kLengthBytes = 8;

struct NamedDType {
  std::string_view name;
  DType dtype;
};
constexpr std::array<NamedDType, 6> kDTypes = {{{"F32", DType::f32},
                                                {"BF16", DType::bf16},
                                                {"F64", DType::f64},
                                                {"I32", DType::i32},
                                                {"I64", DType::i64},
                                                {"U8", DType::u8}}};

// Names in a damaged file may hold anything; the message stays one line.
DataError damaged(const std::string& path, const std::string& what) {
  return DataError(one_line(fmt::format("'{}': {}", path, what)));
}

// Where the data begin. Compares with the file's size before anything is read or allocated.
int64_t header_end(const std::string& path, const FileMap& map) {
  if (map.size() == 0) throw DataError(fmt::format("'{}' is empty; a safetensors file needs at least 10 bytes", path));
  if (map.size() < kLengthBytes)
    throw DataError(fmt::format("'{}' has {} bytes; the header's length alone needs 8", path, map.size()));
  uint64_t length = 0;
  std::memcpy(&length, map.bytes().data(), sizeof length);
  const auto room = static_cast<uint64_t>(map.size() - kLengthBytes);
  if (length <= room) {
    if (length < 2) throw DataError(fmt::format("'{}': the header has {} bytes, needs at least 2", path, length));
    return kLengthBytes + static_cast<int64_t>(length);
  }
  const std::string_view first(reinterpret_cast<const char*>(map.bytes().data()), kLengthBytes);
  if (std::all_of(first.begin(), first.end(),
                  [](char c) { return (c >= 0x20 && c <= 0x7e) || c == '\n' || c == '\r' || c == '\t'; }))
    throw DataError(
        fmt::format("'{}' begins with the text {}, needs a header length; it is a text file or a pointer to the "
                    "real file",
                    path, json_string(first)));
  if (length > static_cast<uint64_t>(INT64_MAX) - 8)
    throw DataError(
        fmt::format("'{}' is no safetensors file: its first 8 bytes say a header of {} bytes, more than any file "
                    "holds",
                    path, length));
  throw DataError(fmt::format("'{}' is cut short inside its header: found {} bytes, needs at least {}", path,
                              map.size(), length + 8));
}

DType dtype_of(const std::string& path, const HeaderTensor& tensor) {
  for (const NamedDType& known : kDTypes)
    if (known.name == tensor.dtype) return known.dtype;
  throw damaged(path, fmt::format("tensor '{}' has dtype {}; this version reads F32, BF16, F64, I32, I64 and U8",
                                  tensor.name, tensor.dtype));
}

// Bytes of a shape, or none when they pass 2^63.
std::optional<int64_t> byte_count(std::span<const int64_t> sizes, DType dtype) {
  int64_t bytes = size_of(dtype);
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  return bytes;
}

TensorEntry checked_entry(const std::string& path, const HeaderTensor& tensor, int64_t data_bytes) {
  const auto refusal = [&](const std::string& what) {
    return damaged(path, fmt::format("tensor '{}' {}", tensor.name, what));
  };
  const DType dtype = dtype_of(path, tensor);
  const std::string shape = fmt::format("[{}]", fmt::join(tensor.shape, ", "));
  if (tensor.shape.size() > Shape::kMaxRank)
    throw refusal(fmt::format("has {} dimensions, at most {} are readable", tensor.shape.size(), Shape::kMaxRank));
  const std::optional<int64_t> bytes = byte_count(tensor.shape, dtype);
  if (!bytes) throw refusal(fmt::format("has shape {}, whose bytes do not fit in 64 bits", shape));
  if (tensor.data_offsets.size() != 2)
    throw refusal(fmt::format("has {} data_offsets, needs 2", tensor.data_offsets.size()));
  const int64_t begin = tensor.data_offsets[0];
  const int64_t end = tensor.data_offsets[1];
  if (begin > end) throw refusal(fmt::format("has data_offsets [{}, {}], needs begin <= end", begin, end));
  if (end - begin != *bytes)
    throw refusal(fmt::format("of shape {} and dtype {} has {} bytes [{}, {}), needs {}", shape, tensor.dtype,
                              end - begin, begin, end, *bytes));
  if (end > data_bytes)
    throw refusal(
        fmt::format("ends at data byte {}, but the file holds {}; it is cut short or damaged", end, data_bytes));
  return {tensor.name, dtype, Shape(tensor.shape), begin, end};
}

// `entries` in the order of their data must follow one another from 0 to `data_bytes`.
void check_layout(const std::string& path, const std::vector<TensorEntry>& entries, int64_t data_bytes) {
  const auto refusal = [&path](const std::string& what) { return damaged(path, what); };
  int64_t covered = 0;
  const TensorEntry* before = nullptr;
  for (const TensorEntry& entry : entries) {
    if (entry.begin < covered && entry.begin == entry.end)
      throw refusal(fmt::format("empty tensor '{}' lies at data byte {}, inside tensor '{}' [{}, {})", entry.name,
                                entry.begin, before->name, before->begin, before->end));
    if (entry.begin < covered)
      throw refusal(fmt::format("tensors '{}' and '{}' share data bytes [{}, {}); each byte needs one owner",
                                before->name, entry.name, entry.begin, std::min(covered, entry.end)));
    if (entry.begin > covered)
      throw refusal(fmt::format("data bytes [{}, {}) before tensor '{}' belong to no tensor; each byte needs one owner",
                                covered, entry.begin, entry.name));
    covered = entry.end;
    before = &entry;
  }
  if (covered < data_bytes)
    throw refusal(fmt::format("the last {} data bytes belong to no tensor; found {}, needs {}", data_bytes - covered,
                              data_bytes, covered));
}

}  // namespace

std::string_view safetensors_name(DType dtype) {
  for (const NamedDType& known : kDTypes)
    if (known.dtype == dtype) return known.name;
  throw InternalError(fmt::format("dtype {} has no name in safetensors", name_of(dtype)));
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file(path, FileMap(path));
  file.data_offset_ = header_end(path, file.map_);
  const int64_t data_bytes = file.map_.size() - file.data_offset_;
  const std::string_view text(reinterpret_cast<const char*>(file.map_.bytes().data()) + kLengthBytes,
                              static_cast<size_t>(file.data_offset_ - kLengthBytes));
  SafetensorsHeader header = parse_safetensors_header(path, text);
  file.metadata_ = std::move(header.metadata);
  file.entries_.reserve(header.tensors.size());
  for (const HeaderTensor& tensor : header.tensors) file.entries_.push_back(checked_entry(path, tensor, data_bytes));
  std::stable_sort(file.entries_.begin(), file.entries_.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_layout(path, file.entries_, data_bytes);
  for (size_t i = 0; i < file.entries_.size(); ++i)
    file.by_name_.emplace(file.entries_[i].name, static_cast<int64_t>(i));
  return file;
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[static_cast<size_t>(found->second)];
}

std::span<const std::byte> SafetensorsFile::data(const TensorEntry& entry) const {
  return std::as_bytes(map_.bytes())
      .subspan(static_cast<size_t>(data_offset_ + entry.begin), static_cast<size_t>(entry.end - entry.begin));
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::map<std::string, std::string> metadata)
    : file_(std::move(path)), metadata_(std::move(metadata)) {}

void SafetensorsWriter::declare(std::string name, DType dtype, const Shape& shape) {
  FARSPAN_CHECK(!header_written_, "'{}': tensor '{}' declared after the first write", file_.path(), name);
  FARSPAN_CHECK(name != "__metadata__", "'{}': a tensor cannot be called __metadata__", file_.path());
  if (!by_name_.emplace(name, static_cast<int64_t>(entries_.size())).second)
    throw DataError(fmt::format("'{}': tensor '{}' is declared twice; each name may come once", file_.path(), name));
  const int64_t begin = entries_.empty() ? 0 : entries_.back().end;
  entries_.push_back({std::move(name), dtype, shape, begin, begin + checked_mul(shape.numel(), size_of(dtype))});
}

void SafetensorsWriter::write_header() {
  std::string json = "{";
  const auto add = [&json](std::string_view name, const std::string& value) {
    if (json.size() > 1) json += ',';
    json += json_string(name) + ':' + value;
  };
  if (!metadata_.empty()) {
    std::string pairs;
    for (const auto& [key, value] : metadata_) {
      if (!pairs.empty()) pairs += ',';
      pairs += json_string(key) + ':' + json_string(value);
    }
    add("__metadata__", '{' + pairs + '}');
  }
  for (const TensorEntry& entry : entries_) {
    std::vector<int64_t> sizes;
    for (int i = 0; i < entry.shape.rank(); ++i) sizes.push_back(entry.shape[i]);
    add(entry.name, fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                safetensors_name(entry.dtype), fmt::join(sizes, ","), entry.begin, entry.end));
  }
  json += '}';
  json.resize(static_cast<size_t>(round_up(static_cast<int64_t>(json.size()), 8)), ' ');
  const uint64_t length = json.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(json);
  header_written_ = true;
  skip_complete_entries();
}

// Moves on behind all that needs no more bytes, empty tensors among them.
void SafetensorsWriter::skip_complete_entries() {
  while (due_ < entries_.size() && entries_[due_].end == data_written_) ++due_;
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  if (!header_written_) write_header();
  if (bytes.empty()) {
    FARSPAN_CHECK(by_name_.contains(name), "'{}': no tensor '{}' was declared", file_.path(), name);
    return;
  }
  FARSPAN_CHECK(due_ < entries_.size() && entries_[due_].name == name, "'{}': bytes of tensor '{}', but {} is due",
                file_.path(), name, due_ < entries_.size() ? "'" + entries_[due_].name + "'" : "nothing more");
  const auto size = static_cast<int64_t>(bytes.size());
  FARSPAN_CHECK(data_written_ + size <= entries_[due_].end, "'{}': {} more bytes for tensor '{}', which needs {}",
                file_.path(), size, name, entries_[due_].end - data_written_);
  file_.write(bytes);
  data_written_ += size;
  skip_complete_entries();
}

void SafetensorsWriter::finish() {
  if (!header_written_) write_header();
  FARSPAN_CHECK(due_ == entries_.size(), "'{}': tensor '{}' needs {} more bytes", file_.path(), entries_[due_].name,
                entries_[due_].end - data_written_);
  file_.commit();
}

}  // namespace farspan
