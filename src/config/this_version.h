// SPDX-License-Identifier: Apache-2.0
// Keys that have their place in the configuration but whose feature is not in this version: refused, never ignored.
#pragma once

#include "config/config.h"
#include "config/reasons.h"

namespace farspan {

// Adds one reason for each feature asked for and absent, with the setting that works.
void refuse_absent_features(const Config& config, Reasons& reasons);

}  // namespace farspan
