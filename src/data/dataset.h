// SPDX-License-Identifier: Apache-2.0
// From files to rows. All documents, in a fixed order, form one stream of tokens (each document closed by the
// end-of-document token where the tokenizer has one). With pack_documents the stream is cut into rows of seq_length
// tokens, every token in exactly one row; without, each document is cut alone and its last row padded. Row inputs are
// tokens [r S, (r+1) S) of the stream; a label is the next token of the stream, also across a row's edge, but never
// across a document's when document_mask is on or packing off. Rows without a single target are left out.
//
// The index holds document bounds only; tokens are read on demand, so a rank touches just the spans it owns.
//
// split "95,5" holds back the last rows: training has floor(rows * 95 / (95 + 5)) of them, but at least one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config/config.h"
#include "parallel/sequence_layout.h"

namespace farspan {

inline constexpr int32_t kIgnoredLabel = -1;

// One row, described without its tokens.
struct Row {
  int64_t id = 0;               // index among all rows of the dataset (both splits)
  int64_t length = 0;           // real tokens, at most seq_length; the rest is padding
  std::vector<Span> documents;  // pieces of documents in row positions; ascending, covering [0, length)
  int64_t targets = 0;          // labels that are not ignored, in the whole row
};

enum class Split { train, held_out };

class Dataset {
 public:
  // Opens and indexes the files. Throws DataError: missing or empty path, no row, a byte without a token, a token
  // outside the vocabulary (file, offset, id); ConfigError: a format, tokenizer, split or seq_length that is not one.
  // `vocab_size` 0 means the tokenizer's. One Dataset may be read by many threads at once.
  static std::shared_ptr<const Dataset> open(const DataConfig& config, int64_t vocab_size);
  virtual ~Dataset() = default;

  virtual int64_t rows(Split split) const = 0;
  virtual Row row(Split split, int64_t index) const = 0;  // index in [0, rows(split))

  // Tokens (and labels) of row positions [span.begin, span.end); padding, also past seq_length, reads as token 0,
  // kIgnoredLabel. `labels` may be empty. Throws DataError when a file has changed since open.
  virtual void read(const Row& row, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const = 0;

  virtual int64_t vocab_size() const = 0;    // of the tokenizer
  virtual int64_t total_tokens() const = 0;  // of the stream, end marks included
  virtual int64_t documents() const = 0;
  // Hash of all that decides what a row holds and which rows train: names, sizes and first bytes of the files,
  // tokenizer, seq_length, packing, document_mask, split. Kept in checkpoints; the same wherever the data lies.
  virtual std::string identity() const = 0;
  virtual std::string summary() const = 0;  // one line for the log
};

// Which rows a global batch holds: a pure function of (seed, sample number), so every rank of every layout agrees
// without a word. Sample n of training is row permutation(epoch)[n mod rows] with epoch = n / rows. Holds no state and
// no table: one Sampler may be asked by many threads.
class Sampler {
 public:
  Sampler(int64_t rows, int64_t seed, bool shuffle);
  int64_t row_of(int64_t sample) const;
  int64_t epoch_of(int64_t sample) const { return sample / rows_; }

 private:
  int64_t rows_;
  int64_t seed_;
  bool shuffle_;
};

}  // namespace farspan
