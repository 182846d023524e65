// SPDX-License-Identifier: Apache-2.0
#include "optim/parameter_store.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "device/host_access.h"
#include "ops/elementwise.h"
#include "ops/fp8.h"
#include "ops/norms.h"

namespace farspan {
namespace {

constexpr int64_t kSummed = -1;

// Inference keeps whole weights unless they are meant to be sharded themselves.
int stage_for(const Config& config, ParameterStore::Use use) {
  const int stage = static_cast<int>(config.parallel.zero_stage);
  return use == ParameterStore::Use::training || stage == 3 ? stage : 0;
}

// Elements of the part that a section's rows cover. A part cut by columns is one section: all of it.
Span elements_of(const Parameter& parameter, const Section& section) {
  if (parameter.cut == Cut::columns) return {0, parameter.shape.numel()};
  const int64_t row = parameter.shape.numel() / parameter.shape[0];
  return {section.part_begin * row, (section.part_begin + section.length) * row};
}

// The held elements among `elements` of the part, as a view of the rank's shard of the unit; empty ones are undefined.
Tensor held_view(const Tensor& shard, const HeldRange& held, Span elements) {
  const int64_t begin = std::max(held.part_begin, elements.begin);
  const int64_t end = std::min(held.part_end, elements.end);
  if (begin >= end) return {};
  return shard.slice(0, held.at + begin - held.part_begin, held.at + end - held.part_begin);
}

int64_t total_elements(const std::vector<Tensor>& views) {
  int64_t total = 0;
  for (const Tensor& view : views) total += view.numel();
  return total;
}

enum class Direction { into_bucket, out_of_bucket };

void copy(Device& device, const std::vector<Tensor>& views, const Tensor& bucket, Direction direction) {
  int64_t at = 0;
  for (const Tensor& view : views) {
    const Tensor place = bucket.slice(0, at, at + view.numel());
    if (direction == Direction::into_bucket)
      cast(device, view, place);
    else
      cast(device, place, view);
    at += view.numel();
  }
}

}  // namespace

// Stages 2 and 3: a unit's gradient on its way to the shards.
struct ParameterStore::PendingGradient {
  size_t unit = 0;
  Buffer whole;  // (unit) f32
  Buffer piece;  // (unit / shards) f32
  Work work;
};

ParameterStore::ParameterStore(const Config& config, const ParameterTable& table, RankContext& context, Use use,
                               GradientPlace gradients, Communicator* embedding_group)
    : ParameterAccess(table),
      config_(config),
      context_(context),
      device_(*context.device),
      arena_(*context.arena),
      group_(context.group(Dimension::dp_cp)),
      embedding_group_(embedding_group),
      sharded_(stage_for(config, use) > 0 && group_.size() > 1),
      stage_(sharded_ ? stage_for(config, use) : 0),
      dtype_(compute_dtype(config.training.precision)),
      gradients_(device_, arena_, table, stage_ <= 1 ? gradients : GradientPlace::taken_when_opened),
      open_(table.units().size()),
      measured_(table.units().size()),
      uses_left_(table.units().size()) {
  FARSPAN_CHECK(!sharded_ || table.share().shards == group_.size(), "parameter store: a table for {} shards, {} ranks",
                table.share().shards, group_.size());
  const Shape whole = {table.flat_elements()};
  const Shape part = {table.flat_elements() / shards()};
  const auto take = [&](const char* name, DType dtype, const Shape& shape, Purpose purpose) {
    return arena_.take(name, dtype, shape, purpose);
  };
  master_ = take("weights.master", DType::f32, part, Purpose::weights);
  const bool separate = dtype_ != DType::f32 || stage_ == 1 || stage_ == 2;
  if (separate) compute_ = take("weights.compute", dtype_, stage_ == 3 ? part : whole, Purpose::weights);
  if (config.training.precision == Precision::fp8)
    weight_amax_ = take("weights.amax", DType::f32, {std::ssize(table.units()), kLayerMatrices}, Purpose::weights);
  if (use == Use::inference) return;
  if (dtype_ != DType::f32 && (stage_ == 1 || stage_ == 2))
    compute_shard_ = take("weights.compute_shard", dtype_, part, Purpose::weights);
  if (sharded_) gradient_shard_ = take("gradients.shard", DType::f32, part, Purpose::gradients);
  square_sum_ = take("gradients.square_sum", DType::f64, {1}, Purpose::gradients);
  if (config.optimizer.optimizer == OptimizerKind::adamw) {
    first_moment_ = take("optimizer.first_moment", DType::f32, part, Purpose::optimizer);
    second_moment_ = take("optimizer.second_moment", DType::f32, part, Purpose::optimizer);
  }
}

ParameterStore::~ParameterStore() {
  // Weights that nobody read again may still be on their way.
  if (std::uncaught_exceptions() > 0) return;
  try {
    for (size_t unit = 0; unit < open_.size(); ++unit) wait_for_weights(unit);
  } catch (const Error&) {
    // Another rank stopped; its failure is reported where the job ends.
  }
}

Tensor ParameterStore::unit_of(const Tensor& flat, size_t unit) const {
  const ParameterUnit& place = table().units()[unit];
  return flat.slice(0, place.begin, place.end);
}

Tensor ParameterStore::shard_of(const Tensor& shards_flat, size_t unit) const {
  const ParameterUnit& place = table().units()[unit];
  return shards_flat.slice(0, place.begin / shards(), place.end / shards());
}

HeldRange ParameterStore::held(const Parameter& parameter) const {
  const ParameterUnit& unit = table().units()[parameter.unit];
  const int64_t shard_length = unit.length() / shards();
  const int64_t first = parameter.offset - unit.begin;  // of the parameter, from the unit's start
  const int64_t begin = std::max(first, shard() * shard_length);
  const int64_t end = std::min(first + parameter.shape.numel(), (shard() + 1) * shard_length);
  if (begin >= end) return {};
  return {.part_begin = begin - first, .part_end = end - first, .at = begin - shard() * shard_length};
}

Tensor ParameterStore::held_values(StateKind kind, const Parameter& parameter) const {
  const Tensor shard =
      kind == StateKind::gradients ? reduced_gradient(parameter.unit) : shard_of(state(kind), parameter.unit);
  return held_view(shard, held(parameter), {0, parameter.shape.numel()});
}

// --- Weights. ---

void ParameterStore::gather_weights(size_t unit) {
  OpenUnit& open = open_[unit];
  open.gathered = arena_.take("weights.unit", dtype_, {table().units()[unit].length()}, Purpose::communication);
  open.arrival = group_.all_gather(shard_of(compute_weights(), unit), open.gathered.tensor(), "weights");
}

void ParameterStore::wait_for_weights(size_t unit) { open_[unit].arrival.wait(); }

void ParameterStore::expect_weights(size_t unit) {
  if (stage_ == 3 && !open_[unit].gathered.taken()) gather_weights(unit);
}

Tensor ParameterStore::open_weights(size_t unit) {
  OpenUnit& open = open_[unit];
  ++open.uses;
  if (stage_ == 3 && !open.gathered.taken()) gather_weights(unit);
  wait_for_weights(unit);
  return stage_ == 3 ? open.gathered.tensor() : unit_of(compute_weights(), unit);
}

void ParameterStore::close_weights(size_t unit) {
  OpenUnit& open = open_[unit];
  if (--open.uses == 0) open.gathered.release();
}

Tensor ParameterStore::weight_amax(size_t unit, const LayerTensors& weights) {
  if (!weight_amax_.taken()) return {};
  const auto row = static_cast<int64_t>(unit);
  const Tensor amax = weight_amax_.tensor().slice(0, row, row + 1).reshape({kLayerMatrices});
  if (!measured_[unit]) largest_magnitudes(device_, weights.matrices(), amax);
  measured_[unit] = true;
  return amax;
}

void ParameterStore::initialise(int64_t seed) {
  // The padding between parameters too, which nothing else writes.
  for (const Buffer* buffer : {&master_, &first_moment_, &second_moment_})
    if (buffer->taken()) fill(device_, buffer->tensor(), 0);
  if (!device_.dry()) {
    for (const Parameter& parameter : table().parameters()) {
      const Tensor weights = held_values(StateKind::weights, parameter);
      if (!weights.defined()) continue;
      const HeldRange range = held(parameter);
      HostFilled values(device_, weights);
      initialise_part(device_, parameter, seed, range.part_begin, range.part_end, values.tensor().data<float>());
      values.send();
    }
  }
  distribute_weights();
}

void ParameterStore::distribute_weights() {
  measured_.assign(measured_.size(), false);
  if (stage_ == 0 || stage_ == 3) {
    if (compute_.taken()) cast(device_, master_, compute_.tensor());
    return;
  }
  if (compute_shard_.taken()) cast(device_, master_, compute_shard_.tensor());
  const Tensor source = compute_shard_.taken() ? compute_shard_.tensor() : master_.tensor();
  for (size_t unit = 0; unit < open_.size(); ++unit) {
    wait_for_weights(unit);
    open_[unit].arrival = group_.all_gather(shard_of(source, unit), unit_of(compute_, unit), "new weights");
    if (!config_.parallel.overlap_param_gather) wait_for_weights(unit);
  }
}

// --- Gradients. ---

void ParameterStore::begin_step(int64_t micro_batches) {
  if (stage_ >= 2) fill(device_, gradient_shard_.tensor(), 0);
  for (size_t unit = 0; unit < uses_left_.size(); ++unit)
    uses_left_[unit] = micro_batches * table().units()[unit].gradient_uses;
}

ParameterAccess::Gradient ParameterStore::open_gradient(size_t unit) { return gradients_.open(unit); }

void ParameterStore::close_gradient(size_t unit) {
  if (stage_ <= 1) {
    if (--uses_left_[unit] == 0 && config_.parallel.overlap_grad_reduce) start_reduce(unit);
    return;
  }
  finish_pending();
  pending_ = std::make_unique<PendingGradient>();
  pending_->unit = unit;
  pending_->whole = gradients_.release(unit);
  pending_->piece =
      arena_.take("gradients.piece", DType::f32, {pending_->whole.tensor().numel() / shards()}, Purpose::gradients);
  pending_->work = group_.reduce_scatter(pending_->whole, pending_->piece.tensor(), "gradients");
  if (!config_.parallel.overlap_grad_reduce) finish_pending();
}

void ParameterStore::finish_pending() {
  if (!pending_) return;
  pending_->work.wait();
  const Tensor shard = shard_of(gradient_shard_, pending_->unit);
  add(device_, shard, pending_->piece, shard);
  pending_.reset();
}

void ParameterStore::finish_pass() { finish_pending(); }

void ParameterStore::start_reduce(size_t unit) {
  const Tensor whole = gradients_.of(unit);
  reductions_.push_back(stage_ == 0 ? group_.all_reduce(whole, "gradients")
                                    : group_.reduce_scatter(whole, shard_of(gradient_shard_, unit), "gradients"));
  uses_left_[unit] = kSummed;
}

void ParameterStore::reduce_gradients() {
  if (stage_ <= 1)
    for (size_t unit = 0; unit < open_.size(); ++unit) {
      const Gradient gradient = gradients_.open(unit);
      if (gradient.use == Accumulate::no) fill(device_, gradient.flat, 0);
      if (uses_left_[unit] != kSummed) start_reduce(unit);
    }
  for (Work& work : reductions_) work.wait();
  reductions_.clear();
  sum_over_tensor_ranks();
  sum_shared_heads();
  sum_tied_embedding();
}

void ParameterStore::release_gradients() {
  for (size_t unit = 0; unit < open_.size(); ++unit) gradients_.release(unit);
}

void ParameterStore::sum_over_tensor_ranks() {
  std::vector<Tensor> views;
  for (const Parameter& parameter : table().parameters()) {
    if (parameter.tensor_gradient != TensorGradient::partial) continue;
    const Tensor view = held_values(StateKind::gradients, parameter);
    if (view.defined()) views.push_back(view);
  }
  if (views.empty()) return;
  const Buffer bucket =
      arena_.take("gradients.tensor_partial", DType::f32, {total_elements(views)}, Purpose::communication);
  copy(device_, views, bucket, Direction::into_bucket);
  context_.group(Dimension::tp).all_reduce(bucket, "gradients of shared weights").wait();
  copy(device_, views, bucket, Direction::out_of_bucket);
}

// Each key/value head has a row of a bucket; a rank adds its share to its head's row and reads the sum back.
void ParameterStore::sum_shared_heads() {
  std::vector<Tensor> views;
  for (const Parameter& parameter : table().parameters()) {
    if (parameter.tensor_gradient != TensorGradient::shared_heads) continue;
    for (const Section& section : parameter.sections) {
      if (!section.shared_head) continue;
      const Tensor view = held_view(reduced_gradient(parameter.unit), held(parameter), elements_of(parameter, section));
      if (view.defined()) views.push_back(view);
    }
  }
  if (views.empty()) return;
  const int64_t heads = config_.model.num_query_groups;
  const int64_t length = total_elements(views);
  const ModelShare& share = table().share();
  const int64_t head = key_value_heads_of(config_.model, share.tensor_size, share.tensor_rank).begin;
  const Buffer bucket = arena_.take("gradients.shared_heads", DType::f32, {heads * length}, Purpose::communication);
  fill(device_, bucket.tensor(), 0);
  const Tensor row = bucket.tensor().slice(0, head * length, (head + 1) * length);
  copy(device_, views, row, Direction::into_bucket);
  context_.group(Dimension::tp).all_reduce(bucket, "gradients of shared key/value heads").wait();
  copy(device_, views, row, Direction::out_of_bucket);
}

void ParameterStore::sum_tied_embedding() {
  if (embedding_group_ == nullptr) return;
  embedding_group_->all_reduce(reduced_gradient(table().embedding_unit()), "gradient of the tied embedding").wait();
}

// --- Norm and update. ---

double ParameterStore::owned_sum_of_squares() {
  std::vector<Tensor> views;
  for (const Parameter& parameter : table().parameters()) {
    for (const Section& section : parameter.sections) {
      if (!section.owned) continue;
      const Tensor view = held_view(reduced_gradient(parameter.unit), held(parameter), elements_of(parameter, section));
      if (view.defined()) views.push_back(view);
    }
  }
  double sum = 0;
  copy_to_device(device_, &sum, square_sum_.tensor().raw(), square_sum_.tensor().bytes());
  sum_of_squares(device_, views, square_sum_);
  copy_to_host(device_, square_sum_.tensor().raw(), &sum, square_sum_.tensor().bytes());
  return sum;
}

double ParameterStore::gradient_norm() {
  // Ranks of a dp_cp group that hold the same gradients count them once.
  double sum = sharded_ || group_.rank() == 0 ? owned_sum_of_squares() : 0.0;
  Communicator& world = context_.group(Dimension::world);
  world.all_reduce(Tensor(&sum, DType::f64, {1}), "gradient norm").wait();
  return std::sqrt(sum);
}

UpdateResult ParameterStore::update(int64_t step, int64_t updates) {
  const OptimizerStep rule(config_.optimizer, step, updates, gradient_norm());
  if (rule.result().skipped) return rule.result();
  for (size_t unit = 0; unit < open_.size(); ++unit) wait_for_weights(unit);
  const bool gathers = stage_ == 1 || stage_ == 2;
  const Tensor copies = compute_shard_.taken()         ? compute_shard_.tensor()
                        : !gathers && compute_.taken() ? compute_.tensor()
                                                       : Tensor();
  std::vector<UpdateOperands> operands;
  for (const Parameter& parameter : table().parameters()) {
    const Tensor gradient = held_values(StateKind::gradients, parameter);
    if (!gradient.defined()) continue;
    const auto view = [&](const Tensor& state) {
      return state.defined() ? held_view(shard_of(state, parameter.unit), held(parameter), {0, parameter.shape.numel()})
                             : Tensor();
    };
    operands.push_back({.gradient = gradient,
                        .master = view(master_),
                        .first_moment = view(first_moment_),
                        .second_moment = view(second_moment_),
                        .compute = view(copies),
                        .decay = parameter.decay});
  }
  rule.apply(device_, operands);
  measured_.assign(measured_.size(), false);
  if (gathers) distribute_weights();
  return rule.result();
}

// --- State as others see it. ---

Tensor ParameterStore::state(StateKind kind) const {
  switch (kind) {
    case StateKind::weights:
      return master_;
    case StateKind::gradients:
      break;
    case StateKind::first_moment:
      return first_moment_;
    case StateKind::second_moment:
      return second_moment_;
  }
  throw InternalError("parameter store: a kind of state that lies in no one buffer");
}

void ParameterStore::visit_units(StateKind kind, const std::function<void(const ParameterUnit&, const Tensor&)>& body) {
  const Tensor source = state(kind);
  if (!source.defined()) return;
  if (!sharded_) {
    for (size_t unit = 0; unit < open_.size(); ++unit)
      body(table().units()[unit], HostValues(device_, unit_of(source, unit)).tensor());
    return;
  }
  const ProgramScope program(arena_, "gather state");
  for (size_t unit = 0; unit < open_.size(); ++unit) {
    const Buffer whole =
        arena_.take("state.unit", DType::f32, {table().units()[unit].length()}, Purpose::communication);
    group_.all_gather(shard_of(source, unit), whole.tensor(), "state").wait();
    body(table().units()[unit], HostValues(device_, whole).tensor());
  }
}

}  // namespace farspan
