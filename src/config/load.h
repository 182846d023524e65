// SPDX-License-Identifier: Apache-2.0
// The configuration of a run: defaults, then the preset, then the file, then the flags. Later ones win, and where each
// value came from is kept in Config::origins.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/config.h"

namespace farspan {

// Values from flags: ("parallel.context_parallel_size", "4"). A list key may stand several times, and commas separate
// its items; any other key stands once.
using Overrides = std::vector<std::pair<std::string, std::string>>;

// `file` empty: no file. Throws ConfigError, with FILE:LINE or the flag: a file that is not YAML, an unknown key (with
// the nearest known one), a known key in the wrong section (with the right one), a key given twice, a value of the
// wrong kind.
Config load_config(const std::string& file, const Overrides& overrides);

// Every key with its value and, as a comment, its origin. Reading it back gives the same values.
std::string effective_config_yaml(const Config& config);

}  // namespace farspan
