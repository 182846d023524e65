// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/frames.h"

#include <utility>

#include "comm/mpi/wire.h"

namespace farspan {
namespace {

void write_ranks(WireWriter& writer, const std::vector<int>& ranks) {
  writer.number(std::ssize(ranks));
  for (int rank : ranks) writer.number(rank);
}

std::vector<int> read_ranks(WireReader& reader) {
  std::vector<int> ranks;
  for (int64_t left = reader.number(); left > 0; --left) ranks.push_back(static_cast<int>(reader.number()));
  return ranks;
}

void write_record(WireWriter& writer, const OperationRecord& record) {
  writer.number(record.sequence).text(record.group).number(static_cast<int64_t>(record.operation)).text(record.label);
  writer.number(record.bytes).number(static_cast<int64_t>(record.progress)).text(record.position);
}

OperationRecord read_record(WireReader& reader) {
  OperationRecord record;
  record.sequence = reader.number();
  record.group = reader.text();
  record.operation = static_cast<Operation>(reader.number());
  record.label = reader.text();
  record.bytes = reader.number();
  record.progress = static_cast<CallProgress>(reader.number());
  record.position = reader.text();
  return record;
}

}  // namespace

std::string encode(const ProcessInfo& info) {
  return WireWriter().number(info.rank).number(info.pid).text(info.host).text(info.host_key).text(info.cpus).bytes();
}

ProcessInfo decode_process_info(std::string_view bytes) {
  WireReader reader(bytes);
  ProcessInfo info;
  info.rank = static_cast<int>(reader.number());
  info.pid = reader.number();
  info.host = reader.text();
  info.host_key = reader.text();
  info.cpus = reader.text();
  return info;
}

std::string encode(const RankFailure& failure) {
  WireWriter writer;
  writer.number(failure.rank).number(static_cast<int64_t>(failure.kind)).text(failure.message);
  writer.number(failure.consequence ? 1 : 0).number(failure.outside ? 1 : 0);
  write_ranks(writer, failure.missing);
  return writer.bytes();
}

RankFailure decode_failure(std::string_view bytes) {
  WireReader reader(bytes);
  RankFailure failure;
  failure.rank = static_cast<int>(reader.number());
  failure.kind = static_cast<ErrorKind>(reader.number());
  failure.message = reader.text();
  failure.consequence = reader.number() != 0;
  failure.outside = reader.number() != 0;
  failure.missing = read_ranks(reader);
  return failure;
}

std::string encode(const RankDump& dump) {
  WireWriter writer;
  writer.number(dump.rank).text(dump.position).number(dump.ended ? 1 : 0).text(dump.whereabouts);
  writer.number(std::ssize(dump.records));
  for (const OperationRecord& record : dump.records) write_record(writer, record);
  return writer.bytes();
}

RankDump decode_dump(std::string_view bytes) {
  WireReader reader(bytes);
  RankDump dump;
  dump.rank = static_cast<int>(reader.number());
  dump.position = reader.text();
  dump.ended = reader.number() != 0;
  dump.whereabouts = reader.text();
  for (int64_t left = reader.number(); left > 0; --left) dump.records.push_back(read_record(reader));
  return dump;
}

std::string encode(const Verdict& verdict) {
  return WireWriter().number(static_cast<int64_t>(verdict.kind)).text(verdict.message).text(verdict.report).bytes();
}

Verdict decode_verdict(std::string_view bytes) {
  WireReader reader(bytes);
  Verdict verdict;
  verdict.kind = static_cast<ErrorKind>(reader.number());
  verdict.message = reader.text();
  verdict.report = reader.text();
  return verdict;
}

std::string encode(const std::vector<std::string>& texts) {
  WireWriter writer;
  writer.number(std::ssize(texts));
  for (const std::string& text : texts) writer.text(text);
  return writer.bytes();
}

std::vector<std::string> decode_texts(std::string_view bytes) {
  WireReader reader(bytes);
  std::vector<std::string> texts;
  for (int64_t left = reader.number(); left > 0; --left) texts.push_back(reader.text());
  return texts;
}

std::string encode(int64_t number, const std::vector<int>& ranks) {
  WireWriter writer;
  writer.number(number);
  write_ranks(writer, ranks);
  return writer.bytes();
}

std::pair<int64_t, std::vector<int>> decode_numbered_ranks(std::string_view bytes) {
  WireReader reader(bytes);
  const int64_t number = reader.number();
  return {number, read_ranks(reader)};
}

}  // namespace farspan
