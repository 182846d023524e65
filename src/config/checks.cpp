// SPDX-License-Identifier: Apache-2.0
#include "config/checks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/math.h"

namespace farspan {
namespace {

constexpr size_t kMostAlternatives = 8;

}  // namespace

bool size_fits(std::string_view name, int64_t value, int64_t least, Reasons& reasons) {
  if (value < least) reasons.add("{} {} is too small; use {} or more", name, value, least);
  if (value > kLargestSize) reasons.add("{} {} is too large; use at most {}", name, value, kLargestSize);
  return value >= least && value <= kLargestSize;
}

void check_not_negative(std::string_view name, double value, Reasons& reasons) {
  if (!(value >= 0) || !std::isfinite(value)) reasons.add("{} {} must not be negative; use 0 or more", name, value);
}

void check_positive(std::string_view name, double value, Reasons& reasons) {
  if (!(value > 0) || !std::isfinite(value)) reasons.add("{} {} must be above 0", name, value);
}

void check_fraction(std::string_view name, double value, std::string_view works, Reasons& reasons) {
  if (!(value >= 0 && value < 1)) reasons.add("{} {} must be at least 0 and below 1, such as {}", name, value, works);
}

std::vector<int64_t> multiples_near(int64_t value, int64_t multiple) {
  std::vector<int64_t> near;
  if (value >= multiple) near.push_back(round_down(value, multiple));
  near.push_back(round_down(value, multiple) + multiple);
  return near;
}

std::vector<int64_t> divisors_of(int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d * d <= number; ++d) {
    if (number % d != 0) continue;
    divisors.push_back(d);
    if (d != number / d) divisors.push_back(number / d);
  }
  std::sort(divisors.begin(), divisors.end());
  return divisors;
}

std::vector<int64_t> nearest(std::vector<int64_t> fitting, int64_t wanted) {
  std::sort(fitting.begin(), fitting.end(),
            [&](int64_t a, int64_t b) { return std::abs(a - wanted) < std::abs(b - wanted); });
  if (fitting.size() > kMostAlternatives) fitting.resize(kMostAlternatives);
  std::sort(fitting.begin(), fitting.end());
  return fitting;
}

std::vector<int64_t> divisors_near(int64_t number, int64_t wanted) { return nearest(divisors_of(number), wanted); }

}  // namespace farspan
