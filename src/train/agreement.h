// SPDX-License-Identifier: Apache-2.0
// Processes that were started with different settings or see different data would train on without a word. They compare
// both before anything else.
#pragma once

#include <string>

#include "comm/communicator.h"
#include "config/config.h"

namespace farspan {

// Collective over the world's ranks. Throws ConfigError that names the first setting in which ranks differ, with both
// values and ranks; DataError where the data differ.
void check_agreement(Communicator& world, const Config& config, const std::string& data_identity);

}  // namespace farspan
