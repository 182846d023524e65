// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/math.h"
#include "config/checks.h"
#include "config/validate.h"

namespace farspan {
namespace {

void check_rank_order(const std::string& order, Reasons& reasons) {
  std::array<std::string_view, 4> axes = {"cp", "dp", "pp", "tp"};  // sorted
  bool found_order = false;
  do {
    found_order = found_order || order == fmt::format("{}", fmt::join(axes, "-"));
  } while (std::next_permutation(axes.begin(), axes.end()));
  if (!found_order) {
    reasons.add("rank_order \"{}\" must name tp, cp, dp and pp once each, joined by dashes, such as tp-cp-dp-pp",
                order);
  }
}

// What can be said of the sizes of a2a+p2p without the heads.
void check_hierarchy(const ParallelConfig& parallel, Reasons& reasons) {
  const std::vector<int64_t>& sizes = parallel.hierarchical_context_parallel_sizes;
  if (sizes.empty()) return;
  const int64_t cp = parallel.context_parallel_size;
  const std::string found = fmt::format("hierarchical_context_parallel_sizes [{}]", fmt::join(sizes, ", "));
  if (!uses_comm_type(parallel, CpCommType::a2a_p2p)) {
    reasons.add("{} does nothing without cp_comm_type a2a+p2p; use that, or leave the sizes out", found);
    return;
  }
  std::vector<std::string> works;
  for (int64_t inner : divisors_near(cp, sizes[0])) works.push_back(fmt::format("[{}, {}]", inner, cp / inner));
  const bool good = sizes.size() == 2 && sizes[0] >= 1 && sizes[1] >= 1 && sizes[0] <= cp && sizes[1] <= cp &&
                    sizes[0] * sizes[1] == cp;
  if (!good) {
    reasons.add(
        "{} must be the all-to-all's ranks and the ring's, with the product context_parallel_size {}; use {}, "
        "or leave the sizes out",
        found, cp, fmt::join(works, " or "));
  }
}

void check_switches(const ParallelConfig& parallel, Reasons& reasons) {
  if (parallel.zero_stage < 0 || parallel.zero_stage > 3)
    reasons.add("zero_stage {} is none; use 0, 1, 2 or 3", parallel.zero_stage);
  if (parallel.sequence_parallel && parallel.tensor_model_parallel_size == 1) {
    reasons.add(
        "sequence_parallel true does nothing with tensor_model_parallel_size 1: it cuts norms and residuals over the "
        "tensor-parallel ranks; use tensor_model_parallel_size 2 or more, or sequence_parallel false");
  }
  const int64_t pp = parallel.pipeline_model_parallel_size;
  for (const auto& [name, layers] :
       {std::pair{"num_layers_per_virtual_pipeline_stage", parallel.num_layers_per_virtual_pipeline_stage},
        std::pair{"decoder_first_pipeline_num_layers", parallel.decoder_first_pipeline_num_layers},
        std::pair{"decoder_last_pipeline_num_layers", parallel.decoder_last_pipeline_num_layers}}) {
    if (size_fits(name, layers, 0, reasons) && layers > 0 && pp == 1) {
      reasons.add(
          "{} {} does nothing with pipeline_model_parallel_size 1; use pipeline_model_parallel_size 2 or more, "
          "or {} 0",
          name, layers, name);
    }
  }
}

}  // namespace

bool uses_comm_type(const ParallelConfig& parallel, CpCommType type) {
  return std::find(parallel.cp_comm_type.begin(), parallel.cp_comm_type.end(), type) != parallel.cp_comm_type.end();
}

ResolvedSizes check_grid(const ParallelConfig& parallel, int world, Reasons& reasons) {
  const int64_t tp = parallel.tensor_model_parallel_size;
  const int64_t cp = parallel.context_parallel_size;
  const int64_t pp = parallel.pipeline_model_parallel_size;
  const bool tp_fits = size_fits("tensor_model_parallel_size", tp, 1, reasons);
  const bool cp_fits = size_fits("context_parallel_size", cp, 1, reasons);
  const bool pp_fits = size_fits("pipeline_model_parallel_size", pp, 1, reasons);
  check_rank_order(parallel.rank_order, reasons);
  check_switches(parallel, reasons);
  if (cp_fits) check_hierarchy(parallel, reasons);

  ResolvedSizes sizes;
  sizes.world_size = world;
  if (world < 1) reasons.add("world size {} is too small; use --ranks 1 or more", world);
  if (world < 1 || !tp_fits || !cp_fits || !pp_fits) return sizes;

  int64_t model_ranks = 0;  // of one copy of the model
  if (__builtin_mul_overflow(tp * cp, pp, &model_ranks)) model_ranks = std::numeric_limits<int64_t>::max();
  if (world % model_ranks == 0) {
    sizes.data_parallel_size = world / model_ranks;
    return sizes;
  }
  std::vector<std::string> factors;
  if (tp > 1) factors.push_back(fmt::format("tensor_model_parallel_size {}", tp));
  if (cp > 1) factors.push_back(fmt::format("context_parallel_size {}", cp));
  if (pp > 1) factors.push_back(fmt::format("pipeline_model_parallel_size {}", pp));
  const std::string works = model_ranks > kMostRanks
                                ? "use smaller parallel sizes"
                                : fmt::format("use {} ranks", either(multiples_near(world, model_ranks)));
  reasons.add("world {}, need a multiple of {} ({}); {}", world, model_ranks, fmt::join(factors, " * "), works);
  return sizes;
}

}  // namespace farspan
