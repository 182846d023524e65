// SPDX-License-Identifier: Apache-2.0
// Device: where a rank's maths runs and where its memory lives. An op is written as checks + cost + one body per
// device:
//
//   device.run({"rms_norm_forward", OpClass::memory, flops, bytes}, [&] { cpu::rms_norm_forward(...); });
//
// The dry device computes nothing: run() only reports the cost, and memory it hands out is an address range that is
// never touched. The same model code therefore runs on it, and what it would do can be planned before anything is
// allocated.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/accelerator.h"

namespace farspan {

enum class DeviceKind { cpu, cuda, dry };

// What bounds an op: matrix units, the attention kernels, memory traffic, or matrix units that multiply 8-bit floats.
enum class OpClass { gemm, attention, memory, gemm_fp8 };

struct OpCost {
  std::string_view op;  // a literal: "gemm", "rms_norm_forward", ...
  OpClass op_class = OpClass::memory;
  double flops = 0;  // multiply and add counted apart; attention counts visible (query, key) pairs only
  double bytes = 0;  // read plus written, each operand once
  // Bytes of Device::scratch that the op's body uses. Only ops for an accelerator ask for any.
  int64_t scratch_bytes = 0;
};

// When something ran, in seconds of std::chrono::steady_clock, also where a GPU ran it. Zeros on the dry device.
struct OpTime {
  double begin = 0;
  double seconds = 0;
};

// What a device does beside ops: phases of a step, each holding ops and other things; messages from their start to
// their end; computing that waits for them; copies from and to the host.
enum class ActivityKind { phase, communication, waiting, copy };

struct Activity {
  ActivityKind kind = ActivityKind::phase;
  std::string_view label;  // "forward", "layer 3 key/value hop 2", "to device"
  double bytes = 0;        // moved
  void* stream = nullptr;  // the GPU's stream it is queued on; null: the compute stream
};

// Sees every op a device runs and every other activity. What ran on an accelerator is seen when Device::report_timings
// is called, in the order in which it was queued.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void on_op(const OpCost& cost, OpTime time) = 0;
  virtual void on_activity(const Activity&, OpTime) {}
  // On the host, around the body of an op or activity: on an accelerator where it is queued, not where it runs.
  virtual void before(std::string_view) {}
  virtual void after() {}
};

// What a dry device stands in for.
struct DryRun {
  DeviceKind of = DeviceKind::cpu;
};

// One rank's device. Used by that rank's thread only, which makes it.
class Device {
 public:
  // `threads`: CPU threads that one op of this rank may use (at least 1; ignored by the dry device). `index`: which
  // GPU, for cuda. Throws ConfigError where there is no such GPU or the program was built without CUDA.
  Device(DeviceKind kind, int threads, int index = 0);
  explicit Device(DryRun dry);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  DeviceKind kind() const { return kind_; }
  bool dry() const { return kind_ == DeviceKind::dry; }
  // The kind whose code is run or, on the dry device, recorded: cpu or cuda.
  DeviceKind target() const { return target_; }
  bool targets_cuda() const { return target_ == DeviceKind::cuda; }
  // Ops are queued on a GPU, and its memory is not the CPU's.
  bool on_cuda() const { return kind_ == DeviceKind::cuda; }
  int threads() const { return threads_; }
  std::string_view name() const;

  // The same bits every time: no kernel is used, and none is chosen, whose result depends on timing.
  bool deterministic() const { return deterministic_; }
  void set_deterministic(bool on) { deterministic_ = on; }

  // At most one observer; null removes it. The observer must outlive its use.
  void observe(OpObserver* observer) { observer_ = observer; }

  template <typename Body>
  void run(const OpCost& cost, Body&& body) {
    if (cost.scratch_bytes > scratch_bytes_) need_scratch(cost);
    if (observer_ == nullptr) {
      if (!dry()) std::forward<Body>(body)();
      return;
    }
    if (dry()) {
      observer_->on_op(cost, {});
      return;
    }
    observer_->before(cost.op);
    Timing timing = begin_timing({.cost = cost});
    std::forward<Body>(body)();
    end_timing(std::move(timing));
    observer_->after();
  }

  // An activity, which the body carries out or, on a GPU, queues. On the dry device the body runs too and nothing is
  // observed.
  template <typename Body>
  void run_observed(const Activity& activity, Body&& body) {
    if (observer_ == nullptr || dry()) {
      std::forward<Body>(body)();
      return;
    }
    observer_->before(activity.label);
    std::optional<Timing> timing = begin_observed(activity);
    std::forward<Body>(body)();
    end_observed(std::move(timing));
    observer_->after();
  }

  // An op or an activity under way.
  struct Timing {
    OpCost cost = {};
    Activity activity = {};
    std::string label = {};  // the activity's
    bool is_op = true;
    int64_t report = 0;  // the call of report_timings that will tell of it
    int64_t begin = 0;   // marks of the accelerator
    int64_t end = 0;
    double begin_seconds = 0;  // without an accelerator: of the clock
  };
  // The same in two halves, for what is queued in one place and ends in another.
  std::optional<Timing> begin_observed(const Activity& activity);
  void end_observed(std::optional<Timing> timing);

  // Memory of the device that an op may use from its start to its end, OpCost::scratch_bytes of it; what one op leaves
  // there the next one overwrites. The dry device remembers the most that was asked for, and the arena plans it.
  void* scratch() const { return scratch_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  // The dry device plans this much at least.
  void plan_scratch(int64_t bytes) {
    if (dry() && bytes > scratch_bytes_) scratch_bytes_ = bytes;
  }
  // From now on the scratch lies here, and an op that needs more is a bug.
  void use_scratch(void* memory, int64_t bytes);

  // Waits for all that was queued. Nothing to do on a CPU.
  void synchronize();
  // cuda, with an observer: waits, and tells the observer of all since the last call.
  void report_timings();
  // cuda only.
  Accelerator& accelerator() const { return *accelerator_; }

  // The device's own T, made from the device at the first call and kept as long as the device: a library's handle, say.
  template <typename T>
  T& extension() {
    std::shared_ptr<void>& slot = extensions_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>(*this);
    return *static_cast<T*>(slot.get());
  }

 private:
  Timing begin_timing(Timing timing);
  void end_timing(Timing timing);
  void tell(Timing& timing, OpTime time);
  void need_scratch(const OpCost& cost);

  DeviceKind kind_;
  DeviceKind target_;
  int threads_;
  bool deterministic_ = false;
  OpObserver* observer_ = nullptr;
  std::unique_ptr<Accelerator> accelerator_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> extensions_;
  std::vector<Timing> timings_;
  bool timing_ = false;            // mark 0 has been set
  int64_t reports_ = 0;            // calls of report_timings
  double first_mark_seconds_ = 0;  // when it was, on the clock
  void* scratch_ = nullptr;
  int64_t scratch_bytes_ = 0;
  bool scratch_is_planned_ = false;
};

// One block of a device's memory, given back on destruction. CPU: zero-filled pages that cost nothing until touched;
// cuda: as it comes; dry: addresses only. Throws MemoryError with the size when the system refuses. Must not outlive a
// cuda device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const Device& device, int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  DeviceKind kind_ = DeviceKind::cpu;
  Accelerator* accelerator_ = nullptr;
};

// Copies between a tensor's memory, wherever its device has it, and this thread's own. Both contiguous, of `bytes`
// bytes. To the device: in the order of the queued ops, `source` may be reused at once. To the host: waits for all that
// was queued. Nothing is copied on the dry device.
void copy_to_device(Device& device, const void* source, void* target, int64_t bytes);
void copy_to_host(Device& device, const void* source, void* target, int64_t bytes);

// Cores this process may run on (its CPU affinity).
int usable_cores();

// Threads that an op of each of `ranks` thread ranks may use, so that all together use the machine's cores once.
int threads_per_rank(int ranks);

// Bytes of memory of this machine that a process could still take (MemAvailable; the cgroup's limit when lower).
int64_t available_memory_bytes();

}  // namespace farspan
