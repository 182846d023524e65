// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/device.h"

namespace farspan {

// Keeps the compute stream of a GPU busy for so long and no core of the CPU: what tests put before an op or a call to
// see whether others wait for it.
void delay_compute(Device& device, double seconds);

}  // namespace farspan
