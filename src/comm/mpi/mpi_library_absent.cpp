// SPDX-License-Identifier: Apache-2.0
// Stands for mpi_library.cpp in a build without MPI.
#include "base/error.h"
#include "comm/mpi/mpi_library.h"

namespace farspan {
namespace {

[[noreturn]] void refuse() {
  throw ConfigError(
      "communication.backend mpi: this build has no MPI; install libopenmpi-dev and openmpi-bin and build again, or "
      "start one process without a launcher, whose ranks are threads (--ranks N)");
}

}  // namespace

bool MpiLibrary::built() { return false; }
MpiLibrary::MpiLibrary() { refuse(); }
void MpiLibrary::leave() {}
MpiLibrary::Request MpiLibrary::send(int, int, const void*, int64_t) { refuse(); }
MpiLibrary::Request MpiLibrary::receive(int, int, void*, int64_t) { refuse(); }
bool MpiLibrary::test(Request&, int64_t*) { refuse(); }
void MpiLibrary::progress() { refuse(); }

}  // namespace farspan
