// SPDX-License-Identifier: Apache-2.0
#include "parallel/pipeline/links.h"

namespace farspan {
namespace {

// Within a link's communicators.
constexpr int kEarlierStage = 0;
constexpr int kLaterStage = 1;

}  // namespace

PipelineLinks::PipelineLinks(RankContext& context, int chunks) {
  const std::vector<int> ranks = context.group(Dimension::pp).ranks();
  stages_ = static_cast<int>(ranks.size());
  stage_ = context.group(Dimension::pp).rank();
  const int links = stages_ == 1 ? 0 : chunks > 1 ? stages_ : stages_ - 1;
  for (int link = 0; link < links; ++link) {
    const int later = (link + 1) % stages_;
    if (stage_ != link && stage_ != later) continue;
    const std::vector<int> pair = {ranks[static_cast<size_t>(link)], ranks[static_cast<size_t>(later)]};
    Link& place = stage_ == link ? to_next_ : from_previous_;
    place.forward = &context.add_group(pair, Dimension::pp);
    place.backward = &context.add_group(pair, Dimension::pp);
  }
}

void PipelineLinks::send(Communicator& link, Outgoing& slot, Buffer buffer, int to, std::string_view label) {
  slot.work.wait();
  slot.buffer = std::move(buffer);
  const Message message{to, slot.buffer};
  slot.work = link.exchange({&message, 1}, {}, label);
}

void PipelineLinks::receive(Communicator& link, Tensor into, int from, std::string_view label) {
  const Message message{from, into};
  link.exchange({}, {&message, 1}, label).wait();
}

void PipelineLinks::send_forward(Buffer stream) {
  send(*to_next_.forward, forward_, std::move(stream), kLaterStage, "hidden stream");
}

void PipelineLinks::receive_forward(Tensor stream) {
  receive(*from_previous_.forward, stream, kEarlierStage, "hidden stream");
}

void PipelineLinks::send_backward(Buffer d_stream) {
  send(*from_previous_.backward, backward_, std::move(d_stream), kEarlierStage, "gradient of the hidden stream");
}

void PipelineLinks::receive_backward(Tensor d_stream) {
  receive(*to_next_.backward, d_stream, kLaterStage, "gradient of the hidden stream");
}

void PipelineLinks::finish() {
  for (Outgoing* slot : {&forward_, &backward_}) {
    slot->work.wait();
    slot->buffer.release();
  }
}

}  // namespace farspan
