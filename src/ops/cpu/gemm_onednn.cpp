// SPDX-License-Identifier: Apache-2.0
// The one file that includes oneDNN; builds against its 2.x and its 3.x interface.
//
// Building a primitive costs far more than a small product, so each calling thread (one rank) keeps those it has used,
// with their argument list; a call sets three addresses and runs.
#include <array>
#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "device/parallel_for.h"
#include "ops/cpu/gemm.h"

namespace farspan::cpu {
namespace {

// Far more than the distinct products of a model; a program that keeps changing its sizes starts over.
constexpr size_t kCachedPrimitives = 1024;

// Everything that a primitive depends on.
using Key = std::array<int64_t, 12>;  // both operands are of one type

Key key_of(const GemmProblem& p, int threads) {
  return {p.m,
          p.n,
          p.k,
          p.a.row_stride,
          p.a.column_stride,
          p.b.row_stride,
          p.b.column_stride,
          p.c_row_stride,
          static_cast<int64_t>(p.a.dtype),
          static_cast<int64_t>(p.c_dtype),
          p.addend != nullptr ? 1 : 0,
          threads};
}

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 14695981039346656037ull;
    for (int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 1099511628211ull;
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};

struct CachedProduct {
  dnnl::matmul primitive;
  dnnl::memory a, b, c;
  std::unordered_map<int, dnnl::memory> arguments;  // the same three memories
  std::string variant;                              // the library's name of what it runs
  std::string declined;                             // why not; empty when it runs
};

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::memory::data_type type_of(DType dtype) {
  return dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// Strides of dimensions of size 1 are free; canonical ones keep the library from misreading a layout.
dnnl::memory::desc describe(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, DType dtype) {
  if (rows == 1 && column_stride == 1) row_stride = columns;
  if (columns == 1 && row_stride == 1) column_stride = rows;
  return {{rows, columns}, type_of(dtype), dnnl::memory::dims{row_stride, column_stride}};
}

CachedProduct build(const GemmProblem& p) {
  CachedProduct product;
  try {
    const auto a = describe(p.m, p.k, p.a.row_stride, p.a.column_stride, p.a.dtype);
    const auto b = describe(p.k, p.n, p.b.row_stride, p.b.column_stride, p.b.dtype);
    const auto c = describe(p.m, p.n, p.c_row_stride, 1, p.c_dtype);
    dnnl::primitive_attr attributes;
    if (p.addend != nullptr) {
      dnnl::post_ops add_to_c;
      add_to_c.append_sum(1.0f);
      attributes.set_post_ops(add_to_c);
    }
    constexpr bool kEmptyIfUnsupported = true;
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc chosen(cpu_engine(), a, b, c, attributes, kEmptyIfUnsupported);
#else
    const dnnl::matmul::primitive_desc chosen(dnnl::matmul::desc(a, b, c), attributes, cpu_engine(),
                                              kEmptyIfUnsupported);
#endif
    if (!chosen) {
      product.declined = "no kernel for these types on this machine";
      return product;
    }
    product.variant = chosen.impl_info_str();
    if (product.variant.starts_with("ref")) {
      product.declined = "only the library's plain loops (" + product.variant + ")";
      return product;
    }
    product.primitive = dnnl::matmul(chosen);
    product.a = dnnl::memory(a, cpu_engine(), nullptr);
    product.b = dnnl::memory(b, cpu_engine(), nullptr);
    product.c = dnnl::memory(c, cpu_engine(), nullptr);
    product.arguments = {{DNNL_ARG_SRC, product.a}, {DNNL_ARG_WEIGHTS, product.b}, {DNNL_ARG_DST, product.c}};
  } catch (const dnnl::error& error) {
    product.declined = error.what();
  }
  return product;
}

CachedProduct& product_for(const GemmProblem& problem, int threads) {
  thread_local std::unordered_map<Key, CachedProduct, KeyHash> cache;
  const Key key = key_of(problem, threads);
  auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kCachedPrimitives) cache.clear();
  return cache.emplace(key, build(problem)).first->second;
}

}  // namespace

GemmOutcome gemm_onednn(Device& device, const GemmProblem& problem) {
  if (is_fp8(problem.a.dtype)) return {false, "operands are fp8"};
  // Per calling thread; a primitive is built for, and runs on, this many.
  const double flops =
      2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n) * static_cast<double>(problem.k);
  const int threads = worthwhile_threads(device, flops);
  if (omp_get_max_threads() != threads) omp_set_num_threads(threads);
  CachedProduct& product = product_for(problem, threads);
  if (!product.declined.empty()) return {false, product.declined};

  thread_local dnnl::stream stream(cpu_engine());
  product.a.set_data_handle(const_cast<void*>(problem.a.data));
  product.b.set_data_handle(const_cast<void*>(problem.b.data));
  product.c.set_data_handle(problem.c);
  try {
    product.primitive.execute(stream, product.arguments);
    stream.wait();
  } catch (const dnnl::error& error) {
    throw InternalError(
        fmt::format("gemm ({}, {}, {}): oneDNN failed: {}", problem.m, problem.n, problem.k, error.what()));
  }
  return {true, product.variant};
}

}  // namespace farspan::cpu
