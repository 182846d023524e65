// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer.h"

#include "base/error.h"

namespace farspan {

Tokenizer Tokenizer::from_name(std::string_view name) {
  if (name == "byte") return byte();
  if (name == "dna") return dna();
  throw ConfigError(fmt::format("data.tokenizer: found '{}'; this version has byte and dna", name));
}

Tokenizer Tokenizer::byte() {
  Tokenizer t;
  t.name_ = "byte";
  t.alphabet_ = "every byte";
  for (int i = 0; i < 256; ++i) {
    t.ids_[static_cast<size_t>(i)] = i;
    t.bytes_[static_cast<size_t>(i)] = static_cast<char>(i);
  }
  t.end_of_document_ = 256;
  t.encodes_every_byte_ = true;
  return t;
}

Tokenizer Tokenizer::dna() {
  constexpr std::string_view kBases = "ACGTN";
  constexpr std::string_view kOtherLetters = "RYSWKMBDHVU";  // read as N
  constexpr int32_t kUnknownBase = 4;

  Tokenizer t;
  t.name_ = "dna";
  t.alphabet_ = "A C G T N and the other IUPAC letters";
  t.ids_.fill(kNoToken);
  const auto assign = [&t](char letter, int32_t id) {
    t.ids_[static_cast<uint8_t>(letter)] = id;
    t.ids_[static_cast<uint8_t>(letter - 'A' + 'a')] = id;
  };
  for (size_t i = 0; i < kBases.size(); ++i) {
    assign(kBases[i], static_cast<int32_t>(i));
    t.bytes_[i] = kBases[i];
  }
  for (char letter : kOtherLetters) assign(letter, kUnknownBase);
  t.end_of_document_ = static_cast<int32_t>(kBases.size());
  return t;
}

void Tokenizer::encode(std::span<const uint8_t> bytes, std::span<int32_t> tokens) const {
  FARSPAN_CHECK(bytes.size() == tokens.size(), "tokenizer: {} bytes into {} tokens", bytes.size(), tokens.size());
  int32_t all = 0;  // negative as soon as one byte has no token; keeps the loop free of branches
  for (size_t i = 0; i < bytes.size(); ++i) {
    tokens[i] = ids_[bytes[i]];
    all |= tokens[i];
  }
  if (all >= 0) return;
  for (size_t i = 0; i < bytes.size(); ++i)
    if (tokens[i] == kNoToken)
      throw DataError(fmt::format("tokenizer {}: byte 0x{:02x} at offset {} has no token; it reads {}", name_, bytes[i],
                                  i, alphabet_));
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  text.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int32_t id = tokens[i];
    if (id < 0 || id > end_of_document_)
      throw DataError(fmt::format("tokenizer {}: token {} has id {}; ids are 0 to {}", name_, i, id, end_of_document_));
    if (id != end_of_document_) text += bytes_[static_cast<size_t>(id)];
  }
  return text;
}

}  // namespace farspan
