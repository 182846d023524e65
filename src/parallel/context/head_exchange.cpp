// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/head_exchange.h"

#include <algorithm>

#include "config/head_split.h"
#include "ops/elementwise.h"

namespace farspan {
namespace {

Tensor slice(const Tensor& x, int dim, int64_t begin, int64_t length) { return x.slice(dim, begin, begin + length); }

}  // namespace

HeadExchange::HeadExchange(Device& device, Arena& arena, Communicator& group, std::span<const RowLayout> layouts,
                           int first_rank, const ContextAttentionShape& shape)
    : device_(device), arena_(arena), group_(group), layouts_(layouts), shape_(shape) {
  runs_.resize(static_cast<size_t>(members()));
  for (int64_t row = 0; row < rows(); ++row) {
    const RowLayout& layout = layouts[static_cast<size_t>(row)];
    const RowLayout merged = merge_ranks(layout, members());
    const std::span<const LocalSpan> whole = merged.spans(first_rank / members());
    for (int member = 0; member < members(); ++member) {
      auto holder = whole.begin();
      for (const LocalSpan& span : layout.spans(first_rank + member)) {
        while (holder->positions.end < span.positions.end) ++holder;
        runs_[static_cast<size_t>(member)].push_back(
            {row, span.local_begin, holder->local_begin + span.positions.begin - holder->positions.begin,
             span.positions.length()});
      }
    }
  }
}

int64_t HeadExchange::kv_heads() const { return local_kv_heads(shape_.kv_heads, members()); }

Span HeadExchange::kv_heads_of(int member) const {
  const int64_t first = member * heads() / (shape_.heads / shape_.kv_heads);
  return {first, first + kv_heads()};
}

Buffer HeadExchange::trade(std::string_view label, Buffer send) const {
  Buffer received =
      arena_.take("attention.heads_received", send.tensor().dtype(), send.tensor().shape(), Purpose::communication);
  group_.all_to_all(send, received.tensor(), label).wait();
  return received;
}

Buffer HeadExchange::to_heads(std::string_view label, std::span<const Part> parts) const {
  const int64_t B = rows();
  const int64_t s = layouts_[0].local_length();
  const DType dtype = parts[0].x.dtype();
  int64_t width = 0;
  for (const Part& part : parts) width += (this->*part.of)(0).length();
  Buffer send =
      arena_.take("attention.heads_sent", dtype, {members(), B, s, width, shape_.head_dim}, Purpose::communication);
  for (int member = 0; member < members(); ++member) {
    int64_t column = 0;
    for (const Part& part : parts) {
      const Span heads = (this->*part.of)(member);
      cast(device_, part.x.slice(2, heads.begin, heads.end), slice(entry(send, member), 2, column, heads.length()));
      column += heads.length();
    }
  }
  const Buffer received = trade(label, std::move(send));
  Buffer whole = arena_.take("attention.whole_heads", dtype, {B, tokens(), width, shape_.head_dim}, Purpose::workspace);
  for (int member = 0; member < members(); ++member)
    for (const TokenRun& run : runs_[static_cast<size_t>(member)])
      cast(device_, slice(entry(entry(received, member), run.row), 0, run.local_begin, run.length),
           slice(entry(whole, run.row), 0, run.whole_begin, run.length));
  return whole;
}

std::vector<Buffer> HeadExchange::scalars_to_heads(std::string_view label, std::span<const Tensor> x) const {
  const int64_t B = rows();
  const int64_t s = layouts_[0].local_length();
  const int64_t kinds = std::ssize(x);
  Buffer send =
      arena_.take("attention.heads_sent", DType::f32, {members(), kinds, B, heads(), s}, Purpose::communication);
  for (int member = 0; member < members(); ++member)
    for (int64_t kind = 0; kind < kinds; ++kind)
      cast(device_, slice(x[static_cast<size_t>(kind)], 1, heads_of(member).begin, heads()),
           entry(entry(send, member), kind));
  const Buffer received = trade(label, std::move(send));
  std::vector<Buffer> whole;
  for (int64_t kind = 0; kind < kinds; ++kind) {
    whole.push_back(arena_.take("attention.whole_scalars", DType::f32, {B, heads(), tokens()}, Purpose::workspace));
    for (int member = 0; member < members(); ++member)
      for (const TokenRun& run : runs_[static_cast<size_t>(member)])
        cast(device_, slice(entry(entry(entry(received, member), kind), run.row), 1, run.local_begin, run.length),
             slice(entry(whole.back(), run.row), 1, run.whole_begin, run.length));
  }
  return whole;
}

Buffer HeadExchange::tokens_for_members(const Tensor& x, DType wire) const {
  Buffer send =
      arena_.take("attention.heads_sent", wire, {members(), rows(), layouts_[0].local_length(), x.dim(2), x.dim(3)},
                  Purpose::communication);
  for (int member = 0; member < members(); ++member)
    for (const TokenRun& run : runs_[static_cast<size_t>(member)])
      cast(device_, slice(entry(x, run.row), 0, run.whole_begin, run.length),
           slice(entry(entry(send, member), run.row), 0, run.local_begin, run.length));
  return send;
}

void HeadExchange::heads_to_tokens(std::string_view label, const Tensor& x, Tensor y) const {
  const Buffer received = trade(label, tokens_for_members(x, y.dtype()));
  for (int member = 0; member < members(); ++member)
    cast(device_, entry(received, member), slice(y, 2, heads_of(member).begin, heads()));
}

void HeadExchange::scalars_to_tokens(std::string_view label, const Tensor& x, Tensor y) const {
  Buffer send = arena_.take("attention.heads_sent", DType::f32,
                            {members(), rows(), heads(), layouts_[0].local_length()}, Purpose::communication);
  for (int member = 0; member < members(); ++member)
    for (const TokenRun& run : runs_[static_cast<size_t>(member)])
      cast(device_, slice(entry(x, run.row), 1, run.whole_begin, run.length),
           slice(entry(entry(send, member), run.row), 1, run.local_begin, run.length));
  const Buffer received = trade(label, std::move(send));
  for (int member = 0; member < members(); ++member)
    cast(device_, entry(received, member), slice(y, 1, heads_of(member).begin, heads()));
}

void HeadExchange::key_gradients_to_tokens(std::string_view label, const Tensor& d, Tensor d_key,
                                           Tensor d_value) const {
  const bool shared = shares_kv_heads();
  const Buffer received = trade(label, tokens_for_members(d, shared ? DType::f32 : d_key.dtype()));
  for (int member = 0; member < members(); ++member) {
    const Span heads = kv_heads_of(member);
    // The first holder of a head adds the other holders' sums to its own part of what was received.
    const int first = shared ? static_cast<int>(heads.begin * members() / shape_.kv_heads) : member;
    if (first != member) {
      const Tensor sum = entry(received, first);
      add(device_, sum, entry(received, member), sum);
    }
    const bool last = member + 1 == members() || kv_heads_of(member + 1) != heads;
    if (!last) continue;
    const Tensor sum = entry(received, first);
    cast(device_, slice(sum, 2, 0, heads.length()), slice(d_key, 2, heads.begin, heads.length()));
    cast(device_, slice(sum, 2, heads.length(), heads.length()), slice(d_value, 2, heads.begin, heads.length()));
  }
}

}  // namespace farspan
