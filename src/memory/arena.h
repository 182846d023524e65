// SPDX-License-Identifier: Apache-2.0
// Arena: record, plan, replay.
//
// A rank's step is a deterministic program, so its memory can be laid out as a compiler lays out registers. On the dry
// device the arena records every take and release; plan() packs the lifetimes into offsets; on a real device the arena
// allocates that many bytes once and answers each take with the planned address. A step that takes or releases anything
// else than the plan says stops with an error that names the buffer.
//
// Buffers taken before any program begins are resident (weights, gradients, optimizer state). A program is a named,
// repeatable sequence (one training micro-batch, a whole step, one evaluation batch); programs never overlap in time
// and share the space above the resident part.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

enum class Purpose : uint8_t { weights, gradients, optimizer, kept, workspace, communication, batch };
inline constexpr int kPurposes = 7;
std::string_view name_of(Purpose purpose);

using BytesByPurpose = std::array<int64_t, kPurposes>;

// One take or release of a program, in order.
struct ArenaEvent {
  bool release = false;
  int32_t buffer = 0;  // index into PlannedProgram::buffers
  bool operator==(const ArenaEvent&) const = default;
};

struct PlannedBuffer {
  std::string name;
  Purpose purpose = Purpose::workspace;
  int64_t bytes = 0;   // as asked for
  int64_t offset = 0;  // from the arena's start, a multiple of kArenaAlignment
};

struct PlannedProgram {
  std::string name;
  std::vector<PlannedBuffer> buffers;
  std::vector<ArenaEvent> events;
  int64_t end = 0;        // highest byte used, from the arena's start
  int64_t live_peak = 0;  // largest sum of live bytes, resident buffers included: no layout can end lower
};

struct MemoryPlan {
  std::vector<PlannedBuffer> resident;
  std::vector<PlannedProgram> programs;
  int64_t scratch_bytes = 0;    // of the device's ops (Device::scratch): the end of the allocation
  int64_t peak_bytes = 0;       // size of the one allocation
  BytesByPurpose by_purpose{};  // live bytes at the moment of the peak; padding counted as workspace
  std::string peak_program;     // where the peak is
  // Largest live total of one purpose at any moment (kept activations, communication buffers), whenever it occurs.
  BytesByPurpose largest_by_purpose{};
};

// Widest vector load of a CPU: 64; what GPU kernels and bulk copies like: 256.
inline constexpr int64_t kArenaAlignment = 256;

class Arena;

// Lays out what was recorded: fills offset, end, peak and the totals by purpose.
void lay_out(MemoryPlan& plan);

// Whether the same was recorded, so that the layouts are the same too.
bool same_recording(const MemoryPlan& a, const MemoryPlan& b);

// A taken buffer; gives it back when it goes out of scope.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // NOLINT: a buffer is used wherever a tensor is
  bool taken() const { return arena_ != nullptr; }
  void release();

 private:
  friend class Arena;
  Buffer(Arena* arena, int32_t id, Tensor tensor) : arena_(arena), id_(id), tensor_(tensor) {}
  Arena* arena_ = nullptr;
  int32_t id_ = 0;  // index among the program's buffers; kResident for resident ones
  Tensor tensor_;
};

// Takes and releases that follow each other in one program of a recording.
struct ArenaPassage {
  int program = -1;
  size_t begin = 0;  // events
  size_t end = 0;
  int32_t first_buffer = 0;
};

class Arena {
 public:
  // Records; the device must be dry.
  explicit Arena(Device& device);
  // Replays. Allocates plan.peak_bytes at once.
  Arena(Device& device, MemoryPlan plan);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Contents are undefined (a replayed buffer holds whatever was there before).
  Buffer take(std::string_view name, DType dtype, const Shape& shape, Purpose purpose);

  void begin_program(std::string_view name);
  void end_program();  // all buffers of the program must have been released

  // Recording only: all that was recorded, laid out and not yet.
  MemoryPlan plan() const;
  MemoryPlan recorded() const;
  // Recording only, within a program: what follows, up to end_passage, and the same once more. A passage releases what
  // it takes and nothing else.
  ArenaPassage passage_from_here() const;
  void end_passage(ArenaPassage& passage) const;
  void repeat(const ArenaPassage& passage);

  bool recording() const;
  // Highest byte in use so far (replaying), the scratch counted: equals plan.peak_bytes once the largest program has
  // run.
  int64_t highest_byte() const { return highest_byte_; }
  int64_t allocated_bytes() const { return memory_.bytes(); }

 private:
  friend class Buffer;
  void give_back(int32_t id) noexcept;
  PlannedBuffer& record(std::string_view name, Purpose purpose, int64_t bytes, int32_t* id);
  const PlannedBuffer& expect(std::string_view name, Purpose purpose, int64_t bytes, int32_t* id);
  PlannedProgram& program() { return plan_.programs[static_cast<size_t>(program_)]; }
  void check_on_plan() const;

  Device& device_;
  MemoryPlan plan_;
  DeviceMemory memory_;
  bool recording_ = false;
  int program_ = -1;          // index into plan_.programs; -1: resident buffers
  size_t next_event_ = 0;     // replaying: position in the program's events
  size_t next_resident_ = 0;  // replaying: position among the resident buffers
  int64_t live_ = 0;          // buffers of the current program not yet given back
  int64_t highest_byte_ = 0;
  std::string departure_;  // what a release did that the plan does not say; thrown by the next call that may throw
};

// Enters a program and leaves it again.
class ProgramScope {
 public:
  ProgramScope(Arena& arena, std::string_view name) : arena_(arena), exceptions_(std::uncaught_exceptions()) {
    arena.begin_program(name);
  }
  ~ProgramScope() noexcept(false) {
    if (std::uncaught_exceptions() == exceptions_) arena_.end_program();
  }
  ProgramScope(const ProgramScope&) = delete;
  ProgramScope& operator=(const ProgramScope&) = delete;

 private:
  Arena& arena_;
  int exceptions_;
};

}  // namespace farspan
