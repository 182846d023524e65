// SPDX-License-Identifier: Apache-2.0
#include "io/gzip.h"

#include <algorithm>
#include <zlib.h>

#include "base/error.h"
#include "io/file_map.h"

namespace farspan {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // zlib counts in 32 bits, so input and output go in pieces
constexpr int kGzipOnly = 16 + MAX_WBITS;     // zlib.h, inflateInit2: expect a gzip header, check the CRC

class Inflater {
 public:
  Inflater(const std::string& path, std::span<const uint8_t> input) : path_(path), input_(input) {
    if (inflateInit2(&stream_, kGzipOnly) != Z_OK)
      throw DataError(fmt::format("cannot start to decompress '{}'", path));
  }
  ~Inflater() { inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  std::vector<uint8_t> all() {
    std::vector<uint8_t> output;
    do read_member(output);
    while (another_member());
    output.resize(static_cast<size_t>(produced_));
    output.shrink_to_fit();
    return output;
  }

 private:
  void read_member(std::vector<uint8_t>& output) {
    for (;;) {
      if (static_cast<int64_t>(output.size()) == produced_)
        output.resize(static_cast<size_t>(std::max(kPiece, produced_ * 2)));
      stream_.next_in = const_cast<Bytef*>(input_.data() + consumed_);  // zlib does not write to its input
      stream_.avail_in = piece(static_cast<int64_t>(input_.size()) - consumed_);
      stream_.next_out = output.data() + produced_;
      stream_.avail_out = piece(static_cast<int64_t>(output.size()) - produced_);
      const int result = inflate(&stream_, Z_NO_FLUSH);
      consumed_ = stream_.next_in - input_.data();
      produced_ = stream_.next_out - output.data();
      if (result == Z_STREAM_END) return;
      if (result == Z_MEM_ERROR) throw DataError(fmt::format("no memory to decompress '{}'", path_));
      // Z_BUF_ERROR only says that nothing moved: there is always room for output, so the input has ended.
      if (result != Z_OK && result != Z_BUF_ERROR)
        throw DataError(fmt::format("'{}' is corrupt at byte {} of {}: {}", path_, consumed_, input_.size(),
                                    stream_.msg != nullptr ? stream_.msg : "not gzip data"));
      if (consumed_ == static_cast<int64_t>(input_.size()) && stream_.avail_out > 0)
        throw DataError(fmt::format("'{}' is cut short: its {} bytes end inside a gzip member", path_, input_.size()));
    }
  }

  bool another_member() {
    const auto rest = input_.subspan(static_cast<size_t>(consumed_));
    const auto next = std::find_if(rest.begin(), rest.end(), [](uint8_t byte) { return byte != 0; });
    if (next == rest.end()) return false;
    if (next != rest.begin())
      throw DataError(
          fmt::format("'{}' is corrupt at byte {} of {}: data after the padding that follows the last gzip member",
                      path_, consumed_ + (next - rest.begin()), input_.size()));
    inflateReset(&stream_);
    return true;
  }

  static uInt piece(int64_t bytes) { return static_cast<uInt>(std::min(bytes, kPiece)); }

  const std::string& path_;
  std::span<const uint8_t> input_;
  z_stream stream_{};
  int64_t consumed_ = 0;
  int64_t produced_ = 0;
};

}  // namespace

std::vector<uint8_t> read_gzip(const std::string& path) {
  const FileMap file(path);
  return Inflater(path, file.bytes()).all();
}

}  // namespace farspan
