// SPDX-License-Identifier: Apache-2.0
// The MPI calls that Farspan makes, and no others: join, send bytes, receive bytes, ask whether they are done. Nothing
// here waits, except joining and leaving; who waits, and for how long, is decided above. One source file holds these
// calls; a build without MPI has another, whose constructor says so.
#pragma once

#include <cstdint>
#include <string>

namespace farspan {

class MpiLibrary {
 public:
  // Whether this build has MPI.
  static bool built();

  // Joins the processes that the launcher started. Throws ConfigError in a build without MPI, CommunicationError when
  // the library fails. At most one in the life of a process, used by the thread that made it only.
  MpiLibrary();
  ~MpiLibrary() { leave(); }
  MpiLibrary(const MpiLibrary&) = delete;
  MpiLibrary& operator=(const MpiLibrary&) = delete;

  // Leaves together with all other processes, unless abandoned. No call may follow.
  void leave();
  // No call is made any more: memory that was lent to a transfer may go. For a job that has failed; the process must
  // then end without running the library's own clean-up (std::_Exit).
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t highest_tag() const { return highest_tag_; }
  // "Open MPI v4.1.4"
  const std::string& version() const { return version_; }

  // A transfer in flight. Its memory must stay as it is until test() says that it is over.
  class Request {
   public:
    Request() = default;

   private:
    friend class MpiLibrary;
    [[maybe_unused]] std::uintptr_t handle_ = 0;  // not in a build without MPI
  };
  static constexpr int64_t kLargestTransfer = int64_t{1} << 30;  // bytes; MPI counts in int

  Request send(int peer, int tag, const void* data, int64_t bytes);
  // The message may be shorter than `bytes`, not longer.
  Request receive(int peer, int tag, void* data, int64_t bytes);
  // True once; the request is then spent. A receive gives the message's length where `received` is not null.
  bool test(Request& request, int64_t* received = nullptr);
  // Lets transfers in flight go on.
  void progress();

 private:
  int rank_ = 0;
  int size_ = 1;
  int64_t highest_tag_ = 0;
  std::string version_;
  bool abandoned_ = false;
};

}  // namespace farspan
