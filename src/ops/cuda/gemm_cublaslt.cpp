// SPDX-License-Identifier: Apache-2.0
// Asking the library for an algorithm costs far more than queuing a small product, so each device keeps those it has
// used, with the descriptions of their matrices; a call sets four addresses and runs.
#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <optional>
#include <unordered_map>

#include "ops/cuda/cublaslt.h"
#include "ops/cuda/ops.h"

namespace farspan::cuda {
namespace {

// More than the library ever offers for the products of a model (8 to 12 on Hopper).
constexpr int kCandidates = 16;
// Far more than the distinct products of a model; a program that keeps changing its sizes starts over.
constexpr size_t kCachedProducts = 1024;
// A product below this takes some 20 us on Hopper, as long as it takes to queue it: not worth timing.
constexpr double kWorthTiming = 1e10;

// Everything that the choice of an algorithm depends on.
using Key = std::array<int64_t, 15>;

Key key_of(const GemmProblem& p, const std::array<uint32_t, 4>& aligned) {
  Key key = {p.m,
             p.n,
             p.k,
             p.a.row_stride,
             p.a.column_stride,
             p.b.row_stride,
             p.b.column_stride,
             p.c_row_stride,
             static_cast<int64_t>(p.a.dtype),
             static_cast<int64_t>(p.b.dtype),
             static_cast<int64_t>(p.c_dtype),
             p.addend == nullptr ? 0 : (p.addend == p.c ? 1 : 2)};
  key[12] = static_cast<int64_t>(aligned[0]) << 16 | aligned[1];
  key[13] = static_cast<int64_t>(aligned[2]) << 16 | aligned[3];
  key[14] = p.fast_accumulation ? 1 : 0;
  return key;
}

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 14695981039346656037ull;
    for (const int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 1099511628211ull;
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};

struct Product {
  Matmul matmul;
  MatmulAlgorithm algorithm = {};
  std::string detail = {};    // of the algorithm
  std::string declined = {};  // why not; empty when it runs
};

// One device's: its handle, and what it has chosen so far.
class Products {
 public:
  explicit Products(Device& device) : library_(device) {}

  const CublasLt& cublaslt() const { return library_; }
  Product& product_for(const GemmProblem& problem, const MatmulRun& run);
  GemmChoice choice = GemmChoice::timed;

 private:
  Product choose(const GemmProblem& problem, const MatmulRun& run, const std::array<uint32_t, 4>& aligned) const;

  CublasLt library_;
  std::unordered_map<Key, Product, KeyHash> cache_;
};

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f8e4m3:
      return CUDA_R_8F_E4M3;
    case DType::f8e5m2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_32F;
  }
}

// The operand, read by columns, is its own transpose.
struct Transposed {
  MatmulMatrix matrix;
  cublasOperation_t operation = CUBLAS_OP_N;
};
Transposed transposed(const GemmOperand& operand, int64_t rows, int64_t columns) {
  const bool by_rows = operand.column_stride == 1;
  Transposed found;
  found.operation = by_rows ? CUBLAS_OP_N : CUBLAS_OP_T;
  found.matrix.type = type_of(operand.dtype);
  found.matrix.rows = by_rows ? columns : rows;
  found.matrix.columns = by_rows ? rows : columns;
  // A single column may come with any stride.
  found.matrix.stride = std::max(by_rows ? operand.row_stride : operand.column_stride, found.matrix.rows);
  return found;
}

Matmul matmul_of(const GemmProblem& p) {
  const Transposed b = transposed(p.b, p.k, p.n), a = transposed(p.a, p.m, p.k);
  const MatmulMatrix c{type_of(p.c_dtype), p.n, p.m, std::max(p.c_row_stride, p.n)};
  return {b.matrix, b.operation, a.matrix, a.operation, c, c};
}

// Of fp8 operands; the library reads the scales when the product runs.
void set_scales(Matmul& matmul, const GemmProblem& p) {
  if (p.a.scale == nullptr) return;
  matmul.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast_accumulation));
  matmul.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale);
  matmul.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale);
}

MatmulRun run_of(const GemmProblem& p) {
  const bool adds = p.addend != nullptr;
  return {.a = p.b.data, .b = p.a.data, .c = adds ? p.addend : p.c, .d = p.c, .beta = adds ? 1.0f : 0.0f};
}

Product Products::choose(const GemmProblem& problem, const MatmulRun& run,
                         const std::array<uint32_t, 4>& aligned) const {
  Product product{matmul_of(problem)};
  set_scales(product.matmul, problem);
  const std::vector<MatmulAlgorithm> found = library_.algorithms(product.matmul, aligned, kCandidates);
  if (found.empty()) {
    product.declined = "no algorithm for these types, strides and addresses";
    return product;
  }
  const double flops =
      2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n) * static_cast<double>(problem.k);
  const bool timed = choice == GemmChoice::timed && flops >= kWorthTiming && found.size() > 1;
  const int chosen = timed ? library_.fastest(product.matmul, found, run) : 0;
  if (chosen < 0) {
    product.declined = "every algorithm failed";
    return product;
  }
  product.algorithm = found[static_cast<size_t>(chosen)];
  product.detail = fmt::format("{}{} {} of {}", description_of(product.algorithm), timed ? ", timed" : ", candidate",
                               chosen + 1, found.size());
  return product;
}

Product& Products::product_for(const GemmProblem& problem, const MatmulRun& run) {
  const std::array<uint32_t, 4> aligned = alignments(run);
  const Key key = key_of(problem, aligned);
  const auto found = cache_.find(key);
  if (found != cache_.end()) return found->second;
  if (cache_.size() >= kCachedProducts) cache_.clear();
  return cache_.emplace(key, choose(problem, run, aligned)).first->second;
}

// Where the rows of C lie at another distance than those of D, the library has kernels that fault on odd ones (a bf16 C
// of stride 46 and D of 43, version 13.0). So such an addend is copied to its place first.
void put_addend_in_place(Device& device, GemmProblem& p) {
  if (p.addend == nullptr || p.addend_row_stride == p.c_row_stride) return;
  const auto bytes = [&](int64_t elements) { return static_cast<size_t>(elements * size_of(p.c_dtype)); };
  FARSPAN_CUDA(cudaMemcpy2DAsync(p.c, bytes(p.c_row_stride), p.addend, bytes(p.addend_row_stride), bytes(p.n),
                                 static_cast<size_t>(p.m), cudaMemcpyDeviceToDevice, compute_stream(device)));
  p.addend = p.c;
  p.addend_row_stride = p.c_row_stride;
}

}  // namespace

GemmOutcome gemm_cublaslt(Device& device, const GemmProblem& wanted) {
  if (wanted.k == 0) return {false, "nothing to sum"};
  GemmProblem problem = wanted;
  put_addend_in_place(device, problem);
  Products& products = device.extension<Products>();
  const MatmulRun run = run_of(problem);
  Product& product = products.product_for(problem, run);
  if (!product.declined.empty()) return {false, product.declined};
  set_scales(product.matmul, problem);
  FARSPAN_CUBLAS(products.cublaslt().run(product.matmul, product.algorithm, run));
  return {true, product.detail};
}

void set_gemm_choice(Device& device, GemmChoice choice) { device.extension<Products>().choice = choice; }

}  // namespace farspan::cuda
