// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/this_process.h"

#include <fstream>
#include <random>
#include <sched.h>
#include <unistd.h>

namespace farspan {
namespace {

std::string first_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

std::string link_target(const char* path) {
  char text[256];
  const ssize_t length = readlink(path, text, sizeof(text));
  return length > 0 ? std::string(text, static_cast<size_t>(length)) : std::string();
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return "1";
  std::string cpus;
  for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) cpus += CPU_ISSET(cpu, &set) ? '1' : '0';
  return cpus.substr(0, cpus.rfind('1') + 1);
}

}  // namespace

ProcessInfo this_process(int rank) {
  ProcessInfo info;
  info.rank = rank;
  info.pid = getpid();
  info.host = host_name();
  info.host_key = first_line("/proc/sys/kernel/random/boot_id") + info.host;
  info.cpus = usable_cpus();
  return info;
}

std::string random_key() {
  std::random_device random;
  std::string key;
  for (int i = 0; i < 4; ++i) key += fmt::format("{:08x}", random());
  return key;
}

std::string loopback_key() { return first_line("/proc/sys/kernel/random/boot_id") + link_target("/proc/self/ns/net"); }

}  // namespace farspan
