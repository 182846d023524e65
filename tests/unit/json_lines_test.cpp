// SPDX-License-Identifier: Apache-2.0
#include "io/json_lines.h"

#include <cmath>
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>

#include "base/error.h"
#include "io/json_text.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using test::message_of;
using test::ScratchFolder;
using ::testing::HasSubstr;

TEST(JsonLines, FieldsComeInOrderOneObjectALine) {
  const ScratchFolder folder;
  JsonLinesWriter writer(folder.path("m"), JsonLinesWriter::Mode::replace);
  writer.write({{"kind", "train"},
                {"step", 1},
                {"loss", 0.1},
                {"skipped", false},
                {"mfu", nullptr},
                {"bytes", std::vector<int64_t>{1, int64_t{1} << 40}}});
  EXPECT_EQ(folder.read("m"),
            "{\"kind\":\"train\",\"step\":1,\"loss\":0.10000000000000001,\"skipped\":false,\"mfu\":null,"
            "\"bytes\":[1,1099511627776]}\n");  // there before the writer is gone
  writer.write({{"a", std::vector<int64_t>{}}});
  writer.write({});
  EXPECT_THAT(folder.read("m"), HasSubstr("}\n{\"a\":[]}\n{}\n"));
}

TEST(JsonLines, DoublesComeBackExactly) {
  for (double x : {0.1, 1.0 / 3, 6.02214076e23, 5e-324, std::numeric_limits<double>::max(), -0.0, 1e16 + 2}) {
    const std::string text = json_number(x);
    EXPECT_EQ(std::strtod(text.c_str(), nullptr), x) << text;
    EXPECT_EQ(std::signbit(std::strtod(text.c_str(), nullptr)), std::signbit(x));
  }
  for (double x : std::vector<double>{NAN, INFINITY, -INFINITY}) EXPECT_EQ(json_number(x), "null");
}

TEST(JsonLines, StringsAreEscaped) {
  EXPECT_EQ(json_string("a\"b\\c\n\x01\x7f"), "\"a\\\"b\\\\c\\n\\u0001\x7f\"");
  EXPECT_EQ(json_string("caf\xc3\xa9 \xe2\x88\x80 \xf0\x9f\xa7\xaa"), "\"caf\xc3\xa9 \xe2\x88\x80 \xf0\x9f\xa7\xaa\"");
  EXPECT_EQ(json_string("\xff|\xc3|\xc0\xaf|\xed\xa0\x80"), "\"\\ufffd|\\ufffd|\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd\"");
}

TEST(JsonLines, AppendGoesOnBehindTheLastWholeLine) {
  const ScratchFolder folder;
  const std::string path =
      folder.write("m", "{\"a\":1}\n{\"a\":2}\n" + std::string(10000, 'x'));  // killed while writing
  JsonLinesWriter(path, JsonLinesWriter::Mode::append).write({{"a", 3}});
  EXPECT_EQ(folder.read("m"), "{\"a\":1}\n{\"a\":2}\n{\"a\":3}\n");
  JsonLinesWriter(path, JsonLinesWriter::Mode::append).write({{"a", 4}});
  EXPECT_EQ(folder.read("m"), "{\"a\":1}\n{\"a\":2}\n{\"a\":3}\n{\"a\":4}\n");
  JsonLinesWriter(folder.write("half", "{\"a\""), JsonLinesWriter::Mode::append).write({{"a", 5}});
  EXPECT_EQ(folder.read("half"), "{\"a\":5}\n");
  JsonLinesWriter(path, JsonLinesWriter::Mode::replace).write({{"a", 6}});
  EXPECT_EQ(folder.read("m"), "{\"a\":6}\n");
}

TEST(JsonLines, AFullDiskIsADataErrorWithThePath) {
  JsonLinesWriter writer("/dev/full", JsonLinesWriter::Mode::append);
  const std::string message = message_of<DataError>([&] { writer.write({{"a", 1}}); });
  EXPECT_THAT(message, HasSubstr("'/dev/full'"));
  EXPECT_THAT(message, HasSubstr("No space left"));
  EXPECT_THAT(message_of<DataError>([] { JsonLinesWriter("/none/m", JsonLinesWriter::Mode::append); }),
              HasSubstr("/none/m"));
}

}  // namespace
}  // namespace farspan
