// SPDX-License-Identifier: Apache-2.0
// Block attention by cuDNN against the dense fp64 oracle: the blocks it takes, in all places where its results can go.
// On a GPU only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

// cuDNN rounds weights and score gradients to bf16 between two products, and its results: 8 bits, so 2^-9 of the
// largest value, two or three times over.
constexpr double kTolerance = 8e-3;

const AttentionImplementation* cudnn() {
  for (const AttentionImplementation& implementation : attention_implementation_list(DeviceKind::cuda))
    if (implementation.name == "cudnn") return &implementation;
  return nullptr;
}

// Where results are to go.
struct Wanted {
  DType dtype = DType::f32;  // of out and the gradients; bf16 takes one block
  bool begin = true;         // the first block begins the state and the gradients; else they are zeroed and added to
};

class AttentionCudnn : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing_cuda()) GTEST_SKIP() << "runs on a GPU only";
    Device device(DeviceKind::cuda, 1);
    const Problem p = random_problem({64, 64, 1, 1, 64}, causal(64, 64), DType::bf16);
    Tensors tensors(p);
    const std::string reason = refusal(device, {.block = tensors.block({0, 64})});
    if (reason.find("built without") != std::string::npos) GTEST_SKIP() << reason;
  }

  static std::string refusal(Device& device, AttentionForward call) {
    TestVector<float> out(static_cast<size_t>(call.block.query.numel())), lse(out.size());
    if (!call.out.defined()) call.out = f32_tensor(out, call.block.query.shape());
    if (!call.lse.defined()) call.lse = f32_tensor(lse, {call.block.query.dim(1), call.block.query.dim(0)});
    std::string reason;
    device.run({"attention_block_forward", OpClass::attention, 0, 0, scratch_bytes(device, call)},
               [&] { reason = cudnn()->forward_declines(device, call); });
    return reason;
  }

  // Not for being unable to: the others are faster.
  static bool left_to_own_kernels(const std::string& reason) {
    return reason.find("left to the own kernels") != std::string::npos;
  }

  template <typename Call>
  static void attend(Device& device, const Call& call) {
    device.run({"attention", OpClass::attention, 0, 0, scratch_bytes(device, call)}, [&] {
      if constexpr (std::is_same_v<Call, AttentionForward>) {
        const std::string reason = cudnn()->forward_declines(device, call);
        if (left_to_own_kernels(reason)) return attend_forward_by_choice(device, call);
        EXPECT_EQ(reason, "");
        cudnn()->forward(device, call);
      } else {
        const std::string reason = cudnn()->backward_declines(device, call);
        if (left_to_own_kernels(reason)) return attend_backward_by_choice(device, call);
        EXPECT_EQ(reason, "");
        cudnn()->backward(device, call);
      }
    });
  }
};

// A result of some dtype, NaN to begin with, or zeros.
class Result {
 public:
  Result(Shape shape, DType dtype, bool zero) : shape_(shape), dtype_(dtype) {
    const float value = zero ? 0.0f : kNaN;
    f32_.assign(static_cast<size_t>(shape.numel()), value);
    bf16_.assign(f32_.size(), to_bfloat16(value));
  }
  Tensor tensor() {
    void* data = dtype_ == DType::f32 ? static_cast<void*>(f32_.data()) : bf16_.data();
    return {data, dtype_, shape_};
  }
  TestVector<float> values() const {
    if (dtype_ == DType::f32) return f32_;
    TestVector<float> widened;
    for (BFloat16 x : bf16_) widened.push_back(to_float(x));
    return widened;
  }

 private:
  Shape shape_;
  DType dtype_;
  TestVector<float> f32_;
  TestVector<BFloat16> bf16_;
};

// Forward and backward of a problem whose keys come in blocks.
class Run : public AttentionCudnn {
 protected:
  static void expect_matches_oracle(const Problem& p, const Wanted& wanted, std::vector<KeySpan> blocks = {}) {
    SCOPED_TRACE(fmt::format("{} into {}{}", p.sizes.str(), name_of(wanted.dtype), wanted.begin ? "" : ", added"));
    const auto [n, m, heads, kv_heads, D] = p.sizes;
    if (blocks.empty()) blocks = {{0, m}};
    Device device(DeviceKind::cuda, 1);
    Tensors tensors(p);
    const Results<double> expected = oracle(p);

    Result out({n, heads, D}, wanted.dtype, !wanted.begin), lse({heads, n}, DType::f32, false);
    if (!wanted.begin) attention_state_init(device, out.tensor(), lse.tensor());
    for (size_t b = 0; b < blocks.size(); ++b)
      attend(device,
             AttentionForward{tensors.block(blocks[b]), wanted.begin && b == 0 ? StateUse::begin : StateUse::add,
                              out.tensor(), lse.tensor()});
    device.synchronize();
    EXPECT_LE(relative_error(out.values(), expected.out), kTolerance);
    EXPECT_LE(relative_error(lse.values(), expected.lse), kLseTolerance);

    std::vector<float> rounded;
    for (double x : expected.out) rounded.push_back(static_cast<float>(x));
    Stored final_out(TestVector<float>(rounded.begin(), rounded.end()), DType::bf16);
    Result d_query({n, heads, D}, wanted.dtype, !wanted.begin), d_key({m, kv_heads, D}, wanted.dtype, !wanted.begin);
    Result d_value({m, kv_heads, D}, wanted.dtype, !wanted.begin);
    const Accumulate first = wanted.begin ? Accumulate::no : Accumulate::yes;
    for (size_t b = 0; b < blocks.size(); ++b) {
      const auto keys = [&](const Tensor& x) { return x.slice(0, blocks[b].begin, blocks[b].end); };
      attend(device, AttentionBackward{.block = tensors.block(blocks[b]),
                                       .out = final_out.tensor({n, heads, D}),
                                       .d_out = tensors.d_out(),
                                       .lse = lse.tensor(),
                                       .d_query_use = b == 0 ? first : Accumulate::yes,
                                       .d_key_value_use = first,
                                       .d_query = d_query.tensor(),
                                       .d_key = keys(d_key.tensor()),
                                       .d_value = keys(d_value.tensor())});
    }
    device.synchronize();
    EXPECT_LE(relative_error(d_query.values(), expected.d_query), kTolerance);
    EXPECT_LE(relative_error(d_key.values(), expected.d_key), kTolerance);
    EXPECT_LE(relative_error(d_value.values(), expected.d_value), kTolerance);
  }

  static void expect_everywhere(const Problem& p) {
    expect_matches_oracle(p, {DType::bf16, true});
    expect_matches_oracle(p, {DType::f32, true});
    expect_matches_oracle(p, {DType::f32, false});
  }

  static Problem problem(const Sizes& sizes, const Mask& mask) { return random_problem(sizes, mask, DType::bf16); }
};

TEST_F(Run, CausalAndPlain) {
  expect_everywhere(problem({256, 256, 4, 2, 128}, causal(256, 256)));
  expect_everywhere(problem({256, 256, 4, 4, 64}, causal(256, 256)));
  expect_everywhere(problem({128, 384, 4, 1, 64}, full(128, 384)));
  expect_everywhere(problem({128, 384, 4, 2, 256}, full(128, 384)));
}

TEST_F(Run, AlignedAtTheLastKey) { expect_everywhere(problem({128, 320, 4, 2, 64}, causal(128, 320))); }

TEST_F(Run, OtherHeadSizes) {
  for (int64_t head_size : {72, 80, 96, 136, 192})
    expect_everywhere(problem({96, 96, 2, 1, head_size}, causal(96, 96)));
}

TEST_F(Run, LengthsThatTakeTables) {
  expect_everywhere(problem({201, 201, 4, 2, 128}, causal(201, 201)));
  expect_everywhere(problem({100, 333, 2, 2, 64}, full(100, 333)));
}

TEST_F(Run, Documents) {
  const Mask mask = documents({130, 1, 70, 300, 3, 129});
  const int64_t n = static_cast<int64_t>(mask.size());
  expect_everywhere(problem({n, n, 4, 2, 128}, mask));
}

TEST_F(Run, DocumentsThatLeaveQueriesAndKeysAlone) {
  Mask mask = documents({130, 70, 100});
  for (int64_t i = 0; i < 40; ++i) mask.push_back({0, 0});
  for (int64_t i = 130; i < 200; ++i) mask[static_cast<size_t>(i)] = {0, 0};
  expect_everywhere(problem({340, 340, 4, 2, 64}, mask));
}

// What stands behind a document's end is read with its last tile: it must not matter what it is.
TEST_F(Run, NaNsThatNobodySees) {
  Mask mask = documents({130, 70, 100});
  for (int64_t i = 0; i < 40; ++i) mask.push_back({0, 0});
  for (int64_t i = 130; i < 200; ++i) mask[static_cast<size_t>(i)] = {0, 0};
  Problem p = problem({340, 340, 4, 2, 64}, mask);
  const auto spoil = [&](TestVector<float>& x, int64_t heads, int64_t row) {
    std::fill_n(x.begin() + row * heads * 64, heads * 64, kNaN);
  };
  for (int64_t i = 0; i < 340; ++i) {
    if (mask[static_cast<size_t>(i)].lo < mask[static_cast<size_t>(i)].hi) continue;
    spoil(p.query, 4, i);
    spoil(p.d_out, 4, i);
    spoil(p.key, 2, i);
    spoil(p.value, 2, i);
  }
  expect_everywhere(p);
}

TEST_F(Run, KeysInBlocks) {
  const Problem p = problem({256, 512, 4, 2, 64}, causal(256, 512));
  expect_matches_oracle(p, {DType::f32, true}, {{256, 512}, {0, 128}, {128, 256}});
  expect_matches_oracle(p, {DType::f32, false}, {{256, 512}, {0, 256}});
}

// A row of packed documents met by one of another rank's pieces: the first document goes on there, the others do not.
TEST_F(Run, KeysOfOneDocumentOfSeveral) {
  const Mask mask = mask_from(300, [](int64_t i) { return i < 120 ? Interval{40, 256} : Interval{256, 256 + i}; });
  expect_matches_oracle(problem({300, 256, 4, 2, 64}, mask), {DType::f32, true});
}

TEST_F(AttentionCudnn, DeclinesWithAReason) {
  using ::testing::HasSubstr;
  Device device(DeviceKind::cuda, 1);
  const auto reason = [&](const Problem& p, const std::function<void(AttentionBlock&)>& change) {
    Tensors tensors(p);
    AttentionBlock block = tensors.block({0, p.sizes.m});
    change(block);
    return refusal(device, {.block = block});
  };
  const Problem p = random_problem({64, 64, 2, 1, 64}, causal(64, 64), DType::bf16);
  EXPECT_EQ(reason(p, [](AttentionBlock&) {}), "");
  EXPECT_THAT(reason(p, [](AttentionBlock& b) { b.runs = {}; }), HasSubstr("not known"));
  EXPECT_THAT(reason(p, [](AttentionBlock& b) { b.dropout.probability = 0.1; }), HasSubstr("dropout"));
  EXPECT_THAT(reason(random_problem({64, 64, 2, 1, 64}, causal(64, 64), DType::f32), [](AttentionBlock&) {}),
              HasSubstr("not bf16"));
  EXPECT_THAT(reason(random_problem({64, 64, 2, 1, 64}, window(64, 9), DType::bf16), [](AttentionBlock&) {}),
              HasSubstr("mask"));
  EXPECT_THAT(reason(random_problem({200, 200, 2, 1, 64}, documents({130, 70}), DType::bf16), [](AttentionBlock&) {}),
              HasSubstr("documents that pass through an fp32 state"));
  EXPECT_THAT(reason(p, [](AttentionBlock& b) { b.keeps_blind = true; }), HasSubstr("keep their results"));
  EXPECT_THAT(reason(random_problem({64, 64, 2, 1, 256}, causal(64, 64), DType::bf16), [](AttentionBlock&) {}),
              HasSubstr("causal results of wide heads are left to the own kernels"));
  EXPECT_THAT(reason(random_problem({64, 64, 2, 1, 128}, full(64, 64), DType::bf16), [](AttentionBlock&) {}),
              HasSubstr("results that pass through an fp32 state"));
  EXPECT_THAT(reason(random_problem({64, 64, 2, 1, 264}, causal(64, 64), DType::bf16), [](AttentionBlock&) {}),
              HasSubstr("head size 264"));
  EXPECT_THAT(reason(random_problem({64, 64, 2, 1, 10}, causal(64, 64), DType::bf16), [](AttentionBlock&) {}),
              HasSubstr("head size 10"));
}

TEST_F(AttentionCudnn, BackwardDeclinesWhereTheDeviceIsDeterministic) {
  Device device(DeviceKind::cuda, 1);
  device.set_deterministic(true);
  const Problem p = random_problem({64, 64, 1, 1, 64}, causal(64, 64), DType::bf16);
  Tensors tensors(p);
  EXPECT_THAT(cudnn()->backward_declines(device, {.block = tensors.block({0, 64})}), ::testing::HasSubstr("order"));
}

}  // namespace
}  // namespace farspan::test
