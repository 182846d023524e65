// SPDX-License-Identifier: Apache-2.0
// Hub: the thread in rank 0's process that every process of the job, rank 0's too, keeps a connection with. It learns
// of failures, and of processes that vanish, at once; tells all; collects what every rank did last, and pronounces how
// the job ended: the first cause, who did not stop, where the ranks were that others waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/mpi/frames.h"
#include "comm/mpi/socket.h"

namespace farspan {

class Hub {
 public:
  // Listens for `size` processes that know the key. Throws CommunicationError.
  Hub(int size, std::string key);
  // Returns when all have left, or a few seconds later.
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  int port() const { return port_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    Socket socket;
    FrameReader frames;
    std::optional<ProcessInfo> info;  // once it has said hello
    int64_t ended_run = 0;            // the last run that its rank has ended
    bool over = false;                // its rank has failed or ended since the job failed
    bool left = false;                // said bye
    std::optional<RankDump> dump;     // since it was last asked for
    std::optional<RankFailure> failure;
  };

  void run();
  void wait_for_frames();
  void accept_all();
  void read(Peer& peer);
  void handle(Peer& peer, const Frame& frame);
  void greet_all();
  void lose(Peer& peer);
  void on_failure(Peer& peer, RankFailure failure, double grace_seconds);
  void on_ended(int64_t run);
  void keep_times();
  bool verdict_is_due() const;
  void pronounce();
  std::string verdict_message() const;
  std::string report() const;
  void broadcast(int type, std::string_view payload);

  Peer* with_rank(int rank);
  const Peer* with_rank(int rank) const;
  std::vector<int> ended_ranks(int64_t run) const;

  const int size_;
  const std::string key_;
  int port_ = 0;
  Socket listener_;
  std::atomic<bool> closing_ = false;
  std::thread thread_;

  // Used by the thread alone.
  std::deque<Peer> peers_;
  bool greeted_ = false;
  std::optional<RankFailure> first_;
  bool pronounced_ = false;
  double grace_seconds_ = 0;  // from the failure to when the verdict is due
  Clock::time_point verdict_due_;
  std::optional<Clock::time_point> ended_due_;  // to say who has ended a run that others have not
  int64_t announced_run_ = 0;                   // the last run that all have ended
  std::vector<int> report_wanted_;              // ranks that asked for one
  Clock::time_point report_due_;
};

}  // namespace farspan
