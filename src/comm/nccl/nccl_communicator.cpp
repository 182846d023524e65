// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "comm/cuda/exposed_stream_time.h"
#include "comm/failure.h"
#include "comm/nccl/nccl_connection.h"
#include "comm/nccl/nccl_watchdog.h"
#include "device/cuda/cuda.h"

namespace farspan {
namespace {

void check(ncclResult_t result) {
  if (result != ncclSuccess && result != ncclInProgress)
    throw CommunicationError(fmt::format("NCCL: {}", nccl().get_error_string(result)));
}

ncclDataType_t type_of(DType dtype) { return dtype == DType::f32 ? ncclFloat32 : ncclFloat64; }

void send(const void* data, int64_t bytes, int peer, ncclComm_t comm, cudaStream_t stream) {
  if (bytes > 0) check(nccl().send(data, static_cast<size_t>(bytes), ncclInt8, peer, comm, stream));
}

void receive(void* data, int64_t bytes, int peer, ncclComm_t comm, cudaStream_t stream) {
  if (bytes > 0) check(nccl().receive(data, static_cast<size_t>(bytes), ncclInt8, peer, comm, stream));
}

// The messages of an exchange between two ranks meet in the order of their posting, here as in every backend.
void exchange(const CallArguments& call, ncclComm_t comm, cudaStream_t stream) {
  for (const Message& message : call.sends) send(message.data.raw(), message.data.bytes(), message.peer, comm, stream);
  for (const Message& message : call.receives)
    receive(message.data.raw(), message.data.bytes(), message.peer, comm, stream);
}

void all_to_all(const CallArguments& call, int size, ncclComm_t comm, cudaStream_t stream) {
  const int64_t piece = call.bytes / size;
  for (int peer = 0; peer < size; ++peer) {
    send(call.source + peer * piece, piece, peer, comm, stream);
    receive(call.target + peer * piece, piece, peer, comm, stream);
  }
}

void make_calls(const CallArguments& call, int size, ncclComm_t comm, cudaStream_t stream) {
  switch (call.operation) {
    case Operation::all_reduce:
      return check(nccl().all_reduce(call.source, call.target, static_cast<size_t>(call.bytes / size_of(call.dtype)),
                                     type_of(call.dtype), ncclSum, comm, stream));
    case Operation::all_gather:
      return check(
          nccl().all_gather(call.source, call.target, static_cast<size_t>(call.bytes), ncclInt8, comm, stream));
    case Operation::reduce_scatter:
      return check(nccl().reduce_scatter(call.source, call.target,
                                         static_cast<size_t>(call.bytes / size_of(call.dtype) / size),
                                         type_of(call.dtype), ncclSum, comm, stream));
    case Operation::all_to_all:
      return all_to_all(call, size, comm, stream);
    case Operation::exchange:
      return exchange(call, comm, stream);
    case Operation::barrier:
      return;
  }
}

bool moves_data(const CallArguments& call) {
  const auto has_bytes = [](const Message& message) { return message.data.bytes() > 0; };
  if (call.operation == Operation::exchange)
    return std::any_of(call.sends.begin(), call.sends.end(), has_bytes) ||
           std::any_of(call.receives.begin(), call.receives.end(), has_bytes);
  return call.operation != Operation::barrier && call.bytes > 0;
}

// What the ranks of a group tell each other before NCCL connects them.
struct Greeting {
  ncclUniqueId id = {};
  std::array<char, 16> gpu = {};  // its UUID
};

std::vector<Greeting> exchange_greetings(Communicator& host, Device& device) {
  Greeting own;
  if (host.rank() == 0) check(nccl().get_unique_id(&own.id));
  cudaDeviceProp properties{};
  FARSPAN_CUDA(cudaGetDeviceProperties(&properties, device.accelerator().index()));
  std::memcpy(own.gpu.data(), properties.uuid.bytes, own.gpu.size());
  std::vector<Greeting> all(static_cast<size_t>(host.size()));
  const int64_t bytes = sizeof(Greeting);
  host.all_gather(Tensor(&own, DType::u8, {bytes}), Tensor(all.data(), DType::u8, {bytes * host.size()}),
                  "NCCL's address")
      .wait();
  return all;
}

void refuse_shared_gpus(const std::vector<Greeting>& greetings, const Communicator& host) {
  for (size_t a = 0; a < greetings.size(); ++a)
    for (size_t b = 0; b < a; ++b)
      if (greetings[a].gpu == greetings[b].gpu)
        throw ConfigError(fmt::format(
            "communication.backend nccl: ranks {} and {} of the {} have the same GPU, and NCCL needs one for "
            "each rank; start at most as many ranks as there are GPUs, or all ranks in one process "
            "(--ranks N) with backend threads",
            host.ranks()[b], host.ranks()[a], group_name(host.dimension(), host.ranks())));
}

class NcclCommunicator final : public CallCommunicator {
 public:
  NcclCommunicator(std::unique_ptr<CallCommunicator> host, const ncclUniqueId& id, World& world, Device& device,
                   double timeout_seconds)
      : CallCommunicator(host->dimension(), host->rank(), host->ranks()),
        host_(std::move(host)),
        name_(group_name(dimension(), ranks())),
        watchdog_(device.extension<NcclWatchdog>()),
        exposed_(cuda::compute_stream(device)),
        connection_(
            device, id, rank(), size(), name_, [&world, this] { throw_if_stopped(world); }, timeout_seconds) {
    watchdog_.add(connection_, world, ranks()[static_cast<size_t>(rank())]);
    try {
      open_connections(device);
    } catch (...) {
      watchdog_.remove(connection_);
      throw;
    }
  }

  ~NcclCommunicator() override { watchdog_.remove(connection_); }

  void register_memory(void* memory, int64_t bytes) override { connection_.register_memory(memory, bytes); }

 private:
  class StartedCall;

  void throw_if_stopped(const World& world) const {
    if (world.aborted()) throw PeerFailure(name_ + ": stopped because another rank failed");
  }

  // NCCL opens the way to a peer, and its rings, when they are first used, and that use waits for the peer. Here all
  // ranks are known to come.
  void open_connections(Device& device) {
    constexpr int64_t kPiece = 256;
    const DeviceMemory memory(device, 2 * size() * kPiece);
    CallArguments call;
    call.bytes = size() * kPiece;
    call.dtype = DType::f32;
    call.source = static_cast<std::byte*>(memory.data());
    call.target = static_cast<std::byte*>(memory.data()) + call.bytes;
    for (Operation operation : {Operation::all_to_all, Operation::all_reduce, Operation::reduce_scatter}) {
      call.operation = operation;
      connection_.resume(connection_.launch(name_ + ": NCCL's first messages", calls_of(call)));
    }
    call.operation = Operation::all_gather;
    call.bytes = kPiece;
    connection_.resume(connection_.launch(name_ + ": NCCL's first messages", calls_of(call)));
    device.synchronize();
  }

  std::function<void(ncclComm_t, cudaStream_t)> calls_of(const CallArguments& call) const {
    return [&call, group_size = size()](ncclComm_t comm, cudaStream_t stream) {
      make_calls(call, group_size, comm, stream);
    };
  }

  Work start(CallArguments call) override;
  void update_traffic() override { traffic_.exposed_seconds += exposed_.take_seconds(); }

  std::unique_ptr<CallCommunicator> host_;
  const std::string name_;
  NcclWatchdog& watchdog_;
  cuda::ExposedStreamTime exposed_;
  int64_t calls_ = 1;  // as the host group counts them: its first was the exchange of greetings
  NcclConnection connection_;
};

// One that dies without a wait takes NCCL off the memory that was lent to it; what that means for the job is the
// announcement's to say.
class NcclCommunicator::StartedCall final : public Work::State {
 public:
  StartedCall(NcclCommunicator& communicator, Work announced)
      : communicator_(communicator), announced_(std::move(announced)) {}
  ~StartedCall() override {
    if (open_ && launched_) communicator_.connection_.abandon();
  }

  void launch(const CallArguments& call) {
    std::string title = fmt::format("{} '{}' of {} bytes, call {} of {}", name_of(call.operation), call.label,
                                    call.bytes, communicator_.calls_, communicator_.name_);
    launched_ = communicator_.connection_.launch(std::move(title), communicator_.calls_of(call));
  }

  void wait() override {
    announced_.wait();
    if (launched_) {
      communicator_.exposed_.begin();
      communicator_.connection_.resume(*launched_);
      communicator_.exposed_.end();
    }
    open_ = false;
  }

 private:
  NcclCommunicator& communicator_;
  Work announced_;
  std::optional<int64_t> launched_;
  bool open_ = true;
};

Work NcclCommunicator::start(CallArguments call) {
  auto started = std::make_unique<StartedCall>(*this, host_->announce(call));
  if (moves_data(call)) started->launch(call);
  ++calls_;
  return Work(std::move(started));
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<CallCommunicator> host, World& world,
                                                     Device& device, double timeout_seconds) {
  if (const std::string absence = nccl_absence(); !absence.empty())
    throw ConfigError("communication.backend nccl: " + absence +
                      "; install it, or use ranks of one process (--ranks N) with backend threads");
  const std::vector<Greeting> greetings = exchange_greetings(*host, device);
  refuse_shared_gpus(greetings, *host);
  return std::make_unique<NcclCommunicator>(std::move(host), greetings.front().id, world, device, timeout_seconds);
}

}  // namespace farspan
