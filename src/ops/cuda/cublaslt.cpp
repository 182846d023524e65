// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/cublaslt.h"

#include <algorithm>
#include <cfloat>
#include <fmt/format.h>

#include "device/cuda/timed_event.h"
#include "ops/cuda/scratch.h"

namespace farspan::cuda {
namespace {

// After two runs of each algorithm (the first loads it), those slower than the best by more than this are out.
constexpr float kStillInTheRace = 1.15f;
// The rest run in turn, so that all meet the same clocks, until about this long has passed; the middle time counts. A
// model has some 15 products, so a first step grows by about a second.
constexpr float kRaceMilliseconds = 25;
constexpr int kFewestRounds = 3, kMostRounds = 9;
// Under a power limit the clock follows the energy of a product, which a race of milliseconds does not see, and by
// which the library's first algorithm is a good one: another must be faster than it by this. On an H200 the timed
// choice, once the clock has settled, is 2 % faster on average than the first, up to 13 %; without this margin it was
// at times up to 5 % slower.
constexpr float kWorthLeavingTheFirst = 1.02f;

cublasLtMatrixLayoutOpaque_t layout_of(const MatmulMatrix& matrix) {
  cublasLtMatrixLayoutOpaque_t layout;
  FARSPAN_CUBLAS(cublasLtMatrixLayoutInit(&layout, matrix.type, static_cast<uint64_t>(matrix.rows),
                                          static_cast<uint64_t>(matrix.columns), matrix.stride));
  return layout;
}

template <typename Value>
Value config_of(const MatmulAlgorithm& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  Value value{};
  size_t written = 0;
  FARSPAN_CUBLAS(cublasLtMatmulAlgoConfigGetAttribute(&algorithm.algo, attribute, &value, sizeof(value), &written));
  return value;
}

}  // namespace

void throw_cublas_failure(cublasStatus_t status, const char* statement, const char* file, int line) {
  throw InternalError(fmt::format("cuBLASLt: {} ({}) in {} at {}:{}", cublasLtGetStatusString(status),
                                  cublasLtGetStatusName(status), statement, file, line));
}

Matmul::Matmul(const MatmulMatrix& a, cublasOperation_t transpose_a, const MatmulMatrix& b,
               cublasOperation_t transpose_b, const MatmulMatrix& c, const MatmulMatrix& d)
    : a_(layout_of(a)), b_(layout_of(b)), c_(layout_of(c)), d_(layout_of(d)) {
  // Products of fp32 operands are true fp32 ones, not TF32.
  FARSPAN_CUBLAS(cublasLtMatmulDescInit(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(transpose_a));
  set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(transpose_b));
}

std::array<uint32_t, 4> alignments(const MatmulRun& run) {
  const auto of = [](const void* address) {
    uint32_t alignment = 256;
    while (reinterpret_cast<uintptr_t>(address) % alignment != 0) alignment /= 2;
    return alignment;
  };
  return {of(run.a), of(run.b), of(run.c), of(run.d)};
}

CublasLt::CublasLt(Device& device) : device_(device) { FARSPAN_CUBLAS(cublasLtCreate(&handle_)); }

CublasLt::~CublasLt() {
  if (handle_ != nullptr) cublasLtDestroy(handle_);
}

std::vector<MatmulAlgorithm> CublasLt::algorithms(const Matmul& matmul, const std::array<uint32_t, 4>& aligned,
                                                  int most) const {
  cublasLtMatmulPreferenceOpaque_t preference;
  FARSPAN_CUBLAS(cublasLtMatmulPreferenceInit(&preference));
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    FARSPAN_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmScratchBytes));
  // Parts of a split k are added up in fp32, in the workspace, in order.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned[0]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned[1]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned[2]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned[3]);

  std::vector<MatmulAlgorithm> found(static_cast<size_t>(most));
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_, matmul.operation(), matmul.a(), matmul.b(), matmul.c(), matmul.d(),
                                     &preference, most, found.data(), &count);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) FARSPAN_CUBLAS(status);
  found.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<size_t>(count) : 0);
  std::erase_if(found, [](const MatmulAlgorithm& algorithm) { return algorithm.state != CUBLAS_STATUS_SUCCESS; });
  return found;
}

cublasStatus_t CublasLt::run(const Matmul& matmul, const MatmulAlgorithm& algorithm, const MatmulRun& run) const {
  return cublasLtMatmul(handle_, matmul.operation(), &run.alpha, run.a, matmul.a(), run.b, matmul.b(), &run.beta, run.c,
                        matmul.c(), run.d, matmul.d(), &algorithm.algo, device_.scratch(),
                        static_cast<size_t>(kGemmScratchBytes), compute_stream(device_));
}

int CublasLt::fastest(const Matmul& matmul, const std::vector<MatmulAlgorithm>& algorithms,
                      const MatmulRun& run) const {
  MatmulRun timed = run;
  // A product that adds to c in place would add to it once per run; with this factor it adds less than 1e-30.
  if (timed.beta != 0 && timed.c == timed.d) timed.alpha = FLT_MIN;

  TimedEvent begin, end;
  const cudaStream_t stream = compute_stream(device_);
  const auto milliseconds = [&](size_t i) {
    begin.record(stream);
    if (this->run(matmul, algorithms[i], timed) != CUBLAS_STATUS_SUCCESS) return FLT_MAX;
    end.record(stream);
    return end.milliseconds_since(begin);
  };

  std::vector<float> alone(algorithms.size(), FLT_MAX);
  for (size_t i = 0; i < algorithms.size(); ++i)
    if (milliseconds(i) != FLT_MAX) alone[i] = milliseconds(i);
  const float best = *std::min_element(alone.begin(), alone.end());
  if (best == FLT_MAX) return -1;

  std::vector<size_t> racing;
  for (size_t i = 0; i < algorithms.size(); ++i)
    if (alone[i] <= best * kStillInTheRace) racing.push_back(i);
  const float round = best * static_cast<float>(racing.size());
  const int rounds = std::clamp(static_cast<int>(kRaceMilliseconds / round), kFewestRounds, kMostRounds);
  std::vector<std::vector<float>> times(algorithms.size());
  for (int i = 0; i < rounds; ++i)
    for (const size_t racer : racing) times[racer].push_back(milliseconds(racer));

  const auto cost = [&](size_t racer) {
    std::vector<float>& all = times[racer];
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    std::nth_element(all.begin(), middle, all.end());
    return racer == 0 ? *middle : *middle * kWorthLeavingTheFirst;
  };
  return static_cast<int>(
      *std::min_element(racing.begin(), racing.end(), [&](size_t i, size_t j) { return cost(i) < cost(j); }));
}

std::string description_of(const MatmulAlgorithm& algorithm) {
  return fmt::format("algorithm {}, tile {}, cluster {}, stages {}, split-K {}",
                     config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID),
                     config_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
                     config_of<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
                     config_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                     config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM));
}

}  // namespace farspan::cuda
