// SPDX-License-Identifier: Apache-2.0
// What the attention ops promise besides values: costs, checks, the dry device, 64-bit offsets, the two row-wise ops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

class Recorder : public OpObserver {
 public:
  void on_op(const OpCost& cost, OpTime) override { last = cost; }
  OpCost last;
};

// Tensors of a (n, A, D) x (m, K, D) problem on the dry device: addresses that would fault when touched.
struct DryProblem {
  explicit DryProblem(const Sizes& s, DType dtype = DType::f32) : sizes(s), memory(device, 1 << 20) {
    block = {.query = tensor(dtype, {s.n, s.heads, s.head_size}),
             .key = tensor(dtype, {s.m, s.kv_heads, s.head_size}),
             .value = tensor(dtype, {s.m, s.kv_heads, s.head_size}),
             .lo = tensor(DType::i64, {s.n}),
             .hi = tensor(DType::i64, {s.n})};
  }
  Tensor tensor(DType dtype, Shape shape) const { return {memory.data(), dtype, shape}; }
  Tensor out() const { return tensor(DType::f32, block.query.shape()); }
  Tensor per_head() const { return tensor(DType::f32, {sizes.heads, sizes.n}); }
  Tensor d_key() const { return tensor(DType::f32, block.key.shape()); }
  Tensor d_out() const { return tensor(block.query.dtype(), block.query.shape()); }
  void backward() {
    attention_block_backward(device, block, {}, d_out(), per_head(), per_head(), Accumulate::yes, Accumulate::yes,
                             out(), d_key(), d_key());
  }

  Sizes sizes;
  Device device{test_dry_run()};
  DeviceMemory memory;
  AttentionBlock block;
};

TEST(AttentionContract, DryDeviceTouchesNoMemoryAndReportsCosts) {
  DryProblem p({1000, 3000, 8, 2, 64}, DType::bf16);
  Recorder recorder;
  p.device.observe(&recorder);
  p.block.visible_pairs = 5000;

  attention_state_init(p.device, p.out(), p.per_head());
  EXPECT_EQ(recorder.last.op_class, OpClass::memory);
  EXPECT_EQ(recorder.last.bytes, 4.0 * (1000 * 8 * 64 + 8 * 1000));

  attention_block_forward(p.device, p.block, StateUse::add, p.out(), p.per_head());
  EXPECT_EQ(recorder.last.op, "attention_block_forward");
  EXPECT_EQ(recorder.last.op_class, OpClass::attention);
  EXPECT_EQ(recorder.last.flops, 4.0 * 64 * 8 * 5000);
  const double inputs = 2.0 * (1000 * 8 * 64 + 2 * 3000 * 2 * 64) + 2 * 8.0 * 1000;
  EXPECT_EQ(recorder.last.bytes, inputs + 2 * 4.0 * (1000 * 8 * 64 + 8 * 1000));

  attention_delta(p.device, p.out(), p.d_out(), p.per_head());
  EXPECT_EQ(recorder.last.op_class, OpClass::memory);

  p.backward();
  EXPECT_EQ(recorder.last.op_class, OpClass::attention);
  EXPECT_EQ(recorder.last.flops, 10.0 * 64 * 8 * 5000);

  p.block.visible_pairs = -1;
  p.backward();
  EXPECT_EQ(recorder.last.flops, 10.0 * 64 * 8 * 3000000);
}

// Visible pairs only, and not less for being cut into blocks.
TEST(AttentionContract, B120_FlopsCountVisiblePairs) {
  Recorder recorder;
  const auto flops = [&](const Mask& mask) {
    const int64_t n = static_cast<int64_t>(mask.size());
    DryProblem p({n, n, 8, 8, 64});
    p.device.observe(&recorder);
    p.block.visible_pairs = visible_pairs(mask, n);
    attention_block_forward(p.device, p.block, StateUse::add, p.out(), p.per_head());
    return recorder.last.flops;
  };
  EXPECT_EQ(flops(causal(4096, 4096)), 17184063488.0);
  EXPECT_EQ(flops(documents({1024, 1024, 1024, 1024})), 4 * flops(causal(1024, 1024)));
}

TEST(AttentionContract, NoQueriesOrNoKeysIsNoWork) {
  Device& device = test_device(2);
  const Problem p = random_problem({4, 4, 1, 1, 8}, causal(4, 4), DType::f32);
  Tensors tensors(p);
  TestVector<float> out(32, 3.0f), lse(4, 1.0f);
  attention_block_forward(device, tensors.block({2, 2}), StateUse::add, f32_tensor(out, {4, 1, 8}),
                          f32_tensor(lse, {1, 4}));
  device.synchronize();
  EXPECT_THAT(out, ::testing::Each(3.0f));
  EXPECT_THAT(lse, ::testing::Each(1.0f));
  AttentionBlock none = tensors.block({0, 4});
  none.query = none.query.slice(0, 0, 0);
  none.lo = none.lo.slice(0, 0, 0);
  none.hi = none.hi.slice(0, 0, 0);
  none.runs = {};
  attention_block_forward(device, none, StateUse::add, f32_tensor(out, {4, 1, 8}).slice(0, 0, 0),
                          f32_tensor(lse, {1, 4}).slice(1, 0, 0));
  device.synchronize();
  EXPECT_THAT(out, ::testing::Each(3.0f));
}

// A rank may be dealt no heads at all, query heads or both kinds.
TEST(AttentionContract, NoHeadsIsNoWork) {
  for (const DeviceKind kind : {test_device_kind(), DeviceKind::dry})
    for (const int64_t kv_heads : {0, 2}) {
      Device device(kind, 2);
      const Problem p = random_problem({4, 4, 2, 2, 8}, causal(4, 4), DType::f32);
      Tensors tensors(p);
      AttentionBlock block = tensors.block({0, 4});
      block.query = block.query.slice(1, 0, 0);
      block.key = block.key.slice(1, 0, kv_heads);
      block.value = block.value.slice(1, 0, kv_heads);
      block.dropout = {.probability = 0.5};
      TestVector<float> out(64, 3.0f), lse(8, 1.0f), d_key(64, 2.0f);
      const Tensor no_rows = f32_tensor(out, {4, 2, 8}).slice(1, 0, 0), no_lse = f32_tensor(lse, {2, 4}).slice(0, 0, 0);
      const Tensor d_kv = f32_tensor(d_key, {4, 2, 8}).slice(1, 0, kv_heads);
      attention_state_init(device, no_rows, no_lse);
      attention_block_forward(device, block, StateUse::add, no_rows, no_lse);
      attention_delta(device, no_rows, no_rows, no_lse);
      attention_block_backward(device, block, {}, no_rows, no_lse, no_lse, Accumulate::yes, Accumulate::yes, no_rows,
                               d_kv, d_kv);
      device.synchronize();
      EXPECT_THAT(out, ::testing::Each(3.0f));
      EXPECT_THAT(lse, ::testing::Each(1.0f));
      EXPECT_THAT(d_key, ::testing::Each(2.0f));
    }
}

// Runs `body` and returns what it threw.
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const InternalError& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(AttentionContract, ChecksNameWhatIsWrong) {
  using ::testing::HasSubstr;
  const auto forward = [](const std::function<void(DryProblem&)>& change) {
    return message_of([&] {
      DryProblem p({6, 5, 4, 2, 8});
      change(p);
      attention_block_forward(p.device, p.block, StateUse::add, p.out(), p.per_head());
    });
  };
  EXPECT_EQ(forward([](DryProblem&) {}), "nothing thrown");
  EXPECT_THAT(forward([](DryProblem& p) {
                p.block.key = p.tensor(DType::f32, {5, 3, 8});
              }),
              HasSubstr("4 query heads over 3 key/value heads"));
  EXPECT_THAT(forward([](DryProblem& p) {
                p.block.value = p.tensor(DType::f32, {4, 2, 8});
              }),
              HasSubstr("value is (4, 2, 8), needs (5, 2, 8)"));
  EXPECT_THAT(forward([](DryProblem& p) {
                p.block.key = p.tensor(DType::bf16, {5, 2, 8});
              }),
              HasSubstr("key holds bf16, needs f32"));
  EXPECT_THAT(forward([](DryProblem& p) { p.block.hi = p.tensor(DType::i32, {6}); }), HasSubstr("hi holds i32"));
  EXPECT_THAT(forward([](DryProblem& p) { p.block.lo = p.tensor(DType::i64, {5}); }), HasSubstr("lo is (5)"));
  EXPECT_THAT(forward([](DryProblem& p) { p.block.scale = kNaN; }), HasSubstr("scale nan, needs a finite number"));
  EXPECT_THAT(forward([](DryProblem& p) { p.block.visible_pairs = 31; }), HasSubstr("31 visible pairs"));
  for (const double bad : {1.0, -0.5, static_cast<double>(kNaN)})
    EXPECT_THAT(forward([&](DryProblem& p) { p.block.dropout.probability = bad; }), HasSubstr("less than 1"));
  EXPECT_THAT(forward([](DryProblem& p) {
                p.block.dropout.probability = 0.5;
                p.block.query_begin = -1;
              }),
              HasSubstr("dropout needs 0 or more"));
  EXPECT_THAT(forward([](DryProblem& p) {
                p.block.query = Tensor(p.memory.data(), DType::f32, {6, 4, 8}, {64, 16, 2});
              }),
              HasSubstr("query has stride 2 in its last dimension"));
  DryProblem p({6, 5, 4, 2, 8});
  EXPECT_THAT(message_of([&] { attention_block_forward(p.device, p.block, StateUse::add, p.d_key(), p.per_head()); }),
              HasSubstr("out is (5, 2, 8), needs (6, 4, 8)"));
  EXPECT_THAT(message_of([&] {
                attention_state_init(p.device, p.out(), p.tensor(DType::f32, {6, 4}));
              }),
              HasSubstr("lse is (6, 4), needs (heads, queries) = (4, 6)"));
  EXPECT_THAT(message_of([&] {
                attention_delta(p.device, p.out(), p.tensor(DType::i32, {6, 4, 8}), p.per_head());
              }),
              HasSubstr("d_out i32"));
}

TEST(AttentionContract, TheListEndsWithTheReferenceThatTakesAll) {
  EXPECT_THAT(attention_implementations(), ::testing::ElementsAre("vector", "reference"));
  DryProblem large({2, 2, 1, 1, 300});
  const auto list = attention_implementation_list();
  Device cpu(DeviceKind::cpu, 1);
  EXPECT_THAT(list[0].forward_declines(cpu, {.block = large.block}), ::testing::HasSubstr("300"));
  EXPECT_THAT(list[0].backward_declines(cpu, {.block = large.block}), ::testing::HasSubstr("300"));
  EXPECT_EQ(list[1].forward_declines(cpu, {.block = large.block}), "");
  EXPECT_EQ(list[0].forward_declines(cpu, {.block = DryProblem({2, 2, 1, 1, 256}).block}), "");
}

TEST(AttentionContract, StateInitAndDelta) {
  Device& device = test_device(2);
  TestVector<float> out(2 * 3 * 5, kNaN), lse(6, kNaN);
  attention_state_init(device, f32_tensor(out, {2, 3, 5}), f32_tensor(lse, {3, 2}));
  device.synchronize();
  EXPECT_THAT(out, ::testing::Each(0.0f));
  EXPECT_THAT(lse, ::testing::Each(-kInfinity));

  for (DType out_type : {DType::f32, DType::bf16})
    for (DType d_out_type : {DType::f32, DType::bf16}) {
      Stored o({1, 2, 3, 4, 5, 6, 7, 8}, out_type), g({1, 1, 2, 0.5f, -1, 1, 0, 3}, d_out_type);
      TestVector<float> delta(4);
      attention_delta(device, o.tensor({2, 2, 2}), g.tensor({2, 2, 2}), f32_tensor(delta, {2, 2}));
      device.synchronize();
      EXPECT_THAT(delta, ::testing::ElementsAre(3, 1, 8, 24));  // (heads, queries)
    }
}

// All tensors of a problem with 3 rows that lie `kRowStride` elements apart in memory that is never committed but for a
// few pages.
struct FarApart {
  static constexpr int64_t kRowStride = int64_t{1} << 30;

  explicit FarApart(const Problem& p) : sizes(p.sizes), memory(3 * kRowStride * 4) {
    block = Tensors(p).block({0, 3});
    block.query = place(p.query, p.dtype, sizes.heads);
    block.key = place(p.key, p.dtype, sizes.kv_heads);
    block.value = place(p.value, p.dtype, sizes.kv_heads);
    d_out = place(p.d_out, p.dtype, sizes.heads);
    out = place(TestVector<float>(p.query.size(), 0.0f), DType::f32, sizes.heads);
    d_query = place(TestVector<float>(p.query.size(), 0.0f), DType::f32, sizes.heads);
    d_key = place(TestVector<float>(p.key.size(), 0.0f), DType::f32, sizes.kv_heads);
    d_value = place(TestVector<float>(p.key.size(), 0.0f), DType::f32, sizes.kv_heads);
  }

  // A (3, heads, D) view that holds `values`.
  Tensor place(const TestVector<float>& values, DType dtype, int64_t heads) {
    const int64_t width = heads * sizes.head_size;
    void* const data = static_cast<char*>(memory.data()) + 4096 * placed++;
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t d = 0; d < width; ++d) {
        const float x = values[static_cast<size_t>(i * width + d)];
        if (dtype == DType::f32)
          static_cast<float*>(data)[i * kRowStride + d] = x;
        else
          static_cast<BFloat16*>(data)[i * kRowStride + d] = to_bfloat16(x);
      }
    return {data, dtype, {3, heads, sizes.head_size}, {kRowStride, sizes.head_size, 1}};
  }

  static TestVector<float> compact(const Tensor& t) {
    TestVector<float> values;
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t d = 0; d < t.dim(1) * t.dim(2); ++d) values.push_back(t.data<float>()[i * kRowStride + d]);
    return values;
  }

  Sizes sizes;
  SparseMemory memory;
  int64_t placed = 0;
  AttentionBlock block;
  Tensor d_out, out, d_query, d_key, d_value;
};

class AttentionFarApart : public AttentionTest {};
INSTANTIATE_TEST_SUITE_P(EveryImplementation, AttentionFarApart, ::testing::ValuesIn(attention_variants()),
                         attention_variant_name);

TEST_P(AttentionFarApart, B107_RowStrideOf2To30Elements) {
  const Problem p = random_problem({3, 3, 4, 2, 8}, causal(3, 3), dtype());
  const Results<float> expected = run(implementation(), p);
  Device& device = test_device(1);
  FarApart far(p);
  Tensors positions(p);
  far.block.lo = positions.block({0, 3}).lo;
  far.block.hi = positions.block({0, 3}).hi;
  far.block.runs = {};
  TestVector<float> lse(12), delta(12);
  attention_state_init(device, far.out, f32_tensor(lse, {4, 3}));
  attend_with(implementation(), device, AttentionForward{far.block, StateUse::add, far.out, f32_tensor(lse, {4, 3})});
  attention_delta(device, far.out, far.d_out, f32_tensor(delta, {4, 3}));
  attend_with(implementation(), device,
              AttentionBackward{.block = far.block,
                                .out = {},
                                .d_out = far.d_out,
                                .lse = f32_tensor(lse, {4, 3}),
                                .delta = f32_tensor(delta, {4, 3}),
                                .d_query = far.d_query,
                                .d_key = far.d_key,
                                .d_value = far.d_value});
  device.synchronize();
  EXPECT_EQ(FarApart::compact(far.out), expected.out);
  EXPECT_EQ(lse, expected.lse);
  EXPECT_EQ(FarApart::compact(far.d_query), expected.d_query);
  EXPECT_EQ(FarApart::compact(far.d_key), expected.d_key);
  EXPECT_EQ(FarApart::compact(far.d_value), expected.d_value);
}

// Positions past 2^32, and intervals as wide as the type.
TEST_P(AttentionFarApart, B106_PositionsBeyond32Bits) {
  constexpr int64_t kOrigin = int64_t{5} << 32;
  const Problem p = random_problem({20, 20, 2, 1, 8}, causal(20, 20), dtype());
  const Results<float> expected = run(implementation(), p);
  Device& device = test_device(1);
  Tensors tensors(p);
  AttentionBlock block = tensors.block({0, 20});
  block.key_begin = kOrigin;
  block.runs = {};
  for (int64_t i = 0; i < 20; ++i) {
    block.lo.data<int64_t>()[i] = i % 2 == 0 ? kOrigin : std::numeric_limits<int64_t>::min();
    block.hi.data<int64_t>()[i] = i == 19 ? std::numeric_limits<int64_t>::max() : kOrigin + i + 1;
  }
  TestVector<float> out(p.query.size()), lse(40);
  attention_state_init(device, f32_tensor(out, {20, 2, 8}), f32_tensor(lse, {2, 20}));
  attend_with(implementation(), device,
              AttentionForward{block, StateUse::add, f32_tensor(out, {20, 2, 8}), f32_tensor(lse, {2, 20})});
  device.synchronize();
  EXPECT_EQ(out, expected.out);
  EXPECT_EQ(lse, expected.lse);
}

Tensor expected_tensor(const TestVector<float>& values, const Shape& shape) {
  return {const_cast<float*>(values.data()), DType::f32, shape};
}

// A block that begins results leaves those of queries that see none of its keys to other blocks: whole tiles of them,
// and single ones among others.
TEST_P(AttentionFarApart, BlindQueriesMayKeepTheirResults) {
  const auto sees = [](int64_t i) { return i < 70 ? i % 7 != 3 : i >= 210 && i != 230; };
  const Mask mask = mask_from(300, [&](int64_t i) { return sees(i) ? Interval{i / 2, i + 1} : Interval{300, 310}; });
  for (const int64_t head_size : {64, 80}) {
    const Problem p = random_problem({300, 300, 4, 2, head_size}, mask, dtype());
    const Results<float> expected = run(implementation(), p);
    Device& device = test_device(1);
    Tensors tensors(p);
    const Shape of_queries{300, 4, head_size}, of_keys{300, 2, head_size};
    TestVector<float> out(p.query.size(), 7.0f), lse(4 * 300, 3.0f), delta(lse.size());
    TestVector<float> d_query(out.size(), 5.0f), d_key(p.key.size(), kNaN), d_value(p.key.size(), kNaN);
    AttentionForward forward{tensors.block({0, 300}), StateUse::begin, f32_tensor(out, of_queries),
                             f32_tensor(lse, {4, 300})};
    forward.block.keeps_blind = true;
    if (!implementation().forward_declines(device, forward).empty()) return;
    attend_with(implementation(), device, forward);
    const Tensor final_lse(expected_tensor(expected.lse, {4, 300}));
    attention_delta(device, expected_tensor(expected.out, of_queries), tensors.d_out(), f32_tensor(delta, {4, 300}));
    AttentionBackward backward{.block = forward.block,
                               .out = {},
                               .d_out = tensors.d_out(),
                               .lse = final_lse,
                               .delta = f32_tensor(delta, {4, 300}),
                               .d_query_use = Accumulate::no,
                               .d_key_value_use = Accumulate::no,
                               .d_query = f32_tensor(d_query, of_queries),
                               .d_key = f32_tensor(d_key, of_keys),
                               .d_value = f32_tensor(d_value, of_keys)};
    attend_with(implementation(), device, backward);
    device.synchronize();
    for (int64_t i = 0; i < 300; ++i)
      for (int64_t head = 0; head < 4; ++head) {
        const auto scalar = static_cast<size_t>(head * 300 + i);
        EXPECT_EQ(lse[scalar], sees(i) ? expected.lse[scalar] : 3.0f) << i;
        for (int64_t d = 0; d < head_size; ++d) {
          const auto at = static_cast<size_t>((i * 4 + head) * head_size + d);
          EXPECT_EQ(out[at], sees(i) ? expected.out[at] : 7.0f) << i;
          EXPECT_EQ(d_query[at], sees(i) ? expected.d_query[at] : 5.0f) << i;
        }
      }
    EXPECT_EQ(d_key, expected.d_key);
    EXPECT_EQ(d_value, expected.d_value);
  }
}

}  // namespace
}  // namespace farspan::test
