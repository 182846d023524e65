// SPDX-License-Identifier: Apache-2.0
// Tokenizers that give each byte of text one token and close each document with one more. Token offsets inside a
// document are therefore byte offsets, which is what lets a rank read only the tokens it owns.
//
//   byte  ids 0..255 are the bytes themselves, 256 ends a document
//   dna   A C G T N are 0..4 in either case, every other IUPAC letter reads as N, 5 ends a document
//
// IUPAC letters: Cornish-Bowden, "Nomenclature for incompletely specified bases in nucleic acid sequences", Nucleic
// Acids Research 13 (1985), table 1.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace farspan {

class Tokenizer {
 public:
  static constexpr int32_t kNoToken = -1;

  // `name` is "byte" or "dna"; throws ConfigError for anything else.
  static Tokenizer from_name(std::string_view name);

  std::string_view name() const { return name_; }
  int64_t vocab_size() const { return end_of_document_ + 1; }
  int32_t end_of_document() const { return end_of_document_; }
  bool encodes_every_byte() const { return encodes_every_byte_; }
  std::string_view alphabet() const { return alphabet_; }  // what it reads, for messages

  // The token of one byte, kNoToken where there is none.
  int32_t encode(uint8_t byte) const { return ids_[byte]; }

  // tokens[i] of bytes[i]; no end mark. Throws DataError for a byte without a token.
  void encode(std::span<const uint8_t> bytes, std::span<int32_t> tokens) const;

  // Bytes of the tokens; end marks read as nothing. Any byte string comes back from byte ids unchanged. Throws
  // DataError for an id outside the vocabulary.
  std::string decode(std::span<const int32_t> tokens) const;

 private:
  Tokenizer() = default;
  static Tokenizer byte();
  static Tokenizer dna();

  std::string_view name_;
  std::string_view alphabet_;
  std::array<int32_t, 256> ids_{};
  std::array<char, 256> bytes_{};  // of each id below end_of_document_
  int32_t end_of_document_ = 0;
  bool encodes_every_byte_ = false;
};

}  // namespace farspan
