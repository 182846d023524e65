// SPDX-License-Identifier: Apache-2.0
// Continues a text with a trained model, one token at a time on one rank. Meant for looking at what was learnt: every
// token runs the whole context again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "config/config.h"

namespace farspan {

struct GenerateOptions {
  std::string checkpoint;
  std::vector<int32_t> prompt;  // token ids, at least one
  int64_t max_tokens = 128;
  double temperature = 0;  // 0: the most likely token each time
  int32_t end_token = -1;  // stops when it is drawn
};

// Calls `emit` with each new token. The context is the last seq_length tokens at most. The draws depend on
// training.seed and the place of the token only.
void generate(const Config& config, const GenerateOptions& options, const std::function<void(int32_t)>& emit);

}  // namespace farspan
