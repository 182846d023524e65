// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <gtest/gtest.h>
#include <thread>
#include <vector>

#include "base/nearest_name.h"

namespace farspan {
namespace {

int64_t count(const std::string& text, const std::string& piece) {
  int64_t found = 0;
  for (size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++found;
  return found;
}

// Four thread ranks that all log the same ten steps, one fallback each, and an error on rank 2.
std::string log_of_four_ranks() {
  testing::internal::CaptureStderr();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank] {
      const LogRank speaker(rank);
      for (int step = 1; step <= 10; ++step) {
        log_info("step {} loss 1.5", step);
        warn_once("slow path", "no fast path for this shape");
      }
      if (rank == 2) log_error("read past\nthe end");
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return testing::internal::GetCapturedStderr();
}

TEST(Log, B117_OneLinePerStepOneWarningAndErrorsOfAnyRank) {
  const std::string lines = log_of_four_ranks();
  EXPECT_EQ(count(lines, "loss 1.5"), 10) << lines;
  EXPECT_EQ(count(lines, "no fast path"), 1) << lines;
  EXPECT_EQ(count(lines, "farspan: error: rank 2: read past the end\n"), 1) << lines;
  EXPECT_EQ(count(lines, "\n"), 12) << lines;
}

TEST(Log, WarningsOfOtherRanksSayTheirNumber) {
  testing::internal::CaptureStderr();
  log_warning("outside");
  {
    const LogRank zero(0);
    log_warning("first");
    const LogRank three(3);
    log_warning("fourth");
  }
  log_error("outside too");
  EXPECT_EQ(
      testing::internal::GetCapturedStderr(),
      "farspan: warning: outside\nfarspan: warning: first\nfarspan: warning: rank 3: fourth\nfarspan: error: outside "
      "too\n");
}

TEST(Log, LevelDropsLessImportantLines) {
  testing::internal::CaptureStderr();
  set_log_level(LogLevel::warning);
  log_info("a");
  log_warning("b");
  set_log_level(LogLevel::debug);
  const LogRank one(1);
  log_info("c");
  set_log_level(LogLevel::info);
  log_debug("d");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "farspan: warning: b\nfarspan: rank 1: c\n");
}

TEST(NearestName, EditDistance) {
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("trian", "train"), 1);  // a swap of neighbours
  EXPECT_EQ(edit_distance("num-layers", "Num_Layers"), 0);
  EXPECT_EQ(edit_distance("lr", "lr"), 0);
}

TEST(NearestName, SuggestsOnlyWhatIsNear) {
  const std::vector<std::string> known = {"train", "plan", "groups"};
  EXPECT_EQ(nearest_name("trian", known), "train");
  EXPECT_EQ(nearest_name("group", known), "groups");
  EXPECT_EQ(nearest_name("xyzzy", known), "");
  EXPECT_EQ(nearest_name("anything", {}), "");
  EXPECT_EQ(did_you_mean("plam", known), "; did you mean plan?");
  EXPECT_EQ(did_you_mean("xyzzy", known), "");
}

}  // namespace
}  // namespace farspan
