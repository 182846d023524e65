// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> tokens(text.size());
  tokenizer.encode({reinterpret_cast<const uint8_t*>(text.data()), text.size()}, tokens);
  return tokens;
}

TEST(Tokenizer, ByteIdsAreTheBytesAndOneMore) {
  const Tokenizer byte = Tokenizer::from_name("byte");
  EXPECT_EQ(byte.vocab_size(), 257);
  EXPECT_EQ(byte.end_of_document(), 256);
  EXPECT_TRUE(byte.encodes_every_byte());
  EXPECT_THAT(encode(byte, "Az\xff"), ElementsAre(65, 122, 255));
}

TEST(Tokenizer, B093_AnyBytesComeBack) {
  const Tokenizer byte = Tokenizer::from_name("byte");
  const std::string letters = "\xcf\x95\xe2\x88\x80\xf0\x9f\xa7\xaa";  // U+03D5 U+2200 U+1F9EA
  std::string every;
  for (int i = 0; i < 256; ++i) every += static_cast<char>(i);
  for (const std::string& text : {letters, std::string("\xff\xfe\x80"), std::string(), std::string("a\0b", 3), every}) {
    const std::vector<int32_t> tokens = encode(byte, text);
    EXPECT_EQ(tokens.size(), text.size());
    EXPECT_EQ(byte.decode(tokens), text);

    std::string one_by_one;  // a character cut into its bytes must not turn into replacement marks
    for (int32_t token : tokens) one_by_one += byte.decode(std::span(&token, 1));
    EXPECT_EQ(one_by_one, text);
  }
}

TEST(Tokenizer, EndMarksDecodeToNothing) {
  const Tokenizer byte = Tokenizer::from_name("byte");
  EXPECT_EQ(byte.decode(std::vector<int32_t>{256, 'h', 'i', 256}), "hi");
}

TEST(Tokenizer, DnaReadsBothCasesAndMapsOtherLettersToN) {
  const Tokenizer dna = Tokenizer::from_name("dna");
  EXPECT_EQ(dna.vocab_size(), 6);
  EXPECT_EQ(dna.end_of_document(), 5);
  EXPECT_FALSE(dna.encodes_every_byte());
  EXPECT_THAT(encode(dna, "ACGTNacgtn"), ElementsAre(0, 1, 2, 3, 4, 0, 1, 2, 3, 4));
  EXPECT_THAT(encode(dna, "RyKmVu"), ElementsAre(4, 4, 4, 4, 4, 4));
  EXPECT_EQ(dna.decode(std::vector<int32_t>{0, 1, 2, 3, 4, 5}), "ACGTN");
}

TEST(Tokenizer, DnaRefusesWhatIsNoBase) {
  const Tokenizer dna = Tokenizer::from_name("dna");
  for (const char* text : {"ACE", "AC-", "AC\n", "AC*", "AC7"}) {
    const std::string message = test::message_of<DataError>([&] { encode(dna, text); });
    EXPECT_THAT(message, HasSubstr("offset 2"));
    EXPECT_THAT(message, HasSubstr("A C G T N"));
  }
}

TEST(Tokenizer, DecodeRefusesIdsOutsideTheVocabulary) {
  const Tokenizer byte = Tokenizer::from_name("byte");
  EXPECT_THAT(test::message_of<DataError>([&] {
                byte.decode(std::vector<int32_t>{65, 257});
              }),
              HasSubstr("token 1 has id 257"));
  EXPECT_THAT(test::message_of<DataError>([&] { byte.decode(std::vector<int32_t>{-1}); }), HasSubstr("id -1"));
}

TEST(Tokenizer, UnknownNameIsAConfigError) {
  EXPECT_THAT(test::message_of<ConfigError>([] { Tokenizer::from_name("folder/tokenizer.json"); }),
              HasSubstr("'folder/tokenizer.json'; this version has byte and dna"));
}

}  // namespace
}  // namespace farspan
