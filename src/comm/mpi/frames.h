// SPDX-License-Identifier: Apache-2.0
// What the processes of a job tell rank 0's process, and what it tells them, beside the data that MPI carries.
//
//   member -> hub   hello, failure, over, dump, report_request, bye
//   hub -> member   known, welcome, failed, ended, dump_request, verdict, report
//
// A connection that ends before its bye is a process that was killed or crashed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/failure.h"
#include "comm/merged_report.h"

namespace farspan {

namespace frame {
enum Type : int {
  hello = 1,       // the job's key, ProcessInfo
  known,           // the key was right
  welcome,         // when all are there: every process's ProcessInfo
  failure,         // RankFailure: mine
  failed,          // RankFailure: the job's first; to be answered by a dump
  over,            // my rank has ended run N, or has failed
  ended,           // run N: the ranks that have ended it
  dump_request,    // ask for a dump
  dump,            // RankDump
  report_request,  // ask for a report
  report,          // text
  verdict,         // Verdict: the job ends now
  bye,             // I leave in order
};
}  // namespace frame

// Where a process runs.
struct ProcessInfo {
  int rank = 0;
  int64_t pid = 0;
  std::string host;      // its name
  std::string host_key;  // equal for processes that share cores and memory
  std::string cpus;      // which processors it may run on: a character each, '0' or '1'
};

// How a job ended that failed.
struct Verdict {
  ErrorKind kind = ErrorKind::internal;
  std::string message;
  std::string report;  // lines; may be empty
};

std::string encode(const ProcessInfo& info);
std::string encode(const RankFailure& failure);
std::string encode(const RankDump& dump);
std::string encode(const Verdict& verdict);
std::string encode(const std::vector<std::string>& texts);
std::string encode(int64_t number, const std::vector<int>& ranks);

// Each throws CommunicationError on bytes that are cut off.
ProcessInfo decode_process_info(std::string_view bytes);
RankFailure decode_failure(std::string_view bytes);
RankDump decode_dump(std::string_view bytes);
Verdict decode_verdict(std::string_view bytes);
std::vector<std::string> decode_texts(std::string_view bytes);
std::pair<int64_t, std::vector<int>> decode_numbered_ranks(std::string_view bytes);

}  // namespace farspan
