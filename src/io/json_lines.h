// SPDX-License-Identifier: Apache-2.0
// JSON lines: one object a line, fields in the order given.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace farspan {

// {"tp":0,"cp":12}
using JsonCounts = std::vector<std::pair<std::string, int64_t>>;

// nullptr is null; so is a double that is not finite.
using JsonValue = std::variant<std::nullptr_t, bool, int64_t, double, std::string, std::vector<int64_t>, JsonCounts>;

struct JsonField {
  std::string_view name;
  JsonValue value;
};

class JsonLinesWriter {
 public:
  enum class Mode { replace, append };

  // Creates the file where it is missing. Appending to a file whose last line was not finished (the writer was killed)
  // first drops that line. Throws DataError when it cannot be opened.
  JsonLinesWriter(std::string path, Mode mode);
  ~JsonLinesWriter();
  JsonLinesWriter(const JsonLinesWriter&) = delete;
  JsonLinesWriter& operator=(const JsonLinesWriter&) = delete;

  // Hands the whole line to the system before it returns, so that a reader sees it at once. Throws DataError with the
  // path and the cause (no space left).
  void write(std::span<const JsonField> fields);
  void write(std::initializer_list<JsonField> fields) { write(std::span(fields.begin(), fields.size())); }

 private:
  void drop_unfinished_line();

  std::string path_;
  int descriptor_ = -1;
};

}  // namespace farspan
