// SPDX-License-Identifier: Apache-2.0
#include "ops/cudnn/block_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "ops/cuda/attention_scratch.h"

namespace farspan::cuda {
namespace {

// A rectangle of lengths that are multiples of these gets graphs of its own. Rows and what ranks own of them are cut
// into such lengths; documents end anywhere, and a graph for each of their lengths would take longer to make than to
// run. A square is a row or a rank's part of it; other rectangles may end where a document does, some of them at a
// multiple of 16.
constexpr int64_t kSquareTokens = 16;
constexpr int64_t kRectangleTokens = 64;

int64_t next_power_of_two(int64_t x) {
  int64_t power = 128;
  while (power < x) power *= 2;
  return power;
}

// 1, 2, 3, 4, 6, 8, 12, 16, ...
int64_t table_entries(int64_t documents) {
  int64_t power = 1;
  while (power < documents) power *= 2;
  return power >= 4 && power / 4 * 3 >= documents ? power / 4 * 3 : power;
}

// A single key that all see, or a single query that sees all, is causal too.
bool has_diagonal(const AttentionPart& part, Diagonal diagonal) {
  const bool plain = part.form == PartForm::plain;
  if (!plain && part.form != PartForm::causal) return false;
  switch (diagonal) {
    case Diagonal::none:
      return plain;
    case Diagonal::top_left:
      return plain ? part.keys() == 1 : part.first_keys == 1;
    case Diagonal::bottom_right:
      return plain ? part.queries() == 1 : part.first_keys == part.keys() - part.queries() + 1;
  }
  return false;
}

std::vector<RectangleCall> rectangles_of(const Document& whole, Diagonal diagonal, Pass pass) {
  const bool square = whole.queries == whole.keys;
  if (pass == Pass::backward && diagonal == Diagonal::bottom_right && whole.queries < whole.keys) {
    const int64_t before = whole.keys - whole.queries;
    return {{{0, whole.queries, 0, before}, Diagonal::none},
            {{0, whole.queries, before, whole.queries}, Diagonal::top_left, true}};
  }
  if (diagonal != Diagonal::top_left || !square || whole.queries <= kRowTokens) return {{whole, diagonal}};
  std::vector<RectangleCall> calls;
  for (int64_t begin = 0; begin < whole.queries; begin += kRowTokens) {
    const int64_t length = std::min(kRowTokens, whole.queries - begin);
    calls.push_back({{begin, length, begin, length}, Diagonal::top_left});
    if (begin > 0) calls.push_back({{begin, length, 0, begin}, Diagonal::none, true, true});
  }
  return calls;
}

// Documents of like length together, since a call's grid is made for its longest.
std::vector<DocumentsCall> documents_calls(const std::vector<Document>& documents) {
  std::map<std::pair<int64_t, int64_t>, std::vector<Document>> by_length;
  for (const Document& d : documents) by_length[{next_power_of_two(d.queries), next_power_of_two(d.keys)}].push_back(d);
  std::vector<DocumentsCall> calls;
  for (const auto& [lengths, alike] : by_length)
    for (auto begin = alike.begin(); begin != alike.end();) {
      const auto end = begin + std::min<int64_t>(kMostDocuments, alike.end() - begin);
      calls.push_back({lengths.first, lengths.second, table_entries(end - begin), {begin, end}});
      begin = end;
    }
  return calls;
}

BlockPlan refused(std::string reason) {
  BlockPlan plan;
  plan.refusal = std::move(reason);
  return plan;
}

}  // namespace

BlockPlan plan_block(const AttentionBlock& block, Pass pass) {
  if (block.runs.empty()) return refused("it is not known on the CPU who sees whom");
  const int64_t queries = block.query.dim(0);
  const int64_t keys = block.key.dim(0);
  const std::vector<AttentionPart> parts = attention_parts(block.runs, block.key_begin, keys);
  const auto all_have = [&](Diagonal diagonal) {
    return std::all_of(parts.begin(), parts.end(), [&](const AttentionPart& part) {
      return part.form == PartForm::nothing || has_diagonal(part, diagonal);
    });
  };
  BlockPlan plan;
  if (all_have(Diagonal::none))
    plan.diagonal = Diagonal::none;
  else if (all_have(Diagonal::top_left))
    plan.diagonal = Diagonal::top_left;
  else if (all_have(Diagonal::bottom_right))
    plan.diagonal = Diagonal::bottom_right;
  else
    return refused("the mask is neither plain nor causal throughout");

  std::vector<Document> documents;
  for (const AttentionPart& part : parts)
    if (part.form != PartForm::nothing)
      documents.push_back({part.query_begin, part.queries(), part.key_begin, part.keys()});
  if (documents.empty()) return refused("no query sees anything");
  const Document& first = documents.front();
  const bool whole = first.queries == queries && first.keys == keys;
  const int64_t multiple = queries == keys ? kSquareTokens : kRectangleTokens;
  if (whole && queries % multiple == 0 && keys % multiple == 0) {
    plan.rectangles = rectangles_of(first, plan.diagonal, pass);
  } else {
    plan.documents = documents_calls(documents);
    plan.covers_queries = std::none_of(parts.begin(), parts.end(),
                                       [](const AttentionPart& part) { return part.form == PartForm::nothing; });
  }
  return plan;
}

}  // namespace farspan::cuda
