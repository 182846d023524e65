// SPDX-License-Identifier: Apache-2.0
#include "observe/gather_text.h"

namespace farspan {
namespace {

Tensor bytes_of(std::string& text) { return Tensor(text.data(), DType::u8, {std::ssize(text)}); }

std::vector<int64_t> gather_lengths(Communicator& group, const std::string& text) {
  int64_t length = std::ssize(text);
  std::vector<int64_t> lengths(static_cast<size_t>(group.size()));
  group
      .all_gather(Tensor(&length, DType::i64, {1}), Tensor(lengths.data(), DType::i64, {std::ssize(lengths)}),
                  "lengths of texts")
      .wait();
  return lengths;
}

}  // namespace

std::vector<std::string> gather_text(Communicator& group, std::string text) {
  const std::vector<int64_t> lengths = gather_lengths(group, text);
  std::vector<std::string> texts;
  std::vector<Message> sends, receives;
  if (group.rank() == 0) {
    for (int64_t length : lengths) texts.emplace_back(static_cast<size_t>(length), '\0');
    for (int peer = 1; peer < group.size(); ++peer)
      if (std::string& received = texts[static_cast<size_t>(peer)]; !received.empty())
        receives.push_back({peer, bytes_of(received)});
    texts.front() = std::move(text);
  } else if (!text.empty()) {
    sends.push_back({0, bytes_of(text)});
  }
  group.exchange(sends, receives, "texts").wait();
  return texts;
}

}  // namespace farspan
