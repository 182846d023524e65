// SPDX-License-Identifier: Apache-2.0
#include "io/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "io/file_map.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

namespace fs = std::filesystem;
using test::message_of;
using test::ScratchFolder;
using ::testing::HasSubstr;

int64_t files_in(const ScratchFolder& folder) {
  return std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator());
}

TEST(AtomicFile, AppearsOnlyWithCommit) {
  const ScratchFolder folder;
  {
    AtomicFile file(folder.path("a"));
    file.write("hello ");
    EXPECT_FALSE(fs::exists(folder.path("a")));
    file.write("world");
    EXPECT_EQ(file.written(), 11);
    file.commit();
    EXPECT_EQ(folder.read("a"), "hello world");
  }
  EXPECT_EQ(files_in(folder), 1);
}

TEST(AtomicFile, WithoutCommitTheOldFileStays) {
  const ScratchFolder folder;
  folder.write("a", "old");
  {
    AtomicFile file(folder.path("a"));
    file.write("new");
  }
  EXPECT_EQ(folder.read("a"), "old");
  EXPECT_EQ(files_in(folder), 1);
  write_file_atomically(folder.path("a"), "new");
  EXPECT_EQ(folder.read("a"), "new");
}

TEST(AtomicFile, AKilledWriterLeavesTheOldFile) {
  const ScratchFolder folder;
  folder.write("a", "old");
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile file(folder.path("a"));
    file.write("half");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(folder.read("a"), "old");
}

TEST(AtomicFile, TwoWritersOfOneNameDoNotMix) {
  const ScratchFolder folder;
  AtomicFile one(folder.path("a"));
  AtomicFile two(folder.path("a"));
  one.write("one");
  two.write("second");
  one.commit();
  EXPECT_EQ(folder.read("a"), "one");
  two.commit();
  EXPECT_EQ(folder.read("a"), "second");
}

TEST(AtomicFile, FailuresNameThePath) {
  const ScratchFolder folder;
  EXPECT_THAT(message_of<DataError>([&] { AtomicFile file(folder.path("none/a")); }),
              HasSubstr("cannot create '" + folder.path("none/a") + "'"));
  fs::create_directory(folder.path("folder"));
  fs::create_directory(folder.path("folder/inside"));
  EXPECT_THAT(message_of<DataError>([&] { write_file_atomically(folder.path("folder"), "x"); }),
              HasSubstr("cannot rename '" + folder.path("folder") + "' after 1 bytes"));
  EXPECT_EQ(files_in(folder), 1);
}

// A file-size limit stands in for a full disk: both make write() fail.
TEST(AtomicFile, AFullDiskIsADataError) {
  const ScratchFolder folder;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message =
      message_of<DataError>([&] { write_file_atomically(folder.path("a"), std::string(5000, 'x')); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(message, HasSubstr("cannot write '" + folder.path("a") + "' after 1000 bytes"));
  EXPECT_EQ(files_in(folder), 0);
}

TEST(FileMap, ShowsTheBytes) {
  const ScratchFolder folder;
  FileMap map(folder.write("a", "bytes"));
  EXPECT_EQ(std::string(map.bytes().begin(), map.bytes().end()), "bytes");
  FileMap moved(std::move(map));
  EXPECT_EQ(moved.size(), 5);
  moved = FileMap(folder.write("empty", ""));
  EXPECT_EQ(moved.size(), 0);
  EXPECT_TRUE(moved.bytes().empty());
}

TEST(FileMap, RefusesWhatIsNoFile) {
  const ScratchFolder folder;
  EXPECT_THAT(message_of<DataError>([&] { FileMap map(folder.path("none")); }), HasSubstr(folder.path("none")));
  EXPECT_THAT(message_of<DataError>([&] { FileMap map(folder.path()); }), HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace farspan
