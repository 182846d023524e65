// SPDX-License-Identifier: Apache-2.0
#include "data/dataset.h"

#include <algorithm>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "data/row_index.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using test::message_of;
using test::ScratchFolder;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kEnd = 256;             // end mark of the byte tokenizer
constexpr int32_t kNone = kIgnoredLabel;  // short, for expected rows

DataConfig byte_config(const ScratchFolder& folder, int64_t seq_length) {
  DataConfig config;
  config.path = {folder.path()};
  config.seq_length = seq_length;
  config.split = "100,0";
  return config;
}

// Files a00, a01, ... with the given numbers of bytes; byte i of all of them is i mod 251.
void write_documents(const ScratchFolder& folder, const std::vector<int64_t>& sizes) {
  int64_t next = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::string text;
    for (int64_t i = 0; i < sizes[d]; ++i) text += static_cast<char>(1 + next++ % 250);
    folder.write(fmt::format("a{:02}", d), text);
  }
}

struct TokensAndLabels {
  std::vector<int32_t> tokens;
  std::vector<int32_t> labels;
  bool operator==(const TokensAndLabels&) const = default;
};

TokensAndLabels read(const Dataset& dataset, const Row& row, Span span) {
  TokensAndLabels out{std::vector<int32_t>(static_cast<size_t>(span.length()), -7),
                      std::vector<int32_t>(static_cast<size_t>(span.length()), -7)};
  dataset.read(row, span, out.tokens, out.labels);
  return out;
}

TokensAndLabels read(const Dataset& dataset, int64_t row, int64_t seq_length) {
  return read(dataset, dataset.row(Split::train, row), {0, seq_length});
}

// All inputs of all training rows, one after the other, padding dropped.
std::vector<int32_t> all_inputs(const Dataset& dataset) {
  std::vector<int32_t> all;
  for (int64_t r = 0; r < dataset.rows(Split::train); ++r) {
    const Row row = dataset.row(Split::train, r);
    const TokensAndLabels both = read(dataset, row, {0, row.length});
    all.insert(all.end(), both.tokens.begin(), both.tokens.end());
  }
  return all;
}

int64_t targets_in(const std::vector<int32_t>& labels) {
  return std::count_if(labels.begin(), labels.end(), [](int32_t label) { return label != kIgnoredLabel; });
}

TEST(Dataset, PackedRowsHoldTheStreamInOrder) {
  const ScratchFolder folder;
  folder.write("1", "abc");
  folder.write("2", "");
  folder.write("3", "wxyz");
  const auto dataset = Dataset::open(byte_config(folder, 4), 0);
  EXPECT_EQ(dataset->documents(), 3);
  EXPECT_EQ(dataset->total_tokens(), 4 + 1 + 5);
  EXPECT_EQ(dataset->vocab_size(), 257);
  ASSERT_EQ(dataset->rows(Split::train), 3);
  EXPECT_EQ(dataset->rows(Split::held_out), 0);

  EXPECT_EQ(read(*dataset, 0, 4), (TokensAndLabels{{'a', 'b', 'c', kEnd}, {'b', 'c', kEnd, kNone}}));
  EXPECT_EQ(read(*dataset, 1, 4), (TokensAndLabels{{kEnd, 'w', 'x', 'y'}, {kNone, 'x', 'y', 'z'}}));
  EXPECT_EQ(read(*dataset, 2, 4), (TokensAndLabels{{'z', kEnd, 0, 0}, {kEnd, kNone, kNone, kNone}}));
  EXPECT_THAT(dataset->row(Split::train, 0).documents, ElementsAre(Span{0, 4}));
  EXPECT_THAT(dataset->row(Split::train, 1).documents, ElementsAre(Span{0, 1}, Span{1, 4}));
  EXPECT_EQ(dataset->row(Split::train, 1).targets, 3);
}

TEST(Dataset, LastRowIsPadded) {
  const ScratchFolder folder;
  folder.write("1", "abcdef");
  const auto dataset = Dataset::open(byte_config(folder, 4), 0);
  ASSERT_EQ(dataset->rows(Split::train), 2);
  const Row last = dataset->row(Split::train, 1);
  EXPECT_EQ(last.length, 3);
  EXPECT_EQ(last.targets, 2);
  EXPECT_EQ(read(*dataset, 1, 4), (TokensAndLabels{{'e', 'f', kEnd, 0}, {'f', kEnd, kNone, kNone}}));
  // A context-parallel layout may pad a row further.
  EXPECT_EQ(read(*dataset, last, {3, 9}), (TokensAndLabels{{0, 0, 0, 0, 0, 0}, std::vector<int32_t>(6, kNone)}));
}

TEST(Dataset, WithoutPackingEachDocumentIsCutAlone) {
  const ScratchFolder folder;
  folder.write("1", "abcd");  // 5 tokens; the end mark alone would make a row without a target
  folder.write("2", "");
  folder.write("3", "wxyzab");
  DataConfig config = byte_config(folder, 4);
  config.pack_documents = false;
  for (bool mask : {true, false}) {
    config.document_mask = mask;
    const auto dataset = Dataset::open(config, 0);
    ASSERT_EQ(dataset->rows(Split::train), 3);
    EXPECT_EQ(read(*dataset, 0, 4), (TokensAndLabels{{'a', 'b', 'c', 'd'}, {'b', 'c', 'd', kEnd}}));
    EXPECT_EQ(read(*dataset, 1, 4), (TokensAndLabels{{'w', 'x', 'y', 'z'}, {'x', 'y', 'z', 'a'}}));
    EXPECT_EQ(read(*dataset, 2, 4), (TokensAndLabels{{'a', 'b', kEnd, 0}, {'b', kEnd, kNone, kNone}}));
    EXPECT_THAT(dataset->row(Split::train, 2).documents, ElementsAre(Span{0, 3}));
    EXPECT_THAT(dataset->summary(), HasSubstr("tokens left out: 2"));  // two end marks
  }
}

TEST(Dataset, AnySpanEqualsThatPartOfTheRow) {
  const ScratchFolder folder;
  write_documents(folder, {5, 0, 9, 1, 30, 2});
  for (bool mask : {true, false})
    for (bool pack : {true, false}) {
      DataConfig config = byte_config(folder, 16);
      config.document_mask = mask;
      config.pack_documents = pack;
      const auto dataset = Dataset::open(config, 0);
      for (int64_t r = 0; r < dataset->rows(Split::train); ++r) {
        const Row row = dataset->row(Split::train, r);
        const TokensAndLabels whole = read(*dataset, row, {0, 16});
        EXPECT_EQ(targets_in(whole.labels), row.targets);
        for (int64_t begin = 0; begin <= 16; ++begin)
          for (int64_t end = begin; end <= 16; ++end)
            EXPECT_EQ(read(*dataset, row, {begin, end}),
                      (TokensAndLabels{{whole.tokens.begin() + begin, whole.tokens.begin() + end},
                                       {whole.labels.begin() + begin, whole.labels.begin() + end}}));
        std::vector<int32_t> tokens_alone(16);
        dataset->read(row, {0, 16}, tokens_alone, {});
        EXPECT_EQ(tokens_alone, whole.tokens);
      }
    }
}

TEST(Dataset, B035_DocumentMaskAloneDecidesLabels) {
  const ScratchFolder folder;
  folder.write("1", "abc");
  folder.write("2", "xyz");
  DataConfig config = byte_config(folder, 8);
  for (bool reset : {true, false}) {
    config.reset_position_ids = reset;
    config.document_mask = true;
    const auto masked = Dataset::open(config, 0);
    EXPECT_THAT(read(*masked, 0, 8).labels, ElementsAre('b', 'c', kEnd, kNone, 'y', 'z', kEnd, kNone));
    EXPECT_EQ(masked->row(Split::train, 0).targets, 6);

    config.document_mask = false;
    const auto open = Dataset::open(config, 0);
    EXPECT_THAT(read(*open, 0, 8).labels, ElementsAre('b', 'c', kEnd, 'x', 'y', 'z', kEnd, kNone));
    EXPECT_EQ(open->row(Split::train, 0).targets, 7);

    // Either way the row knows its documents, and the log says both settings.
    for (const auto& dataset : {masked, open})
      EXPECT_THAT(dataset->row(Split::train, 0).documents, ElementsAre(Span{0, 4}, Span{4, 8}));
    EXPECT_THAT(masked->summary(), HasSubstr("document mask on"));
    EXPECT_THAT(open->summary(), HasSubstr("document mask off"));
    EXPECT_THAT(open->summary(), HasSubstr(reset ? "positions restart" : "positions count through"));
  }
}

TEST(Dataset, B036_PiecesOfDocuments) {
  const ScratchFolder folder;
  write_documents(folder, {5, 1, 7});  // 6, 2 and 8 tokens
  const auto dataset = Dataset::open(byte_config(folder, 16), 0);
  const Row row = dataset->row(Split::train, 0);
  EXPECT_THAT(row.documents, ElementsAre(Span{0, 6}, Span{6, 8}, Span{8, 16}));
  const auto longest = std::max_element(row.documents.begin(), row.documents.end(),
                                        [](const Span& a, const Span& b) { return a.length() < b.length(); });
  EXPECT_EQ(longest->length(), 8);
}

TEST(Dataset, B042_LongRowsOfManyDocumentsStaySmall) {
  const ScratchFolder folder;
  write_documents(folder, std::vector<int64_t>(50, 131072 / 50 - 1));
  const auto dataset = Dataset::open(byte_config(folder, 131072), 0);
  const Row row = dataset->row(Split::train, 0);
  EXPECT_EQ(row.documents.size(), 50u);
  // All that describes the row is its list of pieces; nothing grows with the length, let alone its square.
  EXPECT_LE(row.documents.capacity() * sizeof(Span), 4096u);
  const TokensAndLabels both = read(*dataset, row, {0, 131072});
  EXPECT_EQ(targets_in(both.labels), row.targets);
}

TEST(Dataset, B044_EveryTokenIsPlacedOnce) {
  const ScratchFolder folder;
  write_documents(folder, {60, 5, 121, 0});  // 61, 6, 122 and 1 tokens with end marks
  const auto dataset = Dataset::open(byte_config(folder, 30), 0);
  EXPECT_EQ(dataset->total_tokens(), 190);
  EXPECT_EQ(dataset->rows(Split::train), 7);
  std::vector<int32_t> stream;
  int64_t next = 0;
  for (int64_t bytes : {60, 5, 121, 0}) {
    for (int64_t i = 0; i < bytes; ++i) stream.push_back(static_cast<int32_t>(1 + next++ % 250));
    stream.push_back(kEnd);
  }
  EXPECT_EQ(all_inputs(*dataset), stream);
  for (int64_t r = 0; r < 7; ++r) {
    EXPECT_LE(dataset->row(Split::train, r).length, 30);
    EXPECT_GE(dataset->row(Split::train, r).targets, 1);
  }
  EXPECT_THAT(dataset->summary(), HasSubstr("tokens left out: 0"));
}

TEST(RowIndex, RowsWithoutATargetAreLeftOutAndCounted) {
  // Rows of 3: [0,3) two tokens and their end mark; [3,9) six end marks of empty documents; [9,12) five tokens' first.
  const RowIndex index({3, 1, 1, 1, 1, 1, 1, 5}, {3, true, true});
  EXPECT_EQ(index.total_tokens(), 14);
  ASSERT_EQ(index.rows(), 3);
  EXPECT_EQ(index.stream_span(0), (Span{0, 3}));
  EXPECT_EQ(index.stream_span(1), (Span{9, 12}));
  EXPECT_EQ(index.stream_span(2), (Span{12, 14}));
  EXPECT_EQ(index.tokens_left_out(), 6);

  const RowIndex crossing({3, 1, 1, 1, 1, 1, 1, 5}, {3, true, false});
  EXPECT_EQ(crossing.rows(), 5);  // every token but the last has a next one
  EXPECT_EQ(crossing.tokens_left_out(), 0);
}

// Against a plain count of targets, for many small sets of documents.
TEST(RowIndex, EqualsTheDefinition) {
  uint64_t state = 1;
  const auto draw = [&state](int64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>(state >> 33) % below;
  };
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<int64_t> documents(static_cast<size_t>(1 + draw(12)));
    for (int64_t& tokens : documents) tokens = draw(3) == 0 ? 1 + draw(9) : 1;
    const RowIndex::Options options{1 + draw(5), true, draw(2) == 0};
    const RowIndex index(documents, options);

    std::vector<bool> has_target;
    for (int64_t tokens : documents)
      for (int64_t i = 0; i < tokens; ++i) has_target.push_back(i + 1 < tokens || !options.document_mask);
    has_target.back() = false;
    const auto total = static_cast<int64_t>(has_target.size());
    int64_t row = 0;
    for (int64_t begin = 0; begin < total; begin += options.seq_length) {
      const int64_t end = std::min(begin + options.seq_length, total);
      const int64_t targets = std::count(has_target.begin() + begin, has_target.begin() + end, true);
      if (targets == 0) continue;
      ASSERT_LT(row, index.rows()) << "trial " << trial;
      EXPECT_EQ(index.stream_span(row), (Span{begin, end}));
      const Row described = index.row(row++);
      EXPECT_EQ(described.targets, targets);
      EXPECT_EQ(described.length, end - begin);
      int64_t at = 0;
      for (const Span& piece : described.documents) {
        EXPECT_EQ(piece.begin, at);
        EXPECT_FALSE(piece.empty());
        at = piece.end;
      }
      EXPECT_EQ(at, end - begin);
    }
    EXPECT_EQ(row, index.rows()) << "trial " << trial;
  }
}

// There is no cache that could be stale: what a folder's rows are is worked out each time, and nothing is written.
TEST(Dataset, B043_NothingIsKeptFromOneCuttingToTheNext) {
  const ScratchFolder folder;
  folder.write("texts/1", "acgtacgtac");
  DataConfig config = byte_config(folder, 4);
  config.path = {folder.path("texts")};
  const auto rows = [&] { return Dataset::open(config, 0)->rows(Split::train); };
  EXPECT_EQ(rows(), 3);  // 10 bytes and the end mark
  config.seq_length = 8;
  EXPECT_EQ(rows(), 2);
  config.tokenizer = "dna";
  const auto bases = Dataset::open(config, 0);
  EXPECT_LT(bases->vocab_size(), 256);
  EXPECT_NE(read(*bases, 0, 8).tokens[0], static_cast<int32_t>('a'));
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    files.push_back(entry.path().filename());
  std::sort(files.begin(), files.end());
  EXPECT_THAT(files, ElementsAre("1", "texts"));
}

TEST(Dataset, B060_FiveTokensFourTargets) {
  const ScratchFolder folder;
  folder.write("1", "abcd");
  const auto dataset = Dataset::open(byte_config(folder, 5), 0);
  EXPECT_EQ(dataset->total_tokens(), 5);
  EXPECT_EQ(dataset->row(Split::train, 0).targets, 4);
  EXPECT_THAT(read(*dataset, 0, 5).labels, ElementsAre('b', 'c', 'd', kEnd, kNone));
}

TEST(Dataset, B081_TwoFilesOneStreamWithoutGapsAtTheEdge) {
  const ScratchFolder folder;
  write_documents(folder, {32, 32});  // 33 tokens each
  const auto dataset = Dataset::open(byte_config(folder, 8), 0);
  EXPECT_EQ(dataset->total_tokens(), 66);
  EXPECT_EQ(dataset->rows(Split::train), 9);
  EXPECT_EQ(all_inputs(*dataset).size(), 66u);
  EXPECT_THAT(dataset->row(Split::train, 4).documents, ElementsAre(Span{0, 1}, Span{1, 8}));
}

TEST(Dataset, B082_TheTailIsARowOfItsOwn) {
  const ScratchFolder folder;
  write_documents(folder, {99});  // 100 tokens
  const auto dataset = Dataset::open(byte_config(folder, 8), 0);
  EXPECT_EQ(dataset->rows(Split::train), 13);
  EXPECT_EQ(dataset->row(Split::train, 12).length, 4);
  EXPECT_EQ(all_inputs(*dataset).size(), 100u);
}

TEST(Dataset, B085_LengthsAre64Bit) {
  const ScratchFolder folder;
  write_documents(folder, {65536, 2});  // 65537 and 3 tokens
  const auto dataset = Dataset::open(byte_config(folder, 64), 0);
  EXPECT_EQ(dataset->total_tokens(), 65540);
  EXPECT_EQ(dataset->rows(Split::train), 1025);  // 1024 full ones and the last four tokens
  EXPECT_EQ(dataset->row(Split::train, 1023).length, 64);
  EXPECT_EQ(dataset->row(Split::train, 1024).length, 4);

  const int64_t huge = int64_t{5} << 40;
  const RowIndex index({huge, 3, huge}, {int64_t{1} << 20, true, true});
  EXPECT_EQ(index.total_tokens(), 2 * huge + 3);
  EXPECT_EQ(index.rows(), (int64_t{10} << 20) + 1);
  EXPECT_THAT(index.row(int64_t{5} << 20).documents, ElementsAre(Span{0, 3}, Span{3, int64_t{1} << 20}));
}

TEST(Dataset, B087_TwentyFiveTokensAreThreeRows) {
  const ScratchFolder folder;
  write_documents(folder, {24});
  const auto dataset = Dataset::open(byte_config(folder, 8), 0);
  ASSERT_EQ(dataset->rows(Split::train), 3);
  int64_t targets = 0;
  for (int64_t r = 0; r < 3; ++r) {
    const TokensAndLabels both = read(*dataset, r, 8);
    EXPECT_EQ(both.tokens[0], 1 + 8 * r);
    EXPECT_EQ(both.labels[7], r < 2 ? 1 + 8 * (r + 1) : kEnd);  // the neighbour's first token
    targets += dataset->row(Split::train, r).targets;
  }
  EXPECT_EQ(targets, 24);
}

TEST(Dataset, B088_TinyDataIsAPaddedRow) {
  const ScratchFolder folder;
  folder.write("1", "abcd");
  const auto dataset = Dataset::open(byte_config(folder, 8), 0);
  ASSERT_EQ(dataset->rows(Split::train), 1);
  EXPECT_EQ(dataset->row(Split::train, 0).length, 5);
  EXPECT_EQ(dataset->row(Split::train, 0).targets, 4);
}

TEST(Dataset, B088_NoTargetAtAllIsAnError) {
  const ScratchFolder folder;
  folder.write("1", "");
  folder.write("2", "");
  const std::string message = message_of<DataError>([&] { Dataset::open(byte_config(folder, 8), 0); });
  EXPECT_THAT(message, HasSubstr(folder.path()));
  EXPECT_THAT(message, HasSubstr("found 2 tokens in 2 documents"));
  EXPECT_THAT(message, HasSubstr("needs at least"));

  DataConfig crossing = byte_config(folder, 8);
  crossing.document_mask = false;  // then the second end mark is the first one's target
  EXPECT_EQ(Dataset::open(crossing, 0)->row(Split::train, 0).targets, 1);
}

TEST(Dataset, B090_IdentityTellsDataAndCuttingApart) {
  const ScratchFolder folder;
  folder.write("x/1", "abcd");
  folder.write("y/x/1", "abcd");
  DataConfig config = byte_config(folder, 8);
  config.path = {folder.path("x")};
  const std::string identity = Dataset::open(config, 0)->identity();
  EXPECT_EQ(identity.size(), 16u);
  EXPECT_EQ(Dataset::open(config, 0)->identity(), identity);

  DataConfig moved = config;
  moved.path = {folder.path("y/x") + "/"};
  EXPECT_EQ(Dataset::open(moved, 0)->identity(), identity);

  const auto differs = [&](auto change) {
    DataConfig other = config;
    change(other);
    return Dataset::open(other, 0)->identity() != identity;
  };
  EXPECT_TRUE(differs([](DataConfig& c) { c.seq_length = 16; }));
  EXPECT_TRUE(differs([](DataConfig& c) { c.pack_documents = false; }));
  EXPECT_TRUE(differs([](DataConfig& c) { c.document_mask = false; }));
  EXPECT_TRUE(differs([](DataConfig& c) { c.split = "90,10"; }));
  EXPECT_TRUE(differs([](DataConfig& c) { c.tokenizer = "dna"; }));
  EXPECT_FALSE(differs([](DataConfig& c) { c.reset_position_ids = false; }));

  folder.write("x/1", "abcX");  // same name and size
  EXPECT_NE(Dataset::open(config, 0)->identity(), identity);
  folder.write("x/1", "abcde");
  EXPECT_NE(Dataset::open(config, 0)->identity(), identity);
  folder.write("x/1", "abcd");
  EXPECT_EQ(Dataset::open(config, 0)->identity(), identity);
  folder.write("x/2", "");
  EXPECT_NE(Dataset::open(config, 0)->identity(), identity);
}

TEST(Dataset, B092_TokensOutsideTheVocabularyAreNamed) {
  const ScratchFolder folder;
  folder.write("1", "abc");
  const std::string second = folder.write("2", "ab\xf0");
  EXPECT_NO_THROW(Dataset::open(byte_config(folder, 4), 257));
  EXPECT_NO_THROW(Dataset::open(byte_config(folder, 4), 50304));

  std::string message = message_of<DataError>([&] { Dataset::open(byte_config(folder, 4), 256); });
  EXPECT_THAT(message, HasSubstr(folder.path("1") + ": token 3 has id 256, outside model.vocab_size 256"));
  DataConfig only_second = byte_config(folder, 4);
  only_second.path = {second};
  message = message_of<DataError>([&] { Dataset::open(only_second, 128); });
  EXPECT_THAT(message, HasSubstr(second + ": token 2 has id 240, outside model.vocab_size 128"));
  EXPECT_THAT(message, HasSubstr("needs 257"));
}

TEST(Dataset, BytesWithoutATokenAreNamedWithTheirPlace) {
  const ScratchFolder folder;
  DataConfig config = byte_config(folder, 4);
  config.tokenizer = "dna";
  config.path = {folder.write("x.txt", "ACGT\nAC")};
  EXPECT_THAT(message_of<DataError>([&] { Dataset::open(config, 0); }),
              HasSubstr("x.txt line 1, byte 4 of the file: byte 0x0a has no token; tokenizer dna reads A C G T N"));
  config.format = DataFormat::fasta;
  config.path = {folder.write("x.fa", ">one\nACGT\nACJT\n")};
  EXPECT_THAT(message_of<DataError>([&] { Dataset::open(config, 0); }),
              HasSubstr("x.fa line 3, byte 12 of the file: byte 0x4a"));
}

TEST(Dataset, FastaRecordsAreDocuments) {
  const ScratchFolder folder;
  DataConfig config = byte_config(folder, 16);
  config.tokenizer = "dna";
  config.format = DataFormat::fasta;
  folder.write("x.fa", ">one\nACG\nTN\n>two\nGG\n");
  const auto dataset = Dataset::open(config, 6);
  EXPECT_EQ(dataset->documents(), 2);
  EXPECT_EQ(dataset->vocab_size(), 6);
  EXPECT_THAT(read(*dataset, 0, 9).tokens, ElementsAre(0, 1, 2, 3, 4, 5, 2, 2, 5));
}

TEST(Dataset, SplitHoldsBackTheLastRows) {
  const ScratchFolder folder;
  write_documents(folder, {400});  // 100 rows of 4 and no more: the last label is the end mark
  DataConfig config = byte_config(folder, 4);
  const auto rows = [&](const std::string& split) {
    config.split = split;
    const auto dataset = Dataset::open(config, 0);
    EXPECT_EQ(dataset->rows(Split::train) + dataset->rows(Split::held_out), 100);
    return dataset->rows(Split::train);
  };
  EXPECT_EQ(rows("95,5"), 95);
  EXPECT_EQ(rows("0.29, 0.71"), 29);
  EXPECT_EQ(rows("1,2"), 33);
  EXPECT_EQ(rows("100,0"), 100);
  EXPECT_EQ(rows("7"), 100);
  EXPECT_EQ(rows("1,1000"), 1);  // training keeps at least one row

  config.split = "95,5";
  const auto dataset = Dataset::open(config, 0);
  EXPECT_EQ(dataset->row(Split::train, 94).id, 94);
  EXPECT_EQ(dataset->row(Split::held_out, 0).id, 95);
  EXPECT_EQ(read(*dataset, dataset->row(Split::held_out, 0), {0, 1}).tokens[0], 1 + 95 * 4 % 250);
  EXPECT_THROW(dataset->row(Split::held_out, 5), InternalError);

  for (const char* wrong : {"", "a", "95;5", "95,", ",5", "-1,2", "0,1", "0", "90,5,5", "nan,1", "inf,1", "95 5"})
    EXPECT_THAT(message_of<ConfigError>([&] { rows(wrong); }), HasSubstr(fmt::format("found '{}'", wrong)));
}

TEST(Dataset, WhatThisVersionLacksIsRefused) {
  const ScratchFolder folder;
  folder.write("1", "abcd");
  DataConfig config = byte_config(folder, 8);
  config.format = DataFormat::jsonl;
  EXPECT_THAT(message_of<ConfigError>([&] { Dataset::open(config, 0); }), HasSubstr("text and fasta"));
  config = byte_config(folder, 0);
  EXPECT_THAT(message_of<ConfigError>([&] { Dataset::open(config, 0); }), HasSubstr("seq_length: found 0"));
}

TEST(Dataset, ManyThreadsReadOneDataset) {
  const ScratchFolder folder;
  write_documents(folder, {100, 3, 250, 0, 40});
  const auto dataset = Dataset::open(byte_config(folder, 32), 0);
  std::vector<TokensAndLabels> expected;
  for (int64_t r = 0; r < dataset->rows(Split::train); ++r) expected.push_back(read(*dataset, r, 32));
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < wrong.size(); ++t)
    threads.emplace_back([&, t] {
      for (int repeat = 0; repeat < 20; ++repeat)
        for (size_t r = 0; r < expected.size(); ++r)
          if (read(*dataset, static_cast<int64_t>(r), 32) != expected[r]) ++wrong[t];
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, Each(0));
}

}  // namespace
}  // namespace farspan
