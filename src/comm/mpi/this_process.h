// SPDX-License-Identifier: Apache-2.0
// What the operating system says of this process.
#pragma once

#include <string>

#include "comm/mpi/frames.h"

namespace farspan {

ProcessInfo this_process(int rank);

// Equal for two processes that reach each other by the loopback address: those of one network namespace of one system.
std::string loopback_key();

// 128 random bits, in hexadecimal digits.
std::string random_key();

}  // namespace farspan
