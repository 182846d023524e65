// SPDX-License-Identifier: Apache-2.0
// The collectives' cases (tests/ranks/communicator_cases.h) among processes: every process that mpirun starts runs the
// same tests in the same order. Only the first prints, unless something fails.
#include "comm/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "comm/mpi/mpi_world.h"
#include "device/device.h"
#include "tests/ranks/communicator_cases.h"

namespace farspan {
namespace {

std::unique_ptr<Processes> processes;

}  // namespace

void run_world(int size, const RankBody& body) {
  constexpr double kTimeout = 30;
  if (size > processes->size()) GTEST_SKIP() << "needs " << size << " processes";
  run_process_rank(*processes, kTimeout, [&](int rank, World& world) {
    if (rank < size) body(rank, world);
  });
}

int largest_world() { return processes->size(); }

namespace {

// Several pieces of 16 MiB that are received into place, and many of the staging memory's: cut and put together right.
TEST(MpiCommunicator, TensorsLargerThanAPiece) {
  constexpr int64_t kElements = 9'000'011;  // 36 MB
  run_group(2, [](Communicator& group) {
    std::vector<float> data = values<float>(group.rank(), kElements);
    std::vector<float> gathered(2 * kElements);
    group.all_gather(view(data), view(gathered), "gather").wait();
    const std::vector<float> other = values<float>(1 - group.rank(), kElements);
    const auto half = gathered.begin() + kElements;
    EXPECT_TRUE(std::equal(data.begin(), data.end(), group.rank() == 0 ? gathered.begin() : half));
    EXPECT_TRUE(std::equal(other.begin(), other.end(), group.rank() == 0 ? half : gathered.begin()));
    group.all_reduce(view(data), "sum").wait();
    EXPECT_TRUE(same_bits(data, sum_of_ranks<float>(2, kElements)));
  });
}

// A rank that waits in one group lets its calls of other groups go on, sums through the staging memory among them.
TEST(MpiCommunicator, SumsOfSeveralGroupsAtOnce) {
  const Grid grid({.tp = 2, .cp = 2}, "tp-cp-dp-pp");
  run_world(4, [&](int rank, World& world) {
    const auto tp = world.group(rank, grid.group_of(rank, Dimension::tp), Dimension::tp);
    const auto cp = world.group(rank, grid.group_of(rank, Dimension::cp), Dimension::cp);
    std::vector<float> a(1'500'000, 1), b(1'400'000, 2), c(10, 3);
    Work first = tp->all_reduce(view(a), "a");
    Work second = cp->all_reduce(view(b), "b");
    Work third = tp->all_reduce(view(c), "c");
    // Each half of the ranks waits in another order.
    Work* order[] = {&first, &second, &third};
    if (rank % 2 == 1) std::swap(order[0], order[1]);
    for (Work* work : order) work->wait();
    EXPECT_EQ(a, std::vector<float>(a.size(), 2));
    EXPECT_EQ(b, std::vector<float>(b.size(), 4));
    EXPECT_EQ(c, std::vector<float>(10, 6));
  });
}

TEST(MpiCommunicator, ReportTellsOfEveryProcess) {
  run_world(largest_world(), [](int rank, World& world) {
    const auto group = world.group(rank, all_ranks(world.size()), Dimension::cp);
    world.set_position(rank, fmt::format("step 3, layer {}", rank));
    group->barrier("start");
    if (rank == 0) {
      const std::string report = world.report();
      for (int each = 0; each < world.size(); ++each) {
        EXPECT_NE(report.find(fmt::format("rank {} at step 3, layer {}\n", each, each)), std::string::npos) << report;
        EXPECT_NE(report.find(fmt::format("posted at step 3, layer {}\n", each)), std::string::npos) << report;
      }
    }
    group->barrier("end");
  });
}

TEST(MpiCommunicator, RanksOfAHostShareItsProcessors) {
  EXPECT_EQ(static_cast<int>(processes->ranks_of_this_host().size()), processes->size());
  const int64_t together = int64_t{processes->threads()} * processes->size();
  EXPECT_LE(together, std::max(usable_cores(), processes->size()));
  EXPECT_GE(processes->threads(), 1);
}

// What ranks above 0 say.
class FailurePrinter final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fmt::print(stderr, "rank {}: {}:{}: {}\n", processes->rank(), result.file_name() ? result.file_name() : "",
               result.line_number(), result.message());
  }
};

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  farspan::processes = std::make_unique<farspan::Processes>("mpirun", size == nullptr ? 1 : std::atoi(size));
  testing::InitGoogleTest(&argc, argv);
  if (farspan::processes->rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_xml_generator());
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new farspan::FailurePrinter);
  }
  const int status = RUN_ALL_TESTS();
  if (farspan::processes->failed() || farspan::processes->mpi().abandoned()) std::_Exit(1);
  farspan::processes->finish();
  farspan::processes.reset();
  return status;
}
