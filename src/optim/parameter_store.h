// SPDX-License-Identifier: Apache-2.0
// A rank's weights, gradients and optimizer state, and what data parallelism does with them. The ranks of a dp_cp group
// hold the same weights; each unit of the parameter table is cut in as many equal shards as the group has ranks, and
//
//   zero_stage 0   every rank holds everything; gradients are summed by all_reduce
//   zero_stage 1   master weights and moments are sharded: gradients are summed by reduce_scatter, each rank updates
//   its
//                  shards, and the new weights are gathered
//   zero_stage 2   gradients too: a unit's gradient exists while its backward runs and is summed into the shards then
//   zero_stage 3   weights too: a unit is gathered ahead of its use and released behind it
//
// All sums over ranks are fp32 in rank order. After them come the sums that tensor parallelism leaves open (weights
// that every rank of the group holds but has computed a part of the gradient for) and the one between the two copies of
// a tied embedding on the first and the last pipeline stage. Bytes received per rank and step, n = group size, N =
// elements of the table, M = micro-batches, b = bytes of the compute type:
//
//   stage 0  2 N 4 (n - 1) / n                        stage 2  (M 4 + b) N (n - 1) / n
//   stage 1  (4 + b) N (n - 1) / n                    stage 3  (M 4 + 2 M b) N (n - 1) / n, a little less where layers
//                                                              need no second gather
// Source: Rajbhandari et al., ZeRO (2020), sections 5 and 7.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "model/parameter_access.h"
#include "optim/optimizer.h"
#include "optim/unit_gradients.h"
#include "parallel/rank_context.h"

namespace farspan {

enum class StateKind { weights, gradients, first_moment, second_moment };

// Elements of a parameter's part that this rank holds: [part_begin, part_end) of the part, from `at` of its shard of
// the unit on. All of it without sharding.
struct HeldRange {
  int64_t part_begin = 0;
  int64_t part_end = 0;
  int64_t at = 0;
  int64_t length() const { return part_end - part_begin; }
};

class ParameterStore final : public ParameterAccess {
 public:
  enum class Use { training, inference };

  // Takes the resident buffers. `gradients`: where they lie in stages 0 and 1. `embedding_group` joins first and last
  // stage where a tied embedding lies on both; null elsewhere. The table, the configuration and the context outlive the
  // store.
  ParameterStore(const Config& config, const ParameterTable& table, RankContext& context, Use use,
                 GradientPlace gradients, Communicator* embedding_group);
  ~ParameterStore() override;

  void expect_weights(size_t unit) override;
  Tensor open_weights(size_t unit) override;
  void close_weights(size_t unit) override;
  Tensor weight_amax(size_t unit, const LayerTensors& weights) override;
  Gradient open_gradient(size_t unit) override;
  void close_gradient(size_t unit) override;

  // Start values, or zeros for moments; then the copies that layers read are made.
  void initialise(int64_t seed);
  // After master weights were written from outside.
  void distribute_weights();

  // A step: gradients from zero, `micro_batches` times through the model, each followed by finish_pass within the
  // program that ran it, then the sums, then the update or none, then release_gradients. From reduce_gradients on in
  // one program: that of the pass where gradients are taken when opened. Collective.
  void begin_step(int64_t micro_batches);
  void finish_pass();
  void reduce_gradients();
  UpdateResult update(int64_t step, int64_t updates);
  void release_gradients();

  // What this rank holds of a kind other than gradients, (n) f32; undefined where it has none (moments under SGD).
  Tensor state(StateKind kind) const;
  bool has(StateKind kind) const { return kind == StateKind::gradients || state(kind).defined(); }
  bool sharded() const { return sharded_; }
  HeldRange held(const Parameter& parameter) const;
  // The held elements of a parameter, a view (f32); undefined where there are none. Of gradients between
  // reduce_gradients and release_gradients.
  Tensor held_values(StateKind kind, const Parameter& parameter) const;
  // Calls body(unit, flat) with every unit's whole elements (f32) of a kind that has a state, gathered over the dp_cp
  // group where they are sharded, in a program of its own. Collective; without effect for a kind that there is none of.
  void visit_units(StateKind kind, const std::function<void(const ParameterUnit&, const Tensor&)>& body);

 private:
  struct PendingGradient;
  int shards() const { return sharded_ ? group_.size() : 1; }
  int shard() const { return sharded_ ? group_.rank() : 0; }
  Tensor unit_of(const Tensor& flat, size_t unit) const;
  Tensor shard_of(const Tensor& shards_flat, size_t unit) const;
  Tensor compute_weights() const { return compute_.taken() ? compute_.tensor() : master_.tensor(); }
  Tensor reduced_gradient(size_t unit) const {
    return sharded_ ? shard_of(gradient_shard_, unit) : gradients_.of(unit);
  }
  void gather_weights(size_t unit);
  void wait_for_weights(size_t unit);
  void start_reduce(size_t unit);
  void finish_pending();
  void sum_over_tensor_ranks();
  void sum_shared_heads();
  void sum_tied_embedding();
  double owned_sum_of_squares();
  // Over the whole model, each element once. Collective.
  double gradient_norm();

  const Config& config_;
  RankContext& context_;
  Device& device_;
  Arena& arena_;
  Communicator& group_;  // dp_cp
  Communicator* embedding_group_;
  bool sharded_;  // zero_stage above 0 and more than one rank
  int stage_;     // 0 where not sharded
  DType dtype_;

  Buffer master_;         // f32, (N / shards)
  Buffer compute_;        // (N), or (N / shards) in stage 3; undefined where the master weights serve
  Buffer compute_shard_;  // (N / shards): what is gathered from while the next step begins (overlap_param_gather)
  UnitGradients gradients_;
  Buffer gradient_shard_;  // f32 (N / shards), from stage 1 on
  Buffer square_sum_;      // f64 (1): of the gradients
  Buffer weight_amax_;     // f32 (units, kLayerMatrices): with fp8, of the weights as they are since the last update
  Buffer first_moment_;    // f32 (N / shards)
  Buffer second_moment_;

  struct OpenUnit {
    Buffer gathered;  // stage 3
    Work arrival;     // stage 3, and stages 1 and 2 with overlap_param_gather
    int uses = 0;
  };
  std::vector<OpenUnit> open_;
  std::vector<bool> measured_;                // weight_amax_ holds the unit's
  std::unique_ptr<PendingGradient> pending_;  // stages 2 and 3: the last closed one
  std::vector<int64_t> uses_left_;  // stages 0 and 1: closes until a unit's gradient is complete; below 0: summed
  std::vector<Work> reductions_;    // stages 0 and 1: started in this step
};

}  // namespace farspan
