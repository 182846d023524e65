// SPDX-License-Identifier: Apache-2.0
// Processes: the processes of one job, one rank each, as a launcher (mpirun, srun) started them. MPI carries the data;
// beside it every process keeps a TCP connection with rank 0's (comm/mpi/hub.h), served by a thread that goes on when
// the rank is stuck: it says what the rank did last, learns within moments that another rank failed or was killed, and
// ends the process when the rank does not.
//
// A job that fails ends by leave(): every process waits for the verdict, rank 0's alone prints it, and all end with the
// failure's exit status. Nothing here needs an environment variable.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/mpi/frames.h"
#include "comm/mpi/hub.h"
#include "comm/mpi/mpi_library.h"
#include "comm/mpi/socket.h"
#include "comm/recorder.h"

namespace farspan {

class Processes {
 public:
  // Joins the others. `launcher` says what the environment tells of the world's size ("mpirun started 8 processes
  // (OMPI_COMM_WORLD_SIZE=8)") and `expected` is that size; empty and 1 for a process started alone. Throws ConfigError
  // in a build without MPI and where the MPI library sees another size, CommunicationError where the others cannot be
  // reached.
  Processes(const std::string& launcher, int expected);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  int rank() const { return library_.rank(); }
  int size() const { return library_.size(); }
  MpiLibrary& mpi() { return library_; }
  const std::string& host_of(int rank) const { return infos_[static_cast<size_t>(rank)].host; }
  // Ranks whose processes share this one's machine, itself among them.
  std::vector<int> ranks_of_this_host() const;
  // Threads that this rank may use so that all ranks of its machine together use each processor once, by the affinity
  // masks the launcher gave them.
  int threads() const;

  // This rank's operations; told to the others when something fails.
  Recorder& recorder() { return recorder_; }
  // How many groups this process and `peer` have in common by now; counts one more.
  int next_group_with(int peer) { return groups_with_[static_cast<size_t>(peer)]++; }

  // A run of the ranks: from begin_run to end_run of every process. end_run returns when all have come to it; throws
  // PeerFailure when the job has failed, WaitFailure after `timeout_seconds`.
  void begin_run();
  void end_run(double timeout_seconds);
  // Whether the rank has told that it ended the present run. Data it sent before may still be on its way.
  bool has_ended(int rank) const;

  // The job has failed here. The first call counts.
  void fail(RankFailure failure);
  bool failed() const { return failed_.load(); }
  std::optional<RankFailure> failure() const;  // the job's first, as far as it is known here
  // Waits for the verdict on a job that has failed; bounded.
  Verdict verdict();

  // All ranks' last operations, collected now.
  std::string report();

  // In order: waits for all processes, then leaves MPI. Throws as end_run does.
  void finish();
  // After a failure here or elsewhere: the verdict is shown by rank 0 as the last line on stderr, and the process ends
  // with its exit status.
  [[noreturn]] void leave(RankFailure failure);

 private:
  using Clock = std::chrono::steady_clock;

  void share_hub_address(std::string* addresses);
  void connect(const std::string& addresses);
  std::optional<std::string> await_frame(int type, Clock::time_point deadline);
  void serve();
  bool read_frames();
  void handle(const Frame& frame);
  void lose_hub();
  void watch_launcher();
  void obey_termination();
  void end_if_stuck();
  void send(int type, std::string_view payload);
  bool shows_verdict() const;
  [[noreturn]] void show_and_exit(const Verdict& verdict) const;

  MpiLibrary library_;
  std::unique_ptr<Hub> hub_;  // rank 0's process
  Socket socket_;
  std::mutex send_mutex_;
  FrameReader frames_;  // used by the thread alone once it runs
  std::vector<ProcessInfo> infos_;
  std::vector<int> groups_with_;
  Recorder recorder_;
  int64_t parent_ = 0;  // the launcher's process

  std::atomic<bool> failed_ = false;
  std::atomic<bool> rank_ended_ = false;
  std::atomic<bool> told_ = false;  // the hub knows of a failure here
  std::atomic<bool> leaving_ = false;
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<RankFailure> failure_;
  std::optional<Verdict> verdict_;
  Clock::time_point verdict_at_;
  bool verdict_taken_ = false;
  bool hub_lost_ = false;
  bool own_verdict_ = false;  // made here, because the hub was lost before its own
  std::optional<std::string> report_;
  int64_t run_ = 0;
  std::vector<int64_t> ended_run_;  // by rank

  std::optional<Clock::time_point> termination_due_;  // used by the thread alone
  std::thread thread_;
};

}  // namespace farspan
