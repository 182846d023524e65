// SPDX-License-Identifier: Apache-2.0
#include "comm/merged_report.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

namespace farspan {
namespace {

struct OpenCall {
  const OperationRecord* first = nullptr;
  std::vector<int> open;
};

// Not completed; a rank that has given a call up was in it when the job failed.
bool is_open(const OperationRecord& record) { return record.progress != CallProgress::done; }

// The ranks of a group by its name, "cp group [0, 2]".
std::vector<int> ranks_in(const std::string& group) {
  std::vector<int> ranks;
  for (size_t at = group.find('['); at < group.size() && group[at] != ']'; at = group.find_first_of(",]", at + 1))
    ranks.push_back(std::atoi(group.c_str() + at + 1));
  return ranks;
}

// Whether the rank has not come to this call of the group: none of its records there is as late.
bool not_called(const RankDump& dump, const OperationRecord& call) {
  return std::none_of(dump.records.begin(), dump.records.end(), [&](const OperationRecord& record) {
    return record.group == call.group && record.sequence >= call.sequence;
  });
}

std::string open_calls(const std::vector<RankDump>& dumps) {
  std::map<std::pair<std::string, int64_t>, OpenCall> calls;
  for (const RankDump& dump : dumps) {
    for (const OperationRecord& record : dump.records) {
      if (!is_open(record)) continue;
      OpenCall& call = calls[{record.group, record.sequence}];
      if (call.first == nullptr) call.first = &record;
      call.open.push_back(dump.rank);
    }
  }
  std::string text;
  for (const auto& [key, call] : calls) {
    const std::vector<int> members = ranks_in(call.first->group);
    std::vector<int> absent;
    for (const RankDump& dump : dumps)
      if (std::find(members.begin(), members.end(), dump.rank) != members.end() && not_called(dump, *call.first))
        absent.push_back(dump.rank);
    text += fmt::format("{}: open on ranks [{}], not called by ranks [{}]\n", call.first->title(),
                        fmt::join(call.open, ", "), fmt::join(absent, ", "));
  }
  return text;
}

}  // namespace

RankDump dump_of(int rank, const Recorder& recorder, bool ended) {
  return {.rank = rank,
          .position = recorder.position(),
          .ended = ended,
          .whereabouts = recorder.whereabouts(),
          .records = recorder.latest()};
}

std::string merged_report(const std::vector<RankDump>& dumps, int64_t records) {
  std::string text = open_calls(dumps);
  for (const RankDump& dump : dumps) {
    text += fmt::format("rank {}{}{}{}\n", dump.rank, dump.position.empty() ? "" : " at ", dump.position,
                        dump.ended ? ", ended" : "");
    const int64_t held = std::ssize(dump.records);
    for (int64_t i = std::max<int64_t>(0, held - records); i < held; ++i) {
      const OperationRecord& record = dump.records[static_cast<size_t>(i)];
      text += fmt::format("  {}{}{}\n", record.str(), record.position.empty() ? "" : ", posted at ", record.position);
    }
  }
  return text;
}

}  // namespace farspan
