// SPDX-License-Identifier: Apache-2.0
// The links of a pipeline stage to its neighbours. Link s joins stage s to stage s + 1 and, where stages hold several
// model chunks, the last stage to the first; on it the hidden stream travels forward and its gradient back, each
// direction a communicator of two ranks. Messages of a direction arrive in the order in which they were sent. One
// message of a direction is under way at a time: a send first waits until the one before has been taken, a receiver
// takes a message when it starts the task that needs it.
//
// A message is the stream of one micro-batch, (t, H) in the compute type: B S / (cp tp) H b bytes under sequence
// parallelism, B S / cp H b without.
#pragma once

#include "parallel/rank_context.h"

namespace farspan {

class PipelineLinks {
 public:
  // Adds the communicators to the context; every rank of the job does so at the same point. `chunks`: model
  // chunks of each stage.
  PipelineLinks(RankContext& context, int chunks);

  int stages() const { return stages_; }
  int stage() const { return stage_; }

  // The buffer is kept until the receiver has taken it.
  void send_forward(Buffer stream);
  void receive_forward(Tensor stream);
  void send_backward(Buffer d_stream);
  void receive_backward(Tensor d_stream);
  // Waits until all messages sent have been taken.
  void finish();

 private:
  struct Outgoing {
    Buffer buffer;
    Work work;
  };
  struct Link {
    Communicator* forward = nullptr;
    Communicator* backward = nullptr;
  };
  static void send(Communicator& link, Outgoing& slot, Buffer buffer, int to, std::string_view label);
  static void receive(Communicator& link, Tensor into, int from, std::string_view label);

  int stages_;
  int stage_;
  Link to_next_;
  Link from_previous_;
  Outgoing forward_;
  Outgoing backward_;
};

}  // namespace farspan
