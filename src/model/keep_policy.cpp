// SPDX-License-Identifier: Apache-2.0
#include "model/keep_policy.h"

#include <algorithm>

#include "base/error.h"

namespace farspan {

KeepPolicy keep_policy(const MemoryConfig& config) {
  switch (config.recompute_granularity) {
    case Recompute::none:
      return {.layernorm = false, .qkv = true, .attention = true, .attn_proj = true, .mlp = true};
    case Recompute::full:
      return {};
    case Recompute::selective: {
      const auto& modules = config.recompute_modules;
      const auto kept = [&](const char* name) {
        return !modules.empty() && std::find(modules.begin(), modules.end(), name) == modules.end();
      };
      return {.layernorm = kept("layernorm"),
              .qkv = kept("qkv"),
              .attention = true,
              .attn_proj = kept("attn_proj"),
              .mlp = kept("mlp")};
    }
    case Recompute::automatic:
      break;
  }
  throw ConfigError("recompute_granularity auto is not in this version; use none, selective or full");
}

}  // namespace farspan
