// SPDX-License-Identifier: Apache-2.0
// Documents: an ordered set of byte strings that lie in files, read by document and offset.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace farspan {

class Documents {
 public:
  virtual ~Documents() = default;

  virtual int64_t count() const = 0;
  virtual int64_t size(int64_t document) const = 0;  // bytes

  // Bytes [offset, offset + out.size()) of a document. Many threads may read at once. Throws DataError when the file is
  // gone or no longer the one that was opened.
  virtual void read(int64_t document, int64_t offset, std::span<uint8_t> out) const = 0;

  virtual std::string name(int64_t document) const = 0;                   // "corpus/a.txt", "x.fa record 3"
  virtual std::string place(int64_t document, int64_t offset) const = 0;  // "corpus/a.txt line 3, byte 17 of the file"

  // A text that differs between different sets: names below the given paths, sizes, hashes of the first bytes.
  virtual std::string fingerprint() const = 0;

  // What a reader of the log should know, one line each: files passed over.
  virtual std::vector<std::string> notes() const = 0;
};

// Every file is one document; an empty file is an empty one. Of a folder, files that look binary are passed over.
// Both functions read *.gz decompressed, list files as file_list.h says, and throw DataError for a path that is missing
// or unreadable and for a set without any document.
std::unique_ptr<const Documents> open_text(std::span<const std::string> paths);

// Every FASTA record is one document: its lines joined, the header line dropped, letters as they stand. Also throws
// DataError for a file that does not begin with a header line.
// Format: Pearson, Lipman, PNAS 85 (1988); https://www.ncbi.nlm.nih.gov/genbank/fastaformat/
std::unique_ptr<const Documents> open_fasta(std::span<const std::string> paths);

}  // namespace farspan
