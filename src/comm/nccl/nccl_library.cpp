// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_library.h"

#include <cstdlib>
#include <dlfcn.h>
#include <fmt/format.h>

#include "comm/nccl/nccl_communicator.h"

namespace farspan {
namespace {

// Communicators that do not block came with 2.14, their registered memory with 2.19.
constexpr int kOldestVersion = NCCL_VERSION(2, 19, 0);

template <typename Function>
void find(void* library, const char* name, Function& function, std::string& absence) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && absence.empty()) absence = fmt::format("{} is not in libnccl.so.2", name);
}

NcclLibrary load() {
  NcclLibrary nccl;
  // Multicast over NVLink gains little for messages as large as ours, and a program that uses it and is killed can
  // leave the GPUs of its machine unusable until they are reset. The library has no other switch for it that a program
  // can set, and reads this one once, later than here.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    nccl.absence = fmt::format("NCCL cannot be loaded: {}", dlerror());
    return nccl;
  }
  find(library, "ncclGetVersion", nccl.get_version, nccl.absence);
  find(library, "ncclGetUniqueId", nccl.get_unique_id, nccl.absence);
  find(library, "ncclGetErrorString", nccl.get_error_string, nccl.absence);
  find(library, "ncclGetLastError", nccl.get_last_error, nccl.absence);
  find(library, "ncclCommInitRankConfig", nccl.comm_init_rank_config, nccl.absence);
  find(library, "ncclCommFinalize", nccl.comm_finalize, nccl.absence);
  find(library, "ncclCommDestroy", nccl.comm_destroy, nccl.absence);
  find(library, "ncclCommAbort", nccl.comm_abort, nccl.absence);
  find(library, "ncclCommGetAsyncError", nccl.comm_get_async_error, nccl.absence);
  find(library, "ncclCommRegister", nccl.comm_register, nccl.absence);
  find(library, "ncclCommDeregister", nccl.comm_deregister, nccl.absence);
  find(library, "ncclGroupStart", nccl.group_start, nccl.absence);
  find(library, "ncclGroupEnd", nccl.group_end, nccl.absence);
  find(library, "ncclAllReduce", nccl.all_reduce, nccl.absence);
  find(library, "ncclAllGather", nccl.all_gather, nccl.absence);
  find(library, "ncclReduceScatter", nccl.reduce_scatter, nccl.absence);
  find(library, "ncclSend", nccl.send, nccl.absence);
  find(library, "ncclRecv", nccl.receive, nccl.absence);
  if (!nccl.absence.empty()) return nccl;
  int version = 0;
  nccl.get_version(&version);
  if (version < kOldestVersion)
    nccl.absence =
        fmt::format("NCCL {}.{} is installed; at least 2.19 is needed", version / 10000, version / 100 % 100);
  return nccl;
}

}  // namespace

const NcclLibrary& nccl() {
  static const NcclLibrary library = load();
  return library;
}

std::string nccl_absence() { return nccl().absence; }

}  // namespace farspan
