// SPDX-License-Identifier: Apache-2.0
// Sizes of published models, as in their config.json on Hugging Face.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "config/config.h"

namespace farspan {

std::span<const std::string> preset_names();

// Sets every model field that the preset knows and marks its origin "preset". False when there is no such preset.
bool apply_preset(Config& config, std::string_view name);

}  // namespace farspan
