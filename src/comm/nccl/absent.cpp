// SPDX-License-Identifier: Apache-2.0
// In place of the rest of this folder where there is no NCCL.
#include "base/error.h"
#include "comm/nccl/nccl_communicator.h"

namespace farspan {

std::string nccl_absence() { return "this program was built without NCCL"; }

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<CallCommunicator>, World&, Device&, double) {
  throw ConfigError("communication.backend nccl: " + nccl_absence() +
                    "; build it where nccl.h is beside the CUDA toolkit, or use ranks of one process (--ranks N) with "
                    "backend threads");
}

}  // namespace farspan
