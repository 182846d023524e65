// SPDX-License-Identifier: Apache-2.0
#include "ops/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

void check_spec(const RopeSpec& spec) {
  using Scaling = RopeSpec::Scaling;
  const auto require = [](bool condition, std::string_view what, double found, std::string_view expected) {
    if (!condition) throw ConfigError(fmt::format("rotary embedding: {} is {}; expected {}", what, found, expected));
  };
  require(spec.head_dim > 0 && spec.head_dim % 2 == 0, "the head size", static_cast<double>(spec.head_dim),
          "an even number, since channels turn in pairs");
  require(spec.base > 1, "the base", spec.base, "more than 1");
  if (spec.scaling == Scaling::none) return;
  require(spec.factor >= 1, "the scaling factor", spec.factor, "at least 1");
  require(spec.scaling != Scaling::ntk || spec.head_dim > 2, "the head size", static_cast<double>(spec.head_dim),
          "more than 2 for ntk scaling");
  if (spec.scaling != Scaling::yarn && spec.scaling != Scaling::llama3) return;
  require(spec.original_max_position > 0, "the original maximum position", spec.original_max_position, "more than 0");
  if (spec.scaling == Scaling::yarn) {
    require(spec.beta_slow > 0, "beta_slow", spec.beta_slow, "more than 0");
    require(spec.beta_fast > spec.beta_slow, "beta_fast", spec.beta_fast, "more than beta_slow");
  } else {
    require(spec.low_freq_factor > 0, "low_freq_factor", spec.low_freq_factor, "more than 0");
    require(spec.high_freq_factor > spec.low_freq_factor, "high_freq_factor", spec.high_freq_factor,
            "more than low_freq_factor");
  }
}

// YaRN's weight of the divided frequency for pair i: 0 for pairs that turn beta_fast times or more within the original
// context, 1 for those that turn beta_slow times or fewer. A pair at (real) index p turns
// original_max_position / (2 pi base^(2p / D)) times; solved for p.
double yarn_interpolated_share(const RopeSpec& spec, int64_t pair) {
  const double dim = static_cast<double>(spec.head_dim);
  const auto pair_that_turns = [&](double turns) {
    return dim * std::log(spec.original_max_position / (turns * 2 * std::numbers::pi)) / (2 * std::log(spec.base));
  };
  const double low = std::max(std::floor(pair_that_turns(spec.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_that_turns(spec.beta_slow)), dim - 1);
  if (high == low) high += 0.001;  // as the source: a step rather than a division by zero
  return std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
}

// Llama 3.1's frequency: kept, divided, or a mean of both weighted by where the wavelength lies.
double llama3_frequency(const RopeSpec& spec, double frequency) {
  const double turns = spec.original_max_position * frequency / (2 * std::numbers::pi);
  if (turns > spec.high_freq_factor) return frequency;
  if (turns < spec.low_freq_factor) return frequency / spec.factor;
  const double kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor);
  return (1 - kept) * frequency / spec.factor + kept * frequency;
}

template <typename T>
void turn_half_split(T* x, const float* cosine, const float* sine, float sign, int64_t pairs) {
  T* second = x + pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = to_float(x[i]), b = to_float(second[i]);
    const float s = sign * sine[i];
    x[i] = from_float<T>(a * cosine[i] - b * s);
    second[i] = from_float<T>(b * cosine[i] + a * s);
  }
}

template <typename T>
void turn_interleaved(T* x, const float* cosine, const float* sine, float sign, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    const float s = sign * sine[i];
    x[2 * i] = from_float<T>(a * cosine[i] - b * s);
    x[2 * i + 1] = from_float<T>(b * cosine[i] + a * s);
  }
}

}  // namespace

std::vector<double> rope_inverse_frequencies(const RopeSpec& spec) {
  using Scaling = RopeSpec::Scaling;
  check_spec(spec);
  const double dim = static_cast<double>(spec.head_dim);
  const double base = spec.scaling == Scaling::ntk ? spec.base * std::pow(spec.factor, dim / (dim - 2)) : spec.base;
  std::vector<double> frequencies;
  for (int64_t pair = 0; pair < spec.head_dim / 2; ++pair) {
    const double frequency = std::pow(base, -2.0 * static_cast<double>(pair) / dim);
    switch (spec.scaling) {
      case Scaling::none:
      case Scaling::ntk:
        frequencies.push_back(frequency);
        break;
      case Scaling::linear:
        frequencies.push_back(frequency / spec.factor);
        break;
      case Scaling::llama3:
        frequencies.push_back(llama3_frequency(spec, frequency));
        break;
      case Scaling::yarn: {
        const double share = yarn_interpolated_share(spec, pair);
        frequencies.push_back(share * frequency / spec.factor + (1 - share) * frequency);
        break;
      }
    }
  }
  return frequencies;
}

double rope_attention_factor(const RopeSpec& spec) {
  check_spec(spec);
  return spec.scaling == RopeSpec::Scaling::yarn ? 0.1 * std::log(spec.factor) + 1 : 1;
}

void rope_table(Device& device, const Tensor& positions, std::span<const double> inverse_frequencies,
                double attention_factor, Tensor table) {
  const int64_t pairs = static_cast<int64_t>(inverse_frequencies.size());
  check_dtype("rope_table", "positions", positions, DType::i64);
  check_rank("rope_table", "positions", positions, 1, 1);
  check_contiguous("rope_table", "positions", positions);
  check_dtype("rope_table", "table", table, DType::f32);
  check_shape("rope_table", "table", table, Shape({positions.dim(0), 2, pairs}));
  check_contiguous("rope_table", "table", table);
  const double elements = static_cast<double>(table.numel());
  const double bytes = static_cast<double>(positions.bytes() + table.bytes());
  device.run({"rope_table", OpClass::memory, elements, bytes}, [&] {
    if (device.on_cuda()) return cuda::rope_table(device, positions, inverse_frequencies, attention_factor, table);
    // A sine costs some 20 ns: a few hundred of them repay a thread.
    const int64_t grain = std::max<int64_t>(1, 512 / std::max<int64_t>(1, pairs));
    parallel_for(device, positions.dim(0), grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const double position = static_cast<double>(positions.data<int64_t>()[t]);
        float* cosine = table.data<float>() + t * 2 * pairs;
        for (int64_t i = 0; i < pairs; ++i) {
          const double angle = position * inverse_frequencies[static_cast<size_t>(i)];
          cosine[i] = static_cast<float>(std::cos(angle) * attention_factor);
          cosine[pairs + i] = static_cast<float>(std::sin(angle) * attention_factor);
        }
      }
    });
  });
}

void rope_apply(Device& device, const Tensor& table, RopeStyle style, RopeDirection direction, Tensor x) {
  check_compute_dtype("rope_apply", "x", x);
  check_rank("rope_apply", "x", x, 3, 3);
  check_dense_rows("rope_apply", "x", x);
  FARSPAN_CHECK(x.dim(2) % 2 == 0, "rope_apply: head size {}; channels turn in pairs, so it must be even", x.dim(2));
  const int64_t pairs = x.dim(2) / 2;
  check_dtype("rope_apply", "table", table, DType::f32);
  check_shape("rope_apply", "table", table, Shape({x.dim(0), 2, pairs}));
  check_contiguous("rope_apply", "table", table);
  const double flops = 3.0 * static_cast<double>(x.numel());
  const double bytes = static_cast<double>(2 * x.bytes() + table.bytes());
  device.run({"rope_apply", OpClass::memory, flops, bytes}, [&] {
    if (device.on_cuda()) return cuda::rope_apply(device, table, style, direction, x);
    const float sign = direction == RopeDirection::forward ? 1.0f : -1.0f;
    const int64_t heads = x.dim(1);
    parallel_for(device, x.dim(0), cpu::row_grain(heads * x.dim(2)), [&](int64_t begin, int64_t end) {
      with_compute_type(x.dtype(), [&](auto element) {
        using T = decltype(element);
        for (int64_t t = begin; t < end; ++t) {
          const float* cosine = table.data<float>() + t * 2 * pairs;
          for (int64_t head = 0; head < heads; ++head) {
            T* channels = x.data<T>() + t * x.stride(0) + head * x.stride(1);
            if (style == RopeStyle::half_split)
              turn_half_split(channels, cosine, cosine + pairs, sign, pairs);
            else
              turn_interleaved(channels, cosine, cosine + pairs, sign, pairs);
          }
        }
      });
    });
  });
}

}  // namespace farspan
