// SPDX-License-Identifier: Apache-2.0
// In place of the rest of this folder where there is no CUDA toolkit.
#include "base/error.h"
#include "device/accelerator.h"

namespace farspan {

int cuda_device_count() { return 0; }

std::string cuda_absence() { return "this program was built without CUDA"; }

std::string cuda_device_name(int) { return {}; }

std::string cuda_bus_id(int) { return {}; }

bool cuda_has_fp8(int) { return false; }

int64_t cuda_free_bytes(int) { return 0; }

std::unique_ptr<Accelerator> make_cuda_accelerator(int) {
  throw ConfigError("device cuda: " + cuda_absence() + "; build it where nvcc is on the PATH, or use device cpu");
}

}  // namespace farspan
