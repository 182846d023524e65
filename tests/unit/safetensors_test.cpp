// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <sys/resource.h>

#include "base/error.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using test::message_of;
using test::ScratchFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string with_length(const std::string& header, int64_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  file += header;
  for (int64_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i);
  return file;
}

struct F32 {
  std::string name, shape, offsets;
};

std::string header_of(const std::vector<F32>& tensors) {
  std::string json;
  for (const F32& t : tensors)
    json += fmt::format(R"({}"{}":{{"dtype":"F32","shape":{},"data_offsets":{}}})", json.empty() ? "" : ",", t.name,
                        t.shape, t.offsets);
  return "{" + json + "}";
}

std::string refusal(const std::string& content) {
  const ScratchFolder folder;
  const std::string path = folder.write("x.safetensors", content);
  const std::string message = message_of<DataError>([&] { SafetensorsFile::open(path); });
  EXPECT_THAT(message, HasSubstr("'" + path + "'"));
  const size_t at = message.find(path);
  return at == std::string::npos ? message : message.substr(at + path.size() + 1);  // what follows the path
}

void expect_accepted(const std::string& content) {
  const ScratchFolder folder;
  EXPECT_NO_THROW(SafetensorsFile::open(folder.write("x", content))) << content;
}

TEST(Safetensors, WhatIsWrittenComesBack) {
  const ScratchFolder folder;
  const std::string path = folder.path("x.safetensors");
  const std::vector<float> weights = {1, 2, 3, 4, 5, 6};
  const std::vector<uint16_t> halves = {0x3f80, 0x4000};
  const int64_t step = int64_t{1} << 40;
  {
    SafetensorsWriter writer(path, {{"format", "pt"}, {"quote", "a\"b\n"}});
    writer.declare("weights", DType::f32, {2, 3});
    writer.declare("none", DType::f64, {2, 0, 3});
    writer.declare("caf\xc3\xa9 \"q\"", DType::bf16, {2});
    writer.declare("step", DType::i64, {});
    writer.declare("bytes", DType::u8, {3});
    writer.write("weights", std::as_bytes(std::span(weights).first(1)));  // in two pieces
    writer.write("weights", std::as_bytes(std::span(weights).subspan(1)));
    writer.write("none", {});
    writer.write("caf\xc3\xa9 \"q\"", std::as_bytes(std::span(halves)));
    writer.write("step", std::as_bytes(std::span(&step, 1)));
    EXPECT_FALSE(std::filesystem::exists(path));
    writer.write("bytes", std::as_bytes(std::span("abc", 3)));
    writer.finish();
  }
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("format", "pt"), Pair("quote", "a\"b\n")));
  ASSERT_EQ(file.entries().size(), 5u);
  const TensorEntry* entry = file.find("weights");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->dtype, DType::f32);
  EXPECT_EQ(entry->shape, (Shape{2, 3}));
  ASSERT_EQ(file.data(*entry).size(), 24u);
  EXPECT_EQ(std::memcmp(file.data(*entry).data(), weights.data(), 24), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.data(*entry).data()) % 8, 0u);
  EXPECT_EQ(file.find("step")->shape, Shape{});
  EXPECT_EQ(std::memcmp(file.data(*file.find("step")).data(), &step, 8), 0);
  EXPECT_EQ(std::memcmp(file.data(*file.find("caf\xc3\xa9 \"q\"")).data(), halves.data(), 4), 0);
  EXPECT_EQ(file.find("none")->shape, (Shape{2, 0, 3}));
  EXPECT_TRUE(file.data(*file.find("none")).empty());
  EXPECT_EQ(file.find("other"), nullptr);
}

TEST(Safetensors, WriterKeepsToWhatWasDeclared) {
  const ScratchFolder folder;
  const std::vector<float> two = {1, 2};
  const auto bytes = std::as_bytes(std::span(two));
  {
    SafetensorsWriter writer(folder.path("x"));
    writer.declare("a", DType::f32, {2});
    EXPECT_THAT(message_of<DataError>([&] { writer.declare("a", DType::f32, {2}); }),
                HasSubstr("'a' is declared twice"));
    writer.declare("b", DType::f32, {1});
    EXPECT_THROW(writer.write("b", bytes), InternalError);  // a is due
    writer.write("a", bytes);
    EXPECT_THROW(writer.write("b", bytes), InternalError);  // too many
    EXPECT_THROW(writer.finish(), InternalError);           // b is missing
    EXPECT_THROW(writer.declare("c", DType::f32, {1}), InternalError);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));

  SafetensorsWriter(folder.path("empty")).finish();
  EXPECT_TRUE(SafetensorsFile::open(folder.path("empty")).entries().empty());
}

TEST(Safetensors, B099_DuplicateNames) {
  const std::string header = header_of({{"a", "[2]", "[0,8]"}, {"a", "[2]", "[8,16]"}});
  EXPECT_EQ(header.size(), 108u);
  EXPECT_THAT(refusal(with_length(header, 16)), HasSubstr("duplicate name a"));
  EXPECT_THAT(refusal(with_length(R"({"__metadata__":{"k":"1","k":"2"}})", 0)),
              HasSubstr("__metadata__ gives 'k' twice"));
  EXPECT_THAT(refusal(with_length(R"({"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1)),
              HasSubstr("tensor 'a' gives 'dtype' twice"));
}

TEST(Safetensors, B100_EveryBrokenHeaderHasItsOwnMessage) {
  std::string length_1000(100, ' ');
  const uint64_t thousand = 1000;
  std::memcpy(length_1000.data(), &thousand, 8);
  const std::string valid = with_length(header_of({{"a", "[2]", "[0,8]"}}), 8);
  expect_accepted(valid);

  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "is empty; a safetensors file needs at least 10 bytes"},
      {"abcd", "has 4 bytes; the header's length alone needs 8"},
      {std::string(8, '\0'), "the header has 0 bytes, needs at least 2"},
      {std::string(8, '\xff'), "its first 8 bytes say a header of 18446744073709551615 bytes"},
      {length_1000, "is cut short inside its header: found 100 bytes, needs at least 1008"},
      {"version https://git-lfs.github.com/spec/v1\n", "begins with the text \"version \""},
      {with_length("[1,2]", 0), "the header is an array, needs an object"},
      {with_length("{\"a\":", 0), "not JSON at byte "},
      {with_length("{} x", 0), "after '{} x'"},
      {valid.substr(0, valid.size() - 1), "tensor 'a' ends at data byte 8, but the file holds 7"}};
  std::set<std::string> messages;
  for (const auto& [content, expected] : cases) {
    const std::string message = refusal(content);
    EXPECT_THAT(message, HasSubstr(expected));
    messages.insert(message);
  }
  EXPECT_EQ(messages.size(), cases.size());
}

// A header may say any length; nothing of that size is ever asked for.
TEST(Safetensors, B100_AHostileLengthAllocatesNothing) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // both reserve terabytes
  const rlimit two_gib{rlim_t{1} << 31, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &two_gib), 0);
#endif
  for (uint64_t length : {uint64_t{1} << 33, uint64_t{1} << 62, (uint64_t{1} << 63) - 8, uint64_t{1} << 63}) {
    std::string file(64, ' ');
    std::memcpy(file.data(), &length, 8);
    EXPECT_THAT(refusal(file), HasSubstr(fmt::format("{}", length < (uint64_t{1} << 63) - 8 ? length + 8 : length)));
  }
  ::setrlimit(RLIMIT_AS, &before);
}

TEST(Safetensors, B100_LargeHeadersAreRead) {
  std::vector<F32> tensors;
  for (int64_t i = 0; i < 20000; ++i)
    tensors.push_back({fmt::format("layer.{}.weight", i), "[1]", fmt::format("[{},{}]", 4 * i, 4 * i + 4)});
  const ScratchFolder folder;
  const SafetensorsFile file = SafetensorsFile::open(folder.write("x", with_length(header_of(tensors), 80000)));
  EXPECT_EQ(file.find("layer.19999.weight")->begin, 79996);
}

TEST(Safetensors, B101_EveryByteHasOneOwner) {
  const auto two = [](const std::string& a, const std::string& b, int64_t bytes) {
    return with_length(header_of({{"a", "[2]", a}, {"b", "[2]", b}}), bytes);
  };
  EXPECT_THAT(refusal(two("[0,8]", "[0,8]", 8)), HasSubstr("'a' and 'b' share data bytes [0, 8)"));
  EXPECT_THAT(refusal(two("[0,8]", "[4,12]", 12)), HasSubstr("'a' and 'b' share data bytes [4, 8)"));
  EXPECT_THAT(refusal(two("[0,8]", "[12,20]", 20)),
              HasSubstr("data bytes [8, 12) before tensor 'b' belong to no tensor"));
  EXPECT_THAT(refusal(two("[8,0]", "[0,8]", 16)), HasSubstr("tensor 'a' has data_offsets [8, 0], needs begin <= end"));
  EXPECT_THAT(refusal(two("[0,8]", "[8,16]", 12)), HasSubstr("tensor 'b' ends at data byte 16, but the file holds 12"));
  EXPECT_THAT(refusal(two("[0,8]", "[8,16]", 20)),
              HasSubstr("the last 4 data bytes belong to no tensor; found 20, needs 16"));
  EXPECT_THAT(refusal(with_length(header_of({{"a", "[4294967296,4294967296,4]", "[0,8]"}}), 8)),
              HasSubstr("do not fit in 64 bits"));
  EXPECT_THAT(refusal(with_length(header_of({{"a", "[2]", "[0,8]"}, {"e", "[0]", "[4,4]"}}), 8)),
              HasSubstr("empty tensor 'e' lies at data byte 4, inside tensor 'a' [0, 8)"));

  expect_accepted(two("[8,16]", "[0,8]", 16));  // unsorted but exact
  const ScratchFolder folder;
  const SafetensorsFile file = SafetensorsFile::open(folder.write("x", two("[8,16]", "[0,8]", 16)));
  EXPECT_EQ(static_cast<int>(file.data(*file.find("a"))[0]), 8);
  EXPECT_EQ(file.entries()[0].name, "b");
}

TEST(Safetensors, B102_EmptyTensorsAndScalars) {
  const auto one = [](const std::string& shape, const std::string& offsets, int64_t bytes) {
    return with_length(header_of({{"a", shape, offsets}}), bytes);
  };
  expect_accepted(one("[0]", "[0,0]", 0));
  expect_accepted(one("[2,0,3]", "[0,0]", 0));
  EXPECT_THAT(refusal(one("[1]", "[0,0]", 0)), HasSubstr("has 0 bytes [0, 0), needs 4"));
  expect_accepted(one("[]", "[0,4]", 4));
  EXPECT_THAT(refusal(one("[]", "[0,0]", 0)), HasSubstr("has 0 bytes [0, 0), needs 4"));
  expect_accepted(with_length(header_of({{"a", "[1]", "[0,4]"}, {"e", "[0]", "[4,4]"}, {"f", "[0]", "[0,0]"}}), 4));
}

TEST(Safetensors, OtherFormsAreRefusedByName) {
  const auto tensor = [](const std::string& body) { return with_length("{\"a\":{" + body + "}}", 4); };
  const std::string rest = R"(,"shape":[1],"data_offsets":[0,4])";
  EXPECT_THAT(refusal(tensor("\"dtype\":\"F16\"" + rest)),
              HasSubstr("tensor 'a' has dtype F16; this version reads F32"));
  EXPECT_THAT(refusal(tensor("\"dtype\":3" + rest)), HasSubstr("dtype is a number, needs a string"));
  EXPECT_THAT(refusal(tensor("\"dtype\":\"F32\",\"more\":1" + rest)), HasSubstr("has key 'more'"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":[1])")), HasSubstr("has no data_offsets"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])")), HasSubstr("shape holds -1"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":[1.5],"data_offsets":[0,4])")), HasSubstr("shape holds 1.5"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])")),
              HasSubstr("shape holds a string"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])")),
              HasSubstr("shape holds an array"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])")),
              HasSubstr("numbers below 2^63"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])")),
              HasSubstr("3 data_offsets, needs 2"));
  EXPECT_THAT(refusal(tensor(R"("dtype":"F32","shape":[1,1,1,1,1,1,1],"data_offsets":[0,4])")),
              HasSubstr("7 dimensions"));
  EXPECT_THAT(refusal(with_length(R"({"a":7})", 0)), HasSubstr("tensor 'a' is a number, needs an object"));
  EXPECT_THAT(refusal(with_length(R"({"__metadata__":{"k":1}})", 0)),
              HasSubstr("__metadata__ 'k' is a number, needs a string"));
  // A name with a line break must not break the message.
  EXPECT_THAT(refusal(with_length(R"({"a\nb":7})", 0)), HasSubstr("a b"));
}

}  // namespace
}  // namespace farspan
