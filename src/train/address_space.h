// SPDX-License-Identifier: Apache-2.0
// A limit on a process's addresses (RLIMIT_AS, the shell's ulimit -v) is none on its memory, but batch systems set it
// as if it were. A thread that finds no room for its stack or heap ends inside a library, past any error of this
// program's own; so there must be room for all of them before the first starts.
#pragma once

#include <cstdint>

namespace farspan {

// What this process may still map, in bytes; INT64_MAX where there is no limit.
int64_t address_space_left();

// Throws MemoryError unless `left` bytes hold `planned_bytes` and what `threads` threads reserve beside them.
void check_address_space(int64_t planned_bytes, int64_t threads, int64_t left);

}  // namespace farspan
