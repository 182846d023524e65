// SPDX-License-Identifier: Apache-2.0
// RowIndex: the arithmetic between documents, the token stream and rows. It knows token counts only, never a token.
//
// Stream positions count all tokens of all documents, end marks included: document d holds [starts[d], starts[d + 1]).
// A position has a target when the next one exists and, with document_mask or without pack_documents, belongs to the
// same document. So the last token of a document, its end mark, is a target and has none.
#pragma once

#include <cstdint>
#include <vector>

#include "data/dataset.h"

namespace farspan {

class RowIndex {
 public:
  struct Options {
    int64_t seq_length = 1;  // tokens of a row
    bool pack_documents = true;
    bool document_mask = true;  // without packing no label crosses a document anyway
  };

  // `document_tokens`: tokens of each document, end mark included, so at least 1.
  RowIndex(const std::vector<int64_t>& document_tokens, Options options);

  int64_t rows() const { return rows_; }
  int64_t documents() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t total_tokens() const { return starts_.back(); }
  // Tokens that are the input of no row, because they lie in rows without a target.
  int64_t tokens_left_out() const { return tokens_left_out_; }

  Row row(int64_t id) const;
  Span stream_span(int64_t id) const;  // stream positions of a row's real tokens

  int64_t document_at(int64_t position) const;
  Span document_span(int64_t document) const;  // stream positions
  bool has_target(int64_t position) const;

 private:
  void cut_stream();
  void cut_documents();
  bool labels_cross_documents() const { return options_.pack_documents && !options_.document_mask; }

  Options options_;
  std::vector<int64_t> starts_;  // documents() + 1 stream positions
  int64_t rows_ = 0;
  int64_t tokens_left_out_ = 0;
  std::vector<int64_t> left_out_;    // packed: numbers of the stream's cuts that have no target, ascending
  std::vector<int64_t> first_rows_;  // not packed: documents() + 1 row numbers
};

}  // namespace farspan
