// SPDX-License-Identifier: Apache-2.0
// FASTA without a copy of the sequence: opening a file reads it once and keeps, as samtools' .fai index does, how its
// lines lie. A run is a stretch of lines of equal length, so base i of a run stands at
//   offset + i / bases_per_line * bytes_per_line + i % bases_per_line.
// A usual file has one run a record; lines of unequal length only make more of them.
// Source: samtools faidx(5).
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "data/documents.h"
#include "data/file_list.h"
#include "data/source_file.h"

namespace farspan {
namespace {

constexpr int64_t kScanBytes = int64_t{1} << 20;

struct Run {
  int64_t first_base = 0;  // counted over all records of the file
  int64_t offset = 0;      // of that base in the file
  int64_t first_line = 0;  // line number in the file, from 1
  int64_t bases_per_line = 0;
  int64_t bytes_per_line = 0;  // with line end

  int64_t position(int64_t base) const {
    const int64_t i = base - first_base;
    return offset + i / bases_per_line * bytes_per_line + i % bases_per_line;
  }
};

struct FastaFile {
  SourceFile file;
  std::string name;
  int64_t first_document = 0;
  std::vector<int64_t> record_starts = {};  // first base of each record, and the number of bases
  std::vector<Run> runs = {};
};

// Builds the index from the bytes of the file in order.
class LineScanner {
 public:
  explicit LineScanner(FastaFile& target) : target_(target) {}

  void scan() {
    std::vector<uint8_t> block;
    const int64_t size = target_.file.size();
    for (int64_t begin = 0; begin < size; begin += kScanBytes) {
      block.resize(static_cast<size_t>(std::min(kScanBytes, size - begin)));
      target_.file.read(begin, block);
      scan_block(block, begin);
    }
    if (line_offset_ < size) end_line(size, 0);
    target_.record_starts.push_back(bases_);
  }

 private:
  void scan_block(std::span<const uint8_t> block, int64_t block_offset) {
    const uint8_t* at = block.data();
    const uint8_t* const end = at + block.size();
    while (at < end) {
      if (block_offset + (at - block.data()) == line_offset_) first_byte_ = *at;
      const void* found = std::memchr(at, '\n', static_cast<size_t>(end - at));
      const uint8_t* const stop = found ? static_cast<const uint8_t*>(found) : end;
      if (stop > at) last_byte_ = stop[-1];
      if (!found) return;
      end_line(block_offset + (stop - block.data()), 1);
      at = stop + 1;
    }
  }

  // The line [line_offset_, end) is complete; `line_end_bytes` follow it.
  void end_line(int64_t end, int64_t line_end_bytes) {
    const int64_t length = end - line_offset_;
    const int64_t bases = length > 0 && last_byte_ == '\r' ? length - 1 : length;
    ++line_;
    if (length > 0 && first_byte_ == '>') {
      target_.record_starts.push_back(bases_);
      run_open_ = false;
    } else if (bases > 0) {
      if (target_.record_starts.empty())
        throw DataError(
            fmt::format("'{}' line {}: found sequence before any header line; a FASTA record begins with '>'",
                        target_.file.path(), line_));
      add_sequence_line(bases, length + line_end_bytes);
    }
    line_offset_ = end + line_end_bytes;
  }

  void add_sequence_line(int64_t bases, int64_t bytes) {
    if (run_open_) {
      const Run& run = target_.runs.back();
      run_open_ = line_offset_ == run.position(bases_) && bases <= run.bases_per_line;
    }
    if (!run_open_) target_.runs.push_back({bases_, line_offset_, line_, bases, bytes});
    const Run& run = target_.runs.back();
    run_open_ = bases == run.bases_per_line && bytes == run.bytes_per_line;  // a shorter line is a run's last
    bases_ += bases;
  }

  FastaFile& target_;
  int64_t line_ = 0;
  int64_t line_offset_ = 0;
  uint8_t first_byte_ = 0;
  uint8_t last_byte_ = 0;
  int64_t bases_ = 0;
  bool run_open_ = false;
};

class FastaDocuments final : public Documents {
 public:
  explicit FastaDocuments(std::span<const std::string> paths) {
    FileList list = list_files(paths);
    notes_ = std::move(list.notes);
    for (ListedFile& listed : list.files) {
      files_.push_back({SourceFile(listed.path), std::move(listed.name), count_});
      FastaFile& file = files_.back();
      LineScanner(file).scan();
      count_ += records(file);
      if (records(file) == 0) notes_.push_back(fmt::format("data.path: '{}' holds no FASTA record", listed.path));
    }
    if (count_ == 0)
      throw DataError(fmt::format("data.path: '{}' holds no FASTA record; a record begins with '>'", paths[0]));
  }

  int64_t count() const override { return count_; }

  int64_t size(int64_t document) const override {
    const Record record = find(document);
    return record.end - record.begin;
  }

  void read(int64_t document, int64_t offset, std::span<uint8_t> out) const override {
    const Record record = find(document);
    FARSPAN_CHECK(offset >= 0 && record.begin + offset + static_cast<int64_t>(out.size()) <= record.end,
                  "{}: bases {} to {} of {}", name(document), offset, offset + static_cast<int64_t>(out.size()),
                  record.end - record.begin);
    int64_t base = record.begin + offset;
    while (!out.empty()) {
      const size_t run = run_at(*record.file, base);
      const int64_t run_end = run + 1 < record.file->runs.size() ? record.file->runs[run + 1].first_base : record.end;
      const size_t bases = std::min(out.size(), static_cast<size_t>(run_end - base));
      read_run(record.file->file, record.file->runs[run], base, out.first(bases));
      out = out.subspan(bases);
      base += static_cast<int64_t>(bases);
    }
  }

  std::string name(int64_t document) const override {
    const Record record = find(document);
    return fmt::format("{} record {}", record.file->file.path(), document - record.file->first_document + 1);
  }

  std::string place(int64_t document, int64_t offset) const override {
    const Record record = find(document);
    const int64_t base = record.begin + offset;
    if (base >= record.end) return name(document) + ", its end";
    const Run& run = record.file->runs[run_at(*record.file, base)];
    return fmt::format("{} line {}, byte {} of the file", record.file->file.path(),
                       run.first_line + (base - run.first_base) / run.bases_per_line, run.position(base));
  }

  std::string fingerprint() const override {
    std::string text;
    for (const FastaFile& file : files_)
      text += fmt::format("{}\n{} {} {} {:016x}\n", file.name, file.file.size(), records(file),
                          file.record_starts.back(), file.file.head_hash());
    return text;
  }

  std::vector<std::string> notes() const override { return notes_; }

 private:
  struct Record {
    const FastaFile* file;
    int64_t begin;  // bases of the file
    int64_t end;
  };

  static int64_t records(const FastaFile& file) { return static_cast<int64_t>(file.record_starts.size()) - 1; }

  Record find(int64_t document) const {
    FARSPAN_CHECK(document >= 0 && document < count_, "document {} of {}", document, count_);
    const auto after = std::upper_bound(files_.begin(), files_.end(), document,
                                        [](int64_t d, const FastaFile& f) { return d < f.first_document; });
    const FastaFile& file = *(after - 1);
    const size_t record = static_cast<size_t>(document - file.first_document);
    return {&file, file.record_starts[record], file.record_starts[record + 1]};
  }

  static size_t run_at(const FastaFile& file, int64_t base) {
    const auto after = std::upper_bound(file.runs.begin(), file.runs.end(), base,
                                        [](int64_t b, const Run& run) { return b < run.first_base; });
    return static_cast<size_t>(after - file.runs.begin()) - 1;
  }

  // Reads the lines that hold the bases, then closes the gaps of the line ends.
  static void read_run(const SourceFile& file, const Run& run, int64_t base, std::span<uint8_t> out) {
    const int64_t begin = run.position(base);
    const int64_t end = run.position(base + static_cast<int64_t>(out.size()) - 1) + 1;
    std::vector<uint8_t> lines(static_cast<size_t>(end - begin));
    file.read(begin, lines);
    const uint8_t* from = lines.data();
    int64_t on_line =
        run.bases_per_line - (base - run.first_base) % run.bases_per_line;  // bases left on the first line
    while (!out.empty()) {
      const size_t bases = std::min(out.size(), static_cast<size_t>(on_line));
      std::memcpy(out.data(), from, bases);
      out = out.subspan(bases);
      if (out.empty()) return;
      from += on_line + run.bytes_per_line - run.bases_per_line;
      on_line = run.bases_per_line;
    }
  }

  std::vector<FastaFile> files_;
  std::vector<std::string> notes_;
  int64_t count_ = 0;
};

}  // namespace

std::unique_ptr<const Documents> open_fasta(std::span<const std::string> paths) {
  return std::make_unique<FastaDocuments>(paths);
}

}  // namespace farspan
