// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <algorithm>

#include "base/math.h"

namespace farspan {
namespace {

constexpr int32_t kResident = -1;

void* address(const DeviceMemory& memory, int64_t offset) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory.data()) + static_cast<uintptr_t>(offset));
}

}  // namespace

std::string_view name_of(Purpose purpose) {
  switch (purpose) {
    case Purpose::weights:
      return "weights";
    case Purpose::gradients:
      return "gradients";
    case Purpose::optimizer:
      return "optimizer";
    case Purpose::kept:
      return "kept";
    case Purpose::workspace:
      return "workspace";
    case Purpose::communication:
      return "communication";
    case Purpose::batch:
      return "batch";
  }
  throw InternalError("name_of: unknown purpose");
}

Buffer::Buffer(Buffer&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)), id_(other.id_), tensor_(std::exchange(other.tensor_, Tensor())) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    arena_ = std::exchange(other.arena_, nullptr);
    id_ = other.id_;
    tensor_ = std::exchange(other.tensor_, Tensor());
  }
  return *this;
}

Buffer::~Buffer() { release(); }

void Buffer::release() {
  if (arena_ != nullptr) std::exchange(arena_, nullptr)->give_back(id_);
  tensor_ = Tensor();
}

Arena::Arena(Device& device) : device_(device), memory_(device, kArenaAlignment), recording_(true) {
  FARSPAN_CHECK(device.dry(), "arena: only the dry device records a plan");
}

Arena::Arena(Device& device, MemoryPlan plan)
    : device_(device), plan_(std::move(plan)), memory_(device, plan_.peak_bytes) {
  if (device.on_cuda())
    device.use_scratch(address(memory_, plan_.peak_bytes - plan_.scratch_bytes), plan_.scratch_bytes);
}

Arena::~Arena() {
  if (!device_.on_cuda()) return;
  try {
    device_.synchronize();  // queued ops may still use the memory
  } catch (const Error&) {
    // What failed was, or will be, reported by whoever waited for it.
  }
}

bool Arena::recording() const { return recording_; }

Buffer Arena::take(std::string_view name, DType dtype, const Shape& shape, Purpose purpose) {
  check_on_plan();
  const int64_t bytes = checked_mul(shape.numel(), size_of(dtype));
  int32_t id = kResident;
  const PlannedBuffer& planned = recording_ ? record(name, purpose, bytes, &id) : expect(name, purpose, bytes, &id);
  if (program_ >= 0) ++live_;
  if (!recording_) {
    const int64_t end = planned.offset + bytes;
    highest_byte_ =
        std::max(highest_byte_, plan_.scratch_bytes > 0 ? round_up(end, kArenaAlignment) + plan_.scratch_bytes : end);
  }
  return Buffer(this, id, Tensor(address(memory_, planned.offset), dtype, shape));
}

PlannedBuffer& Arena::record(std::string_view name, Purpose purpose, int64_t bytes, int32_t* id) {
  std::vector<PlannedBuffer>& buffers = program_ < 0 ? plan_.resident : program().buffers;
  FARSPAN_CHECK(program_ >= 0 || plan_.programs.empty(), "arena: resident buffer {} taken after a program was recorded",
                name);
  if (program_ >= 0) {
    *id = static_cast<int32_t>(buffers.size());
    program().events.push_back({.release = false, .buffer = *id});
  }
  return buffers.emplace_back(PlannedBuffer{.name = std::string(name), .purpose = purpose, .bytes = bytes});
}

const PlannedBuffer& Arena::expect(std::string_view name, Purpose purpose, int64_t bytes, int32_t* id) {
  const PlannedBuffer* planned = nullptr;
  if (program_ < 0) {
    FARSPAN_CHECK(next_resident_ < plan_.resident.size(),
                  "arena: {} ({} bytes) is taken but no such resident buffer is planned", name, bytes);
    planned = &plan_.resident[next_resident_++];
  } else {
    const PlannedProgram& now = program();
    FARSPAN_CHECK(next_event_ < now.events.size(),
                  "arena: {} ({} bytes) is taken after the end of the planned program '{}'", name, bytes, now.name);
    const ArenaEvent event = now.events[next_event_++];
    planned = &now.buffers[static_cast<size_t>(event.buffer)];
    FARSPAN_CHECK(!event.release, "arena: program '{}' takes {} ({} bytes) where the plan releases {}", now.name, name,
                  bytes, planned->name);
    *id = event.buffer;
  }
  FARSPAN_CHECK(planned->name == name && planned->bytes == bytes && planned->purpose == purpose,
                "arena: {} ({} bytes, {}) is taken where the plan has {} ({} bytes, {})", name, bytes, name_of(purpose),
                planned->name, planned->bytes, name_of(planned->purpose));
  return *planned;
}

void Arena::give_back(int32_t id) noexcept {
  if (id == kResident) return;  // lives as long as the arena
  --live_;
  if (recording_) {
    program().events.push_back({.release = true, .buffer = id});
    return;
  }
  if (std::uncaught_exceptions() > 0 || !departure_.empty()) return;
  const PlannedProgram& now = program();
  const bool on_plan =
      next_event_ < now.events.size() && now.events[next_event_].release && now.events[next_event_].buffer == id;
  if (on_plan) {
    ++next_event_;
  } else {
    departure_ = fmt::format("arena: program '{}' releases {} where the plan does not", now.name,
                             now.buffers[static_cast<size_t>(id)].name);
  }
}

void Arena::check_on_plan() const { FARSPAN_CHECK(departure_.empty(), "{}", departure_); }

void Arena::begin_program(std::string_view name) {
  FARSPAN_CHECK(program_ < 0, "arena: program '{}' begins inside '{}'", name, program().name);
  const auto found = std::find_if(plan_.programs.begin(), plan_.programs.end(),
                                  [&](const PlannedProgram& p) { return p.name == name; });
  FARSPAN_CHECK((found == plan_.programs.end()) == recording_, "arena: program '{}' {}", name,
                recording_ ? "is recorded twice" : "was never planned");
  if (recording_) {
    plan_.programs.emplace_back().name = std::string(name);
    program_ = static_cast<int>(plan_.programs.size()) - 1;
  } else {
    program_ = static_cast<int>(found - plan_.programs.begin());
  }
  next_event_ = 0;
  live_ = 0;
}

void Arena::end_program() {
  check_on_plan();
  FARSPAN_CHECK(program_ >= 0, "arena: no program to end");
  FARSPAN_CHECK(live_ == 0, "arena: program '{}' ends with {} buffers not released", program().name, live_);
  FARSPAN_CHECK(recording_ || next_event_ == program().events.size(),
                "arena: program '{}' ends after {} of {} planned takes and releases; the next would be {}",
                program().name, next_event_, program().events.size(),
                program().buffers[static_cast<size_t>(program().events[next_event_].buffer)].name);
  program_ = -1;
}

ArenaPassage Arena::passage_from_here() const {
  FARSPAN_CHECK(recording_ && program_ >= 0, "arena: a passage is recorded, in a program");
  const PlannedProgram& now = plan_.programs[static_cast<size_t>(program_)];
  return {.program = program_,
          .begin = now.events.size(),
          .end = now.events.size(),
          .first_buffer = static_cast<int32_t>(now.buffers.size())};
}

void Arena::end_passage(ArenaPassage& passage) const {
  FARSPAN_CHECK(recording_ && program_ == passage.program, "arena: a passage ends where it began");
  const PlannedProgram& now = plan_.programs[static_cast<size_t>(program_)];
  passage.end = now.events.size();
  int64_t live = 0;
  for (size_t i = passage.begin; i < passage.end; ++i) {
    FARSPAN_CHECK(now.events[i].buffer >= passage.first_buffer, "arena: a passage releases {}, taken before it",
                  now.buffers[static_cast<size_t>(now.events[i].buffer)].name);
    live += now.events[i].release ? -1 : 1;
  }
  FARSPAN_CHECK(live == 0, "arena: a passage keeps {} buffers", live);
}

void Arena::repeat(const ArenaPassage& passage) {
  FARSPAN_CHECK(recording_ && program_ >= 0 && passage.program >= 0, "arena: a passage is repeated in a recording");
  const int32_t moved = static_cast<int32_t>(program().buffers.size()) - passage.first_buffer;
  for (size_t i = passage.begin; i < passage.end; ++i) {
    const PlannedProgram& from = plan_.programs[static_cast<size_t>(passage.program)];
    const ArenaEvent event = from.events[i];
    if (!event.release) {
      PlannedBuffer buffer = from.buffers[static_cast<size_t>(event.buffer)];
      program().buffers.push_back(std::move(buffer));
    }
    program().events.push_back({.release = event.release, .buffer = event.buffer + moved});
  }
}

MemoryPlan Arena::plan() const {
  MemoryPlan plan = recorded();
  lay_out(plan);
  return plan;
}

MemoryPlan Arena::recorded() const {
  FARSPAN_CHECK(recording_ && program_ < 0, "arena: a plan is made from a finished recording");
  MemoryPlan plan = plan_;
  plan.scratch_bytes = round_up(device_.scratch_bytes(), kArenaAlignment);
  return plan;
}

}  // namespace farspan
