// SPDX-License-Identifier: Apache-2.0
// From paths to documents: which files are listed, and how text, gzip and FASTA read.
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include "base/error.h"
#include "data/documents.h"
#include "data/file_list.h"
#include "data/source_file.h"
#include "io/gzip.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

namespace fs = std::filesystem;
using test::message_of;
using test::ScratchFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> names(const FileList& list) {
  std::vector<std::string> out;
  for (const ListedFile& file : list.files) out.push_back(file.name.substr(file.name.find('/') + 1));
  return out;
}

FileList list(const std::vector<std::string>& paths) { return list_files(paths); }

std::string content(const Documents& documents, int64_t document) {
  std::string text(static_cast<size_t>(documents.size(document)), '\0');
  documents.read(document, 0, {reinterpret_cast<uint8_t*>(text.data()), text.size()});
  return text;
}

std::vector<std::string> contents(const Documents& documents) {
  std::vector<std::string> all;
  for (int64_t d = 0; d < documents.count(); ++d) all.push_back(content(documents, d));
  return all;
}

std::unique_ptr<const Documents> text(const std::vector<std::string>& paths) { return open_text(paths); }
std::unique_ptr<const Documents> fasta(const std::vector<std::string>& paths) { return open_fasta(paths); }

std::string gzip(const std::string& plain) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, static_cast<uLong>(plain.size())), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(plain.data()));
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

TEST(FileList, FoldersAreWalkedInSortedOrder) {
  const ScratchFolder folder;
  for (const char* name : {"b", "a/z", "a/c/1", "c", "B"}) folder.write(name, "x");
  folder.write(".hidden", "x");
  folder.write(".git/config", "x");
  fs::create_directory(folder.path("empty"));
  EXPECT_THAT(names(list({folder.path()})), ElementsAre("B", "a/c/1", "a/z", "b", "c"));
  EXPECT_THAT(list({folder.path() + "/"}).files[0].path, HasSubstr("B"));
  EXPECT_EQ(list({folder.path() + "/"}).files[0].name, list({folder.path()}).files[0].name);
}

TEST(FileList, LinksToListedFilesCountOnce) {
  const ScratchFolder folder;
  const ScratchFolder elsewhere;
  folder.write("GPL-3", "three");
  fs::create_symlink("GPL-3", folder.path("GPL"));  // sorts before its target
  fs::create_symlink("GPL", folder.path("Z"));
  elsewhere.write("far", "far");
  fs::create_symlink(elsewhere.path("far"), folder.path("near"));
  fs::create_symlink(elsewhere.path("far"), folder.path("near2"));
  EXPECT_THAT(names(list({folder.path()})), ElementsAre("GPL-3", "near"));
}

TEST(FileList, LinkedFoldersAreWalkedOnce) {
  const ScratchFolder folder;
  folder.write("b/1", "x");
  fs::create_directory_symlink(folder.path("b"), folder.path("a"));
  fs::create_directory_symlink(folder.path(), folder.path("b/loop"));
  EXPECT_THAT(names(list({folder.path()})), ElementsAre("b/1"));
}

TEST(FileList, ListsKeepTheirOrderAndNameDuplicates) {
  const ScratchFolder folder;
  const std::string a = folder.write("d/a", "x");
  const std::string b = folder.write("d/b", "x");
  const FileList found = list({b, a, folder.path("d"), b});
  ASSERT_EQ(found.files.size(), 2u);
  EXPECT_EQ(found.files[0].path, b);
  EXPECT_EQ(found.files[0].name, "b");
  EXPECT_FALSE(found.files[0].in_folder);
  EXPECT_THAT(found.notes, ElementsAre(HasSubstr(folder.path("d")), HasSubstr(b)));
}

TEST(FileList, B088_NothingToReadIsAnError) {
  const ScratchFolder folder;
  fs::create_directory(folder.path("empty"));
  folder.write("hidden/.a", "x");
  fs::create_directory(folder.path("broken"));
  fs::create_symlink("nowhere", folder.path("broken/link"));
  EXPECT_THAT(message_of<DataError>([&] { list({folder.path("none")}); }),
              HasSubstr("'" + folder.path("none") + "' does not exist"));
  EXPECT_THAT(message_of<DataError>([&] { list({folder.path("empty")}); }),
              HasSubstr("'" + folder.path("empty") + "' holds no file"));
  EXPECT_THAT(message_of<DataError>([&] { list({folder.path("hidden")}); }), HasSubstr("holds no file"));
  EXPECT_THAT(message_of<DataError>([&] { list({folder.path("broken")}); }), HasSubstr("leads nowhere"));
  EXPECT_THAT(message_of<DataError>([&] { list({}); }), HasSubstr("data.path is empty"));
  EXPECT_THAT(message_of<DataError>([&] { list({""}); }), HasSubstr("empty name"));
  EXPECT_THAT(message_of<DataError>([&] { list({"/dev/null"}); }), HasSubstr("neither a file nor a folder"));
}

// Root may read everything, so it becomes another user for the moment.
class OrdinaryUser {
 public:
  OrdinaryUser() : before_(::geteuid()) {
    if (before_ == 0) {
      EXPECT_EQ(::seteuid(65534), 0);
    }
  }
  ~OrdinaryUser() { EXPECT_EQ(::seteuid(before_), 0); }

 private:
  uid_t before_;
};

TEST(FileList, UnreadableThingsAreNamed) {
  const ScratchFolder folder;
  using enum fs::perms;
  fs::permissions(folder.path(), group_read | group_exec | others_read | others_exec, fs::perm_options::add);
  const std::string file = folder.write("a", "x");
  fs::create_directory(folder.path("closed"));
  fs::permissions(file, fs::perms::none);
  fs::permissions(folder.path("closed"), fs::perms::none);
  {
    const OrdinaryUser user;
    EXPECT_THAT(message_of<DataError>([&] { text({file}); }), HasSubstr("cannot read '" + file));
    EXPECT_THAT(message_of<DataError>([&] { list({folder.path()}); }), HasSubstr("closed': Permission denied"));
  }
  fs::permissions(folder.path("closed"), fs::perms::owner_all);
}

TEST(TextFiles, EveryFileIsADocument) {
  const ScratchFolder folder;
  folder.write("1", "first");
  folder.write("2", "");
  folder.write("3", "caf\xc3\xa9\n");
  const auto documents = text({folder.path()});
  EXPECT_THAT(contents(*documents), ElementsAre("first", "", "caf\xc3\xa9\n"));
  EXPECT_EQ(documents->name(1), folder.path("2"));
  std::vector<uint8_t> part(3);
  documents->read(0, 2, part);
  EXPECT_THAT(part, ElementsAre('r', 's', 't'));
  EXPECT_THAT(documents->notes(), IsEmpty());
}

TEST(TextFiles, BinaryFilesInAFolderArePassedOverInOneLine) {
  const ScratchFolder folder;
  const std::string binary(
      std::string("\x7f"
                  "ELF\0",
                  5));
  folder.write("a", binary);
  folder.write("b", "text");
  folder.write("c", std::string(8191, 'x') + '\0');
  folder.write("d", std::string(8192, 'x') + '\0');  // later zeros are not looked for
  const auto documents = text({folder.path()});
  ASSERT_EQ(documents->count(), 2);
  EXPECT_EQ(content(*documents, 0), "text");
  EXPECT_THAT(documents->notes(), ElementsAre(HasSubstr("2 files passed over")));
  EXPECT_THAT(documents->notes()[0], HasSubstr(folder.path("a")));

  EXPECT_EQ(content(*text({folder.path("a")}), 0), binary);  // named itself, it is wanted
  const ScratchFolder only;
  only.write("a", binary);
  EXPECT_THAT(message_of<DataError>([&] { text({only.path()}); }), HasSubstr("holds no text"));
}

TEST(TextFiles, GzipReadsDecompressed) {
  const ScratchFolder folder;
  folder.write("a.gz", gzip("hello ") + gzip("world"));  // two members, as cat makes them
  folder.write("b.gz", gzip("padded") + std::string(100, '\0'));
  folder.write("c.gz", gzip(""));
  const auto documents = text({folder.path()});
  EXPECT_THAT(contents(*documents), ElementsAre("hello world", "padded", ""));

  std::string large;  // several pieces of output
  for (int i = 0; i < 400000; ++i) large += std::to_string(i);
  folder.write("large.gz", gzip(large));
  const std::vector<uint8_t> back = read_gzip(folder.path("large.gz"));
  EXPECT_EQ(std::string(back.begin(), back.end()), large);
}

TEST(TextFiles, BrokenGzipNamesPathAndByte) {
  const ScratchFolder folder;
  const std::string whole = gzip("some text that is long enough to be cut somewhere in its middle");
  const auto refusal = [&](const std::string& bytes) {
    const std::string path = folder.write("x.gz", bytes);
    const std::string message = message_of<DataError>([&] { read_gzip(path); });
    EXPECT_THAT(message, HasSubstr("'" + path + "'"));
    return message;
  };
  for (size_t kept : {size_t{0}, size_t{1}, size_t{12}, whole.size() - 9, whole.size() - 1})
    EXPECT_THAT(refusal(whole.substr(0, kept)), HasSubstr(fmt::format("cut short: its {} bytes", kept)));
  std::string wrong_crc = whole;
  wrong_crc[whole.size() - 6] = static_cast<char>(wrong_crc[whole.size() - 6] ^ 1);
  EXPECT_THAT(refusal(wrong_crc), HasSubstr(fmt::format("corrupt at byte {} of {}", whole.size() - 4, whole.size())));
  EXPECT_THAT(refusal("plain text, though named .gz"), HasSubstr("corrupt at byte "));
  EXPECT_THAT(refusal(whole + "tail"), HasSubstr("corrupt at byte "));
  EXPECT_THAT(refusal(whole + std::string(5, '\0') + "tail"),
              HasSubstr(fmt::format("corrupt at byte {} of {}", whole.size() + 5, whole.size() + 9)));
}

TEST(TextFiles, FilesThatChangeAreNoticed) {
  const ScratchFolder folder;
  const std::string path = folder.write("a", "0123456789");
  const auto documents = text({path});
  std::vector<uint8_t> part(4);
  EXPECT_NO_THROW(documents->read(0, 6, part));
  folder.write("a", "0123");
  EXPECT_THAT(message_of<DataError>([&] { documents->read(0, 6, part); }), HasSubstr("10 bytes then, 4 now"));
  folder.write("b", "9876543210");
  fs::rename(folder.path("b"), path);  // as long as before, but another file
  EXPECT_THAT(message_of<DataError>([&] { documents->read(0, 6, part); }), HasSubstr("has changed"));
  fs::remove(path);
  EXPECT_THAT(message_of<DataError>([&] { documents->read(0, 6, part); }), HasSubstr("No such file"));
}

TEST(TextFiles, PlaceCountsLines) {
  const ScratchFolder folder;
  const auto documents = text({folder.write("a", "one\ntwo\nthree")});
  EXPECT_EQ(documents->place(0, 0), folder.path("a") + " line 1, byte 0 of the file");
  EXPECT_EQ(documents->place(0, 8), folder.path("a") + " line 3, byte 8 of the file");
}

TEST(Fasta, RecordsAreDocuments) {
  const ScratchFolder folder;
  folder.write("1.fa", ">chr1 description\nACGT\nACGT\nAC\n>empty\n>chr2\nnnnn\n");
  folder.write("2.fa.gz", gzip(">one line\nGATTACA"));
  const auto documents = fasta({folder.path()});
  EXPECT_THAT(contents(*documents), ElementsAre("ACGTACGTAC", "", "nnnn", "GATTACA"));
  EXPECT_EQ(documents->name(2), folder.path("1.fa") + " record 3");
  EXPECT_EQ(documents->name(3), folder.path("2.fa.gz") + " record 1");
  EXPECT_EQ(documents->place(0, 9), folder.path("1.fa") + " line 4, byte 29 of the file");
  EXPECT_EQ(documents->place(2, 1), folder.path("1.fa") + " line 7, byte 45 of the file");
}

TEST(Fasta, AnyPartOfAnyLayoutOfLines) {
  const ScratchFolder folder;
  // Equal lines; unequal lines; blank lines; carriage returns; no line end at the end; a longer line after a shorter
  // one.
  const std::vector<std::pair<std::string, std::string>> cases = {
      {">\nACGT\nACGT\nACGT\n", "ACGTACGTACGT"},      {">x\nA\nCGT\nAC\nGGGG\nTTTT\nC\n", "ACGTACGGGGTTTTC"},
      {"\n>x\n\nACG\n\n\nTTT\nAAA\n\n", "ACGTTTAAA"}, {">x\r\nACGT\r\nACGT\r\nA\r\n", "ACGTACGTA"},
      {">x\nACGT\r\nACGT\nACGT", "ACGTACGTACGT"},     {">x\nAC\nACGT", "ACACGT"}};
  for (const auto& [file, bases] : cases) {
    const auto documents = fasta({folder.write("x.fa", file)});
    ASSERT_EQ(documents->count(), 1);
    ASSERT_EQ(documents->size(0), static_cast<int64_t>(bases.size()));
    for (size_t begin = 0; begin <= bases.size(); ++begin)
      for (size_t end = begin; end <= bases.size(); ++end) {
        std::string part(end - begin, '?');
        documents->read(0, static_cast<int64_t>(begin), {reinterpret_cast<uint8_t*>(part.data()), part.size()});
        EXPECT_EQ(part, bases.substr(begin, end - begin)) << testing::PrintToString(file);
      }
  }
}

TEST(Fasta, LinesMayCrossReadBlocks) {
  const ScratchFolder folder;
  std::string file = ">long\n";
  std::string bases;
  for (int line = 0; line < 40000; ++line) {
    std::string piece;
    for (int i = 0; i < 60; ++i) piece += "ACGT"[(line * 7 + i * 3) % 4];
    bases += piece;
    file += piece + "\n";
  }
  const auto documents = fasta({folder.write("x.fa", file + ">one\n" + bases + "\n")});
  ASSERT_EQ(documents->count(), 2);
  EXPECT_TRUE(content(*documents, 0) == bases);
  EXPECT_TRUE(content(*documents, 1) == bases);
}

TEST(Fasta, WhatIsNoFastaIsRefused) {
  const ScratchFolder folder;
  EXPECT_THAT(message_of<DataError>([&] { fasta({folder.write("a", "\nACGT\n>x\nA\n")}); }),
              HasSubstr("line 2: found sequence before any header line"));
  EXPECT_THAT(message_of<DataError>([&] { fasta({folder.write("b", "")}); }), HasSubstr("holds no FASTA record"));
}

}  // namespace
}  // namespace farspan
