// SPDX-License-Identifier: Apache-2.0
// More elements than 32 bits count, in one tensor. Only where a GPU has the memory: on a CPU the far rows of the other
// tests say the same in less.
#include <gtest/gtest.h>

#include "ops/elementwise.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

constexpr int64_t kCount = (int64_t{1} << 31) + 50'000'003;
// Around every boundary of 32 bits of elements or bytes, and the last element.
constexpr int64_t kPlaces[] = {
    0, 7, (int64_t{1} << 30) - 1, int64_t{1} << 30, (int64_t{1} << 31) - 1, int64_t{1} << 31, kCount - 1};

TEST(Large, B106_CastsAndScalesMoreThanTwoToThe31Elements) {
  if (!test::testing_cuda()) GTEST_SKIP() << "for GPUs";
  constexpr int64_t kNeeded = kCount * 6 + (int64_t{1} << 30);
  if (cuda_free_bytes(0) < kNeeded) GTEST_SKIP() << "needs " << kNeeded << " bytes of free GPU memory";
  Device device(DeviceKind::cuda, 1);
  const DeviceMemory narrow_memory(device, kCount * 2), wide_memory(device, kCount * 4);
  const Tensor narrow(narrow_memory.data(), DType::bf16, Shape{kCount});
  const Tensor wide(wide_memory.data(), DType::f32, Shape{kCount});
  fill(device, narrow, 1.5);
  float expected = 2;
  for (const int64_t place : kPlaces) {
    const BFloat16 value = to_bfloat16(expected++);
    copy_to_device(device, &value, narrow.slice(0, place, place + 1).raw(), 2);
  }
  fill(device, wide, -1);
  cast(device, narrow, wide);
  scale(device, wide, 2);
  const auto element = [&](int64_t place) {
    float found = 0;
    copy_to_host(device, wide.slice(0, place, place + 1).raw(), &found, 4);
    return found;
  };
  expected = 2;
  for (const int64_t place : kPlaces) EXPECT_EQ(element(place), 2 * expected++) << place;
  for (const int64_t place : {int64_t{1}, int64_t{1} << 29, kCount - 2}) EXPECT_EQ(element(place), 3) << place;
}

}  // namespace
}  // namespace farspan
