// SPDX-License-Identifier: Apache-2.0
#include "io/json_lines.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "base/error.h"
#include "io/json_text.h"

namespace farspan {
namespace {

struct ToText {
  std::string operator()(std::nullptr_t) const { return "null"; }
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return fmt::format("{}", value); }
  std::string operator()(double value) const { return json_number(value); }
  std::string operator()(const std::string& value) const { return json_string(value); }
  std::string operator()(const std::vector<int64_t>& values) const {
    return fmt::format("[{}]", fmt::join(values, ","));
  }
  std::string operator()(const JsonCounts& counts) const {
    std::string text;
    for (const auto& [name, count] : counts)
      text += fmt::format("{}{}:{}", text.empty() ? "" : ",", json_string(name), count);
    return "{" + text + "}";
  }
};

DataError write_error(const std::string& path) {
  return DataError(fmt::format("cannot write '{}': {}", path, std::strerror(errno)));
}

}  // namespace

JsonLinesWriter::JsonLinesWriter(std::string path, Mode mode) : path_(std::move(path)) {
  const int beginning = mode == Mode::replace ? O_TRUNC : 0;
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | beginning, 0666);
  if (descriptor_ < 0) throw write_error(path_);
  if (mode == Mode::append) drop_unfinished_line();
}

JsonLinesWriter::~JsonLinesWriter() { ::close(descriptor_); }

// Looks backwards for the last line end and cuts the file behind it.
void JsonLinesWriter::drop_unfinished_line() {
  const off_t size = ::lseek(descriptor_, 0, SEEK_END);
  off_t keep = std::max<off_t>(size, 0);  // a pipe has no size, and nothing to drop
  std::array<char, 4096> block;
  while (keep > 0) {
    const off_t begin = std::max<off_t>(keep - static_cast<off_t>(block.size()), 0);
    const ssize_t got = ::pread(descriptor_, block.data(), static_cast<size_t>(keep - begin), begin);
    if (got != keep - begin) throw DataError(fmt::format("cannot read '{}': {}", path_, std::strerror(errno)));
    const std::string_view text(block.data(), static_cast<size_t>(got));
    const size_t line_end = text.rfind('\n');
    keep = line_end == std::string_view::npos ? begin : begin + static_cast<off_t>(line_end) + 1;
    if (line_end != std::string_view::npos) break;
  }
  if (keep < size && ::ftruncate(descriptor_, keep) != 0) throw write_error(path_);
}

void JsonLinesWriter::write(std::span<const JsonField> fields) {
  std::string line = "{";
  for (const JsonField& field : fields) {
    if (line.size() > 1) line += ',';
    line += json_string(field.name);
    line += ':';
    line += std::visit(ToText{}, field.value);
  }
  line += "}\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t wrote = ::write(descriptor_, line.data() + done, line.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) throw write_error(path_);
    done += static_cast<size_t>(wrote);
  }
}

}  // namespace farspan
