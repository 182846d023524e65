// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/error.h"
#include "data/documents.h"
#include "data/file_list.h"
#include "data/source_file.h"

namespace farspan {
namespace {

constexpr int64_t kScanBytes = 65536;

class TextDocuments final : public Documents {
 public:
  explicit TextDocuments(std::span<const std::string> paths) {
    FileList list = list_files(paths);
    notes_ = std::move(list.notes);
    int64_t binary = 0;
    std::string first_binary;
    for (ListedFile& listed : list.files) {
      SourceFile file(listed.path);
      if (listed.in_folder && file.looks_binary()) {
        if (binary++ == 0) first_binary = listed.path;
        continue;
      }
      files_.push_back(std::move(file));
      names_.push_back(std::move(listed.name));
    }
    if (binary > 0)
      notes_.push_back(fmt::format("data.path: {} file{} passed over, holding zero bytes (first: '{}')", binary,
                                   binary == 1 ? "" : "s", first_binary));
    if (files_.empty())
      throw DataError(
          fmt::format("data.path: '{}' holds no text; all {} files found hold zero bytes", paths[0], binary));
  }

  int64_t count() const override { return static_cast<int64_t>(files_.size()); }
  int64_t size(int64_t document) const override { return at(document).size(); }
  void read(int64_t document, int64_t offset, std::span<uint8_t> out) const override { at(document).read(offset, out); }
  std::string name(int64_t document) const override { return at(document).path(); }
  std::vector<std::string> notes() const override { return notes_; }

  std::string place(int64_t document, int64_t offset) const override {
    const SourceFile& file = at(document);
    std::vector<uint8_t> block;
    int64_t line = 1;
    for (int64_t begin = 0; begin < offset; begin += kScanBytes) {
      block.resize(static_cast<size_t>(std::min(kScanBytes, offset - begin)));
      file.read(begin, block);
      line += std::count(block.begin(), block.end(), uint8_t{'\n'});
    }
    return fmt::format("{} line {}, byte {} of the file", file.path(), line, offset);
  }

  std::string fingerprint() const override {
    std::string text;
    for (size_t i = 0; i < files_.size(); ++i)
      text += fmt::format("{}\n{} {:016x}\n", names_[i], files_[i].size(), files_[i].head_hash());
    return text;
  }

 private:
  const SourceFile& at(int64_t document) const {
    FARSPAN_CHECK(document >= 0 && document < count(), "document {} of {}", document, count());
    return files_[static_cast<size_t>(document)];
  }

  std::vector<SourceFile> files_;
  std::vector<std::string> names_;
  std::vector<std::string> notes_;
};

}  // namespace

std::unique_ptr<const Documents> open_text(std::span<const std::string> paths) {
  return std::make_unique<TextDocuments>(paths);
}

}  // namespace farspan
