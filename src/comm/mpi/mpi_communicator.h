// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/call_communicator.h"
#include "comm/mpi/mpi_call.h"

namespace farspan {

class MpiWorld;

// One rank's end of a group of processes.
class MpiCommunicator final : public CallCommunicator {
 public:
  // `world` must outlive it.
  MpiCommunicator(MpiWorld& world, MpiGroup group, Dimension dimension);

 private:
  class StartedCall;
  Work start(CallArguments call) override;

  MpiWorld& world_;
  MpiGroup group_;
};

}  // namespace farspan
