// SPDX-License-Identifier: Apache-2.0
// MPI's adaptor. The processes' messages travel in a duplicate of the world communicator, and errors are returned, not
// fatal: a failing call becomes an exception that names it.
#include "comm/mpi/mpi_library.h"

#include <cstdlib>
#include <cstring>
#include <mpi.h>

#include "base/error.h"

namespace farspan {
namespace {

static_assert(sizeof(MPI_Request) <= sizeof(std::uintptr_t), "a request's handle is kept in an integer");

MPI_Comm processes = MPI_COMM_NULL;

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommunicationError(fmt::format("{}: {}", call, std::string(text, static_cast<size_t>(length))));
}

MPI_Request handle_of(std::uintptr_t stored) {
  MPI_Request request;
  std::memcpy(&request, &stored, sizeof(request));
  return request;
}

std::uintptr_t stored(MPI_Request request) {
  std::uintptr_t value = 0;
  std::memcpy(&value, &request, sizeof(request));
  return value;
}

int64_t highest_tag_of(MPI_Comm communicator) {
  void* value = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(communicator, MPI_TAG_UB, &value, &found), "MPI_Comm_get_attr");
  constexpr int64_t kLeastHighestTag = 32767;  // what the standard promises
  return found ? *static_cast<int*>(value) : kLeastHighestTag;
}

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string whole(text, static_cast<size_t>(length));
  return whole.substr(0, whole.find_first_of(",\n"));
}

// Open MPI's processes of one machine by default read each other's memory through the kernel. When such a read meets a
// process that was just killed, the library ends the reading process itself, before anything can be said of it. Copying
// through shared memory costs large messages up to a third of their speed and has no such end. Whoever sets the
// parameter (mpirun --mca btl_vader_single_copy_mechanism cma) has it otherwise.
void prefer_shared_memory() { setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0); }

}  // namespace

bool MpiLibrary::built() { return true; }

MpiLibrary::MpiLibrary() {
  prefer_shared_memory();
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  if (provided < MPI_THREAD_FUNNELED)
    throw CommunicationError(fmt::format("{} does not allow threads beside it", library_version()));
  check(MPI_Comm_dup(MPI_COMM_WORLD, &processes), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(processes, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(processes, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(processes, &size_), "MPI_Comm_size");
  highest_tag_ = highest_tag_of(processes);
  version_ = library_version();
}

void MpiLibrary::leave() {
  if (abandoned_) return;
  abandoned_ = true;
  MPI_Comm_free(&processes);
  MPI_Finalize();
}

MpiLibrary::Request MpiLibrary::send(int peer, int tag, const void* data, int64_t bytes) {
  FARSPAN_CHECK(bytes <= kLargestTransfer, "a transfer of {} bytes", bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, processes, &request), "MPI_Isend");
  Request made;
  made.handle_ = stored(request);
  return made;
}

MpiLibrary::Request MpiLibrary::receive(int peer, int tag, void* data, int64_t bytes) {
  FARSPAN_CHECK(bytes <= kLargestTransfer, "a transfer of {} bytes", bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, processes, &request), "MPI_Irecv");
  Request made;
  made.handle_ = stored(request);
  return made;
}

bool MpiLibrary::test(Request& request, int64_t* received) {
  MPI_Request handle = handle_of(request.handle_);
  MPI_Status status;
  int done = 0;
  check(MPI_Test(&handle, &done, &status), "MPI_Test");
  request.handle_ = stored(handle);
  if (!done) return false;
  if (received != nullptr) {
    int count = 0;
    check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
    *received = count;
  }
  return true;
}

void MpiLibrary::progress() {
  int found = 0;
  check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, processes, &found, MPI_STATUS_IGNORE), "MPI_Iprobe");
}

}  // namespace farspan
