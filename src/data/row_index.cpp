// SPDX-License-Identifier: Apache-2.0
#include "data/row_index.h"

#include <algorithm>

#include "base/error.h"
#include "base/math.h"

namespace farspan {
namespace {

// Index of the last element that is at most `value`; `sorted` starts at or below it.
int64_t last_at_most(const std::vector<int64_t>& sorted, int64_t value) {
  return std::upper_bound(sorted.begin(), sorted.end(), value) - sorted.begin() - 1;
}

}  // namespace

RowIndex::RowIndex(const std::vector<int64_t>& document_tokens, Options options) : options_(options) {
  FARSPAN_CHECK(options.seq_length >= 1, "rows of {} tokens", options.seq_length);
  starts_.reserve(document_tokens.size() + 1);
  starts_.push_back(0);
  for (int64_t tokens : document_tokens) {
    FARSPAN_CHECK(tokens >= 1, "document of {} tokens has no end mark", tokens);
    starts_.push_back(starts_.back() + tokens);
  }
  if (options.pack_documents)
    cut_stream();
  else
    cut_documents();
}

void RowIndex::cut_stream() {
  const int64_t length = options_.seq_length;
  const int64_t total = total_tokens();
  const int64_t cuts = ceil_div(std::max<int64_t>(total - 1, 0), length);  // the last token of all has no target
  tokens_left_out_ = total - std::min(cuts * length, total);

  // With labels kept inside documents a cut has no target when each of its tokens ends a document. Such tokens come in
  // runs: a document's last token followed by documents of one token each.
  if (!labels_cross_documents()) {
    for (int64_t d = 0; d < documents();) {
      const int64_t run_begin = starts_[d + 1] - 1;
      for (++d; d < documents() && starts_[d + 1] - starts_[d] == 1;) ++d;
      const int64_t run_end = starts_[d];
      for (int64_t cut = ceil_div(run_begin, length); cut < cuts; ++cut) {
        const Span span{cut * length, std::min((cut + 1) * length, total)};
        if (span.end > run_end) break;
        left_out_.push_back(cut);
        tokens_left_out_ += span.length();
      }
    }
  }
  rows_ = cuts - static_cast<int64_t>(left_out_.size());
}

void RowIndex::cut_documents() {
  first_rows_.reserve(starts_.size());
  first_rows_.push_back(0);
  for (int64_t d = 0; d < documents(); ++d) {
    const int64_t tokens = document_span(d).length();
    const int64_t rows = ceil_div(tokens - 1, options_.seq_length);  // the end mark has no target
    tokens_left_out_ += tokens - std::min(rows * options_.seq_length, tokens);
    first_rows_.push_back(first_rows_.back() + rows);
  }
  rows_ = first_rows_.back();
}

Span RowIndex::stream_span(int64_t id) const {
  FARSPAN_CHECK(id >= 0 && id < rows_, "row {} of {}", id, rows_);
  if (options_.pack_documents) {
    // left_out_[i] - i kept cuts lie before the i-th left-out one; row `id` comes after all those with at most `id`
    // before.
    int64_t low = 0;
    int64_t high = static_cast<int64_t>(left_out_.size());
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (left_out_[middle] - middle <= id)
        low = middle + 1;
      else
        high = middle;
    }
    const int64_t begin = (id + low) * options_.seq_length;
    return {begin, std::min(begin + options_.seq_length, total_tokens())};
  }
  const int64_t d = last_at_most(first_rows_, id);
  const int64_t begin = starts_[d] + (id - first_rows_[d]) * options_.seq_length;
  return {begin, std::min(begin + options_.seq_length, starts_[d + 1])};
}

Row RowIndex::row(int64_t id) const {
  const Span span = stream_span(id);
  Row row;
  row.id = id;
  row.length = span.length();
  row.targets = span.length();
  for (int64_t d = document_at(span.begin); d < documents() && starts_[d] < span.end; ++d) {
    const Span document = document_span(d);
    row.documents.push_back(
        {std::max(document.begin, span.begin) - span.begin, std::min(document.end, span.end) - span.begin});
    if (document.end <= span.end && !has_target(document.end - 1)) --row.targets;
  }
  return row;
}

int64_t RowIndex::document_at(int64_t position) const {
  FARSPAN_CHECK(position >= 0 && position < total_tokens(), "stream position {} of {}", position, total_tokens());
  return last_at_most(starts_, position);
}

Span RowIndex::document_span(int64_t document) const { return {starts_[document], starts_[document + 1]}; }

bool RowIndex::has_target(int64_t position) const {
  const int64_t next = position + 1;
  return next < (labels_cross_documents() ? total_tokens() : starts_[document_at(position) + 1]);
}

}  // namespace farspan
