// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace farspan {

enum class Pass { forward, backward };

}  // namespace farspan
