// SPDX-License-Identifier: Apache-2.0
#include "data/dataset.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "base/error.h"
#include "base/log.h"
#include "base/philox.h"
#include "data/documents.h"
#include "data/row_index.h"
#include "data/tokenizer.h"

namespace farspan {
namespace {

constexpr int64_t kScanBytes = int64_t{1} << 20;

std::unique_ptr<const Documents> open_documents(const DataConfig& config) {
  switch (config.format) {
    case DataFormat::text:
      return open_text(config.path);
    case DataFormat::fasta:
      return open_fasta(config.path);
    case DataFormat::jsonl:
    case DataFormat::megatron:
    case DataFormat::tokens:
      break;
  }
  throw ConfigError("data.format: found jsonl, megatron or tokens; this version reads text and fasta");
}

struct SplitWeights {
  double training = 1;
  double held_out = 0;
};

// "95,5", "0.9,0.1" or a single number.
SplitWeights parse_split(const std::string& split) {
  const auto refusal = [&split](std::string_view why) {
    return ConfigError(fmt::format(
        "data.split: found '{}': {}; give the weights of training and held-out rows, as in 95,5", split, why));
  };
  std::vector<double> weights;
  const char* at = split.data();
  const char* const end = at + split.size();
  for (bool more = true; more;) {
    while (at < end && *at == ' ') ++at;
    double weight = 0;
    const auto [stop, failure] = std::from_chars(at, end, weight);
    if (failure != std::errc() || !std::isfinite(weight)) throw refusal("not one or two numbers");
    if (weight < 0) throw refusal("a weight is negative");
    weights.push_back(weight);
    at = stop;
    while (at < end && *at == ' ') ++at;
    more = at < end;
    if (more && *at++ != ',') throw refusal("not one or two numbers");
  }
  if (weights.size() > 2) throw refusal(fmt::format("{} weights", weights.size()));
  if (weights[0] == 0) throw refusal("nothing is left for training");
  return {weights[0], weights.size() == 2 ? weights[1] : 0.0};
}

int64_t training_rows(int64_t rows, const SplitWeights& split) {
  const double exact = static_cast<double>(rows) * split.training / (split.training + split.held_out);
  // 100 rows at "0.29,0.71" are 29, though 100 * 0.29 is a little less in binary.
  const double whole = std::round(exact);
  const double floor = std::abs(exact - whole) < 1e-9 * whole ? whole : std::floor(exact);
  return std::clamp<int64_t>(static_cast<int64_t>(floor), std::min<int64_t>(rows, 1), rows);
}

// Throws DataError at the first byte or end mark that has no token below `vocab_size`. Reads nothing when there can be
// none.
void check_tokens(const Documents& documents, const Tokenizer& tokenizer, int64_t vocab_size) {
  if (tokenizer.encodes_every_byte() && tokenizer.vocab_size() <= vocab_size) return;
  const auto outside = [&](int64_t document, int64_t offset, int32_t id) {
    return DataError(fmt::format(
        "data.path: {}: token {} has id {}, outside model.vocab_size {}; tokenizer {} needs {} or 0 (the tokenizer's)",
        documents.name(document), offset, id, vocab_size, tokenizer.name(), tokenizer.vocab_size()));
  };
  std::vector<uint8_t> block;
  for (int64_t d = 0; d < documents.count(); ++d) {
    const int64_t size = documents.size(d);
    for (int64_t begin = 0; begin < size; begin += kScanBytes) {
      block.resize(static_cast<size_t>(std::min(kScanBytes, size - begin)));
      documents.read(d, begin, block);
      for (size_t i = 0; i < block.size(); ++i) {
        const int32_t id = tokenizer.encode(block[i]);
        if (id >= 0 && id < vocab_size) [[likely]]
          continue;
        const int64_t offset = begin + static_cast<int64_t>(i);
        if (id >= 0) throw outside(d, offset, id);
        throw DataError(fmt::format("data.path: {}: byte 0x{:02x} has no token; tokenizer {} reads {}",
                                    documents.place(d, offset), block[i], tokenizer.name(), tokenizer.alphabet()));
      }
    }
    if (tokenizer.end_of_document() >= vocab_size) throw outside(d, size, tokenizer.end_of_document());
  }
}

std::vector<int64_t> token_counts(const Documents& documents) {
  std::vector<int64_t> counts(static_cast<size_t>(documents.count()));
  for (int64_t d = 0; d < documents.count(); ++d) counts[static_cast<size_t>(d)] = documents.size(d) + 1;  // end mark
  return counts;
}

std::string_view on_off(bool on) { return on ? "on" : "off"; }

class FileDataset final : public Dataset {
 public:
  FileDataset(const DataConfig& config, int64_t vocab_size)
      : config_(config),
        split_(parse_split(config.split)),
        tokenizer_(Tokenizer::from_name(config.tokenizer)),
        documents_(open_documents(config)),
        index_(token_counts(*documents_), {config.seq_length, config.pack_documents, config.document_mask}),
        training_rows_(training_rows(index_.rows(), split_)) {
    check_tokens(*documents_, tokenizer_, vocab_size == 0 ? tokenizer_.vocab_size() : vocab_size);
    if (index_.rows() == 0)
      throw DataError(
          fmt::format("data.path: '{}' and {} more: found {} tokens in {} documents and no pair of tokens in one "
                      "document; a row needs "
                      "at least one token and the next",
                      config.path[0], config.path.size() - 1, index_.total_tokens(), index_.documents()));
  }

  int64_t rows(Split split) const override {
    return split == Split::train ? training_rows_ : index_.rows() - training_rows_;
  }

  Row row(Split split, int64_t index) const override {
    FARSPAN_CHECK(index >= 0 && index < rows(split), "row {} of {} in the {} split", index, rows(split),
                  split == Split::train ? "training" : "held-out");
    return index_.row(split == Split::train ? index : training_rows_ + index);
  }

  void read(const Row& row, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const override;

  int64_t vocab_size() const override { return tokenizer_.vocab_size(); }
  int64_t total_tokens() const override { return index_.total_tokens(); }
  int64_t documents() const override { return index_.documents(); }

  std::string identity() const override {
    const std::string all = fmt::format(
        "{}tokenizer {} seq_length {} pack {} mask {} split {} {}", documents_->fingerprint(), tokenizer_.name(),
        config_.seq_length, config_.pack_documents, config_.document_mask, split_.training, split_.held_out);
    return fmt::format("{:016x}", name_hash(all));
  }

  std::string summary() const override {
    return fmt::format(
        "data: {} documents, {} tokens ({}); rows of {}: {} training, {} held out; tokens left out: {}; packing {}, "
        "document mask {}, positions {}",
        documents(), total_tokens(), tokenizer_.name(), config_.seq_length, rows(Split::train), rows(Split::held_out),
        index_.tokens_left_out(), on_off(config_.pack_documents), on_off(config_.document_mask),
        config_.reset_position_ids ? "restart with each document" : "count through the row");
  }

  std::vector<std::string> notes() const { return documents_->notes(); }

 private:
  void read_stream(int64_t position, std::span<int32_t> tokens) const;
  void ignore_labels_without_target(Span positions, std::span<int32_t> labels) const;

  DataConfig config_;
  SplitWeights split_;
  Tokenizer tokenizer_;
  std::unique_ptr<const Documents> documents_;
  RowIndex index_;
  int64_t training_rows_;
};

void FileDataset::read(const Row& row, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const {
  FARSPAN_CHECK(span.begin >= 0 && static_cast<int64_t>(tokens.size()) == span.length(),
                "row {}: positions {} to {} into {} tokens", row.id, span.begin, span.end, tokens.size());
  FARSPAN_CHECK(labels.empty() || labels.size() == tokens.size(), "row {}: {} tokens and {} labels", row.id,
                tokens.size(), labels.size());
  const Span held = index_.stream_span(row.id);
  const Span positions{std::min(held.begin + span.begin, held.end), std::min(held.begin + span.end, held.end)};
  const auto real = static_cast<size_t>(positions.length());  // the rest is padding

  std::fill(tokens.begin() + real, tokens.end(), 0);
  if (labels.empty() || real == 0) {
    read_stream(positions.begin, tokens.first(real));
    std::fill(labels.begin(), labels.end(), kIgnoredLabel);
    return;
  }

  // One token more than asked for is the last label; at the end of the stream there is none.
  std::vector<int32_t> stream(real + (index_.has_target(positions.end - 1) ? 1 : 0));
  read_stream(positions.begin, stream);
  std::copy_n(stream.begin(), real, tokens.begin());
  std::copy(stream.begin() + 1, stream.end(), labels.begin());
  std::fill(labels.begin() + real, labels.end(), kIgnoredLabel);
  ignore_labels_without_target(positions, labels.first(real));
}

void FileDataset::ignore_labels_without_target(Span positions, std::span<int32_t> labels) const {
  for (int64_t d = index_.document_at(positions.begin);; ++d) {
    const int64_t last = index_.document_span(d).end - 1;
    if (last >= positions.end) return;
    if (!index_.has_target(last)) labels[static_cast<size_t>(last - positions.begin)] = kIgnoredLabel;
    if (last + 1 == positions.end) return;
  }
}

// Tokens of the stream from `position` on: for each document the bytes that are wanted, then its end mark.
void FileDataset::read_stream(int64_t position, std::span<int32_t> tokens) const {
  if (tokens.empty()) return;
  std::vector<uint8_t> bytes;
  for (int64_t d = index_.document_at(position); !tokens.empty(); ++d) {
    const Span document = index_.document_span(d);
    const int64_t end_mark = document.end - 1;
    const size_t wanted = std::min(tokens.size(), static_cast<size_t>(end_mark - position));
    bytes.resize(wanted);
    documents_->read(d, position - document.begin, bytes);
    tokenizer_.encode(bytes, tokens.first(wanted));
    tokens = tokens.subspan(wanted);
    position += static_cast<int64_t>(wanted);
    if (tokens.empty()) return;
    tokens[0] = tokenizer_.end_of_document();
    tokens = tokens.subspan(1);
    ++position;
  }
}

}  // namespace

std::shared_ptr<const Dataset> Dataset::open(const DataConfig& config, int64_t vocab_size) {
  if (config.seq_length < 1)
    throw ConfigError(fmt::format("data.seq_length: found {}; needs at least 1", config.seq_length));
  const auto dataset = std::make_shared<FileDataset>(config, vocab_size);
  for (const std::string& note : dataset->notes()) log_info("{}", note);
  return dataset;
}

}  // namespace farspan
