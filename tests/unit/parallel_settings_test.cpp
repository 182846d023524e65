// SPDX-License-Identifier: Apache-2.0
// The parallel section against the model: what is refused with which way out, what is legal but poor, and where the
// machines' borders lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "config/head_split.h"
#include "config/hosts.h"
#include "config/load.h"
#include "config/poor_choices.h"
#include "config/validate.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using test::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Keys by their own name, which no two sections share here: {{"tensor_model_parallel_size", "2"}}.
using Settings = std::vector<std::pair<std::string, std::string>>;

Config with(const Settings& settings) {
  const std::map<std::string, std::string> sections = {
      {"num_layers", "model"},          {"hidden_size", "model"},
      {"num_attention_heads", "model"}, {"num_query_groups", "model"},
      {"ffn_hidden_size", "model"},     {"kv_channels", "model"},
      {"vocab_size", "model"},          {"seq_length", "data"},
      {"document_mask", "data"},        {"global_batch_size", "training"},
      {"micro_batch_size", "training"}, {"optimizer", "optimizer"},
      {"adam_beta1", "optimizer"},      {"cp_allgather.buffer_size", "communication"}};
  Overrides overrides;
  for (const auto& [name, value] : settings) {
    const auto section = sections.find(name);
    overrides.emplace_back((section == sections.end() ? "parallel" : section->second) + "." + name, value);
  }
  return load_config("", overrides);
}

std::string refusal(const Settings& settings, int world) {
  return message_of<ConfigError>([&] {
    Config config = with(settings);
    resolve(config, world);
  });
}

struct Resolved {
  Config config;
  ResolvedSizes sizes;
};
Resolved resolved(const Settings& settings, int world) {
  Resolved result = {with(settings), {}};
  result.sizes = resolve(result.config, world);
  return result;
}
std::vector<std::string> warnings(const Settings& settings, int world) {
  return resolved(settings, world).sizes.warnings;
}

// Rows long enough for every chunk.
Settings long_rows(Settings settings) {
  settings.emplace_back("seq_length", "8192");
  return settings;
}

// --- Tensor parallelism. ---

TEST(TensorSettings, B010_MoreRanksThanKeyValueHeadsShareThemOrAreRefused) {
  const Settings one_kv_head = {{"num_query_groups", "1"}, {"tensor_model_parallel_size", "2"}};
  EXPECT_NO_THROW(resolved(one_kv_head, 2));
  EXPECT_EQ(local_kv_heads(1, 2), 1);

  const std::string message = refusal({{"num_attention_heads", "12"},
                                       {"kv_channels", "8"},
                                       {"num_query_groups", "3"},
                                       {"ffn_hidden_size", "64"},
                                       {"tensor_model_parallel_size", "2"}},
                                      2);
  EXPECT_EQ(message,
            "num_attention_heads 12 with 3 key/value heads cannot be cut over tensor_model_parallel_size 2; use "
            "tensor_model_parallel_size 1, 3, 6 or 12, or num_query_groups 1, 2, 4, 6 or 12");
}

TEST(TensorSettings, HeadsAndWidthsThatDoNotDivideNameWhatDoes) {
  const std::string message = refusal({{"tensor_model_parallel_size", "3"}}, 3);
  EXPECT_THAT(message, HasSubstr("num_attention_heads 4 with 4 key/value heads cannot be cut over "
                                 "tensor_model_parallel_size 3; use tensor_model_parallel_size 1, 2 or 4, or "
                                 "num_attention_heads 3 or 6"));
  // 8/3 * 128, up to 6 * 64 = 384, a multiple of 3; 128 is not.
  EXPECT_THAT(message, Not(HasSubstr("ffn_hidden_size")));
  EXPECT_THAT(refusal({{"tensor_model_parallel_size", "4"}, {"ffn_hidden_size", "130"}}, 4),
              HasSubstr("ffn_hidden_size 130 is not a multiple of tensor_model_parallel_size 4; use ffn_hidden_size "
                        "128 or 132"));
  EXPECT_NO_THROW(resolved({{"tensor_model_parallel_size", "4"}, {"vocab_size", "257"}}, 4));  // uneven rows are fine
}

TEST(TensorSettings, SequenceParallelNeedsTensorParallelRanks) {
  EXPECT_THAT(refusal({{"sequence_parallel", "true"}}, 1),
              HasSubstr("sequence_parallel true does nothing with tensor_model_parallel_size 1"));
  EXPECT_NO_THROW(resolved({{"sequence_parallel", "true"}, {"tensor_model_parallel_size", "2"}}, 2));
}

// --- Context parallelism. ---

TEST(ContextSettings, B009_AllToAllNamesTheProductOfBothCuts) {
  EXPECT_EQ(refusal({{"tensor_model_parallel_size", "2"}, {"context_parallel_size", "4"}, {"cp_comm_type", "a2a"}}, 8),
            "num_attention_heads 4 with 4 key/value heads cannot be cut over tensor_model_parallel_size 2 * "
            "context_parallel_size 4 = 8, as cp_comm_type a2a does; use context_parallel_size 1 or 2, or cp_comm_type "
            "p2p, all_gather or a2a+p2p");
  EXPECT_THAT(refusal({{"num_attention_heads", "28"},
                       {"kv_channels", "8"},
                       {"context_parallel_size", "8"},
                       {"cp_comm_type", "a2a"}},
                      8),
              HasSubstr("num_attention_heads 28 with 28 key/value heads cannot be cut over context_parallel_size 8, as "
                        "cp_comm_type a2a does; use context_parallel_size 1, 2, 4, 7, 14 or 28"));
}

TEST(ContextSettings, B007_B008_KeyValueHeadsAreSharedWhereTheGroupsStayEven) {
  EXPECT_THAT(a2a_degrees(8, 2), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(a2a_degrees(12, 3), ElementsAre(1, 3, 6, 12));
  EXPECT_THAT(a2a_degrees(28, 4), ElementsAre(1, 2, 4, 28));
  // By hand: exactly for these degrees every rank needs equally many key/value heads, each for equally many queries.
  for (const auto& [heads, kv_heads] : {std::pair{12, 3}, {28, 4}, {24, 8}, {6, 6}, {5, 1}}) {
    const std::vector<int64_t> degrees = a2a_degrees(heads, kv_heads);
    for (int64_t ranks = 1; ranks <= heads; ++ranks) {
      bool even = heads % ranks == 0;
      size_t heads_of_first = 0;
      for (int64_t rank = 0; even && rank < ranks; ++rank) {
        std::map<int64_t, int64_t> uses;  // of each key/value head, by the rank's queries
        for (int64_t i = 0; i < heads / ranks; ++i) ++uses[(rank * heads / ranks + i) / (heads / kv_heads)];
        for (const auto& [head, count] : uses) even = even && count == uses.begin()->second;
        if (rank == 0) heads_of_first = uses.size();
        even = even && uses.size() == heads_of_first;
      }
      EXPECT_EQ(std::count(degrees.begin(), degrees.end(), ranks), even ? 1 : 0)
          << heads << " heads, " << kv_heads << " key/value heads, " << ranks << " ranks";
    }
  }
  EXPECT_THAT(refusal({{"num_attention_heads", "12"},
                       {"num_query_groups", "3"},
                       {"kv_channels", "8"},
                       {"context_parallel_size", "2"},
                       {"cp_comm_type", "a2a"}},
                      2),
              HasSubstr("use context_parallel_size 1, 3, 6 or 12"));
}

TEST(ContextSettings, HierarchicalSizesAreCheckedOrDerived) {
  const Settings both = {{"context_parallel_size", "8"}, {"cp_comm_type", "a2a+p2p"}};
  const auto sizes = [&](const std::string& text) {
    Settings settings = both;
    settings.emplace_back("hierarchical_context_parallel_sizes", text);
    return settings;
  };
  EXPECT_THAT(resolved(both, 8).config.parallel.hierarchical_context_parallel_sizes, ElementsAre(4, 2));
  EXPECT_EQ(resolved(both, 8).config.origins.at("parallel.hierarchical_context_parallel_sizes"), "derived");
  EXPECT_NO_THROW(resolved(sizes("2,4"), 8));
  EXPECT_THAT(
      refusal(sizes("2,2"), 8),
      HasSubstr("hierarchical_context_parallel_sizes [2, 2] must be the all-to-all's ranks and the ring's, with "
                "the product context_parallel_size 8; use [1, 8] or [2, 4] or [4, 2] or [8, 1]"));
  EXPECT_THAT(refusal(sizes("2,2,2"), 8), HasSubstr("[2, 2, 2]"));
  EXPECT_THAT(refusal(sizes("-2,-4"), 8), HasSubstr("[-2, -4]"));
  EXPECT_THAT(refusal(sizes("8,1"), 8), HasSubstr("cannot be cut over the first of "
                                                  "hierarchical_context_parallel_sizes, 8; use a first of "
                                                  "hierarchical_context_parallel_sizes of 1, 2 or 4"));
  EXPECT_THAT(refusal({{"context_parallel_size", "8"}, {"hierarchical_context_parallel_sizes", "2,4"}}, 8),
              HasSubstr("does nothing without cp_comm_type a2a+p2p"));
  EXPECT_THAT(refusal({{"context_parallel_size", "9"}, {"cp_comm_type", "a2a+p2p"}}, 9),
              HasSubstr("cannot be cut over context_parallel_size 9 nor over a part of it"));

  // With 2 ranks there is one level, which is said.
  const Resolved one_level = resolved(long_rows({{"context_parallel_size", "2"}, {"cp_comm_type", "a2a+p2p"}}), 2);
  EXPECT_THAT(one_level.config.parallel.hierarchical_context_parallel_sizes, ElementsAre(2, 1));
  EXPECT_THAT(one_level.sizes.warnings, ElementsAre(HasSubstr("make a2a+p2p the same as a2a")));
}

// --- Pipeline parallelism. ---

TEST(PipelineSettings, EveryStageHasLayers) {
  EXPECT_THAT(refusal({{"num_layers", "3"}, {"pipeline_model_parallel_size", "4"}}, 4),
              HasSubstr("num_layers 3 cannot fill every stage (pipeline_model_parallel_size 4); use num_layers 4 or "
                        "more, or pipeline_model_parallel_size 3 or less"));
  EXPECT_EQ(resolved({{"num_layers", "5"}, {"pipeline_model_parallel_size", "4"}}, 4).sizes.pipeline_chunks, 1);

  const Settings stages = {{"num_layers", "8"}, {"pipeline_model_parallel_size", "2"}};
  const auto with_first_and_last = [&](const char* first, const char* last) {
    Settings settings = stages;
    settings.emplace_back("decoder_first_pipeline_num_layers", first);
    settings.emplace_back("decoder_last_pipeline_num_layers", last);
    return settings;
  };
  EXPECT_NO_THROW(resolved(with_first_and_last("5", "3"), 2));
  EXPECT_NO_THROW(resolved(with_first_and_last("0", "1"), 2));
  EXPECT_THAT(
      refusal(with_first_and_last("5", "2"), 2),
      HasSubstr("decoder_first_pipeline_num_layers 5 + decoder_last_pipeline_num_layers 2 are not num_layers 8; "
                "use 3 for the last"));
  EXPECT_THAT(refusal(with_first_and_last("8", "0"), 2), HasSubstr("cannot fill every stage"));
  EXPECT_THAT(refusal({{"decoder_last_pipeline_num_layers", "1"}}, 1),
              HasSubstr("decoder_last_pipeline_num_layers 1 does nothing with pipeline_model_parallel_size 1"));
}

// As in Megatron-LM: the number given is of layers, and virtual stages follow from it.
TEST(PipelineSettings, VirtualStagesFollowFromTheirLayers) {
  const auto chunks = [](const char* layers, const char* stages, const char* of_virtual) {
    return resolved({{"num_layers", layers},
                     {"pipeline_model_parallel_size", stages},
                     {"num_layers_per_virtual_pipeline_stage", of_virtual}},
                    std::stoi(stages))
        .sizes.pipeline_chunks;
  };
  EXPECT_EQ(chunks("16", "4", "2"), 2);
  EXPECT_EQ(chunks("16", "4", "1"), 4);
  EXPECT_EQ(chunks("16", "4", "4"), 1);
  EXPECT_EQ(chunks("10", "2", "2"), 3);  // uneven: at most 2 layers each
  EXPECT_THAT(
      refusal(
          {{"num_layers", "3"}, {"pipeline_model_parallel_size", "2"}, {"num_layers_per_virtual_pipeline_stage", "1"}},
          2),
      HasSubstr("num_layers 3 cannot fill 2 virtual stages on each stage (pipeline_model_parallel_size 2; "
                "num_layers_per_virtual_pipeline_stage 1); use num_layers_per_virtual_pipeline_stage 2, or 0"));
  EXPECT_THAT(refusal({{"num_layers_per_virtual_pipeline_stage", "1"}}, 1),
              HasSubstr("num_layers_per_virtual_pipeline_stage 1 does nothing with pipeline_model_parallel_size 1"));
}

TEST(ParallelSettings, B011_SixtyThreeRanksNameThirtyTwoAndSixtyFour) {
  const Settings sizes = {{"num_layers", "4"},
                          {"tensor_model_parallel_size", "4"},
                          {"pipeline_model_parallel_size", "2"},
                          {"context_parallel_size", "4"}};
  EXPECT_EQ(resolved(sizes, 64).sizes.data_parallel_size, 2);
  EXPECT_THAT(refusal(sizes, 63), HasSubstr("use 32 or 64 ranks"));
}

TEST(ParallelSettings, AllReasonsOfAllKindsComeAtOnce) {
  const std::string message = refusal({{"num_layers", "1"},
                                       {"num_attention_heads", "6"},
                                       {"hidden_size", "96"},
                                       {"ffn_hidden_size", "66"},
                                       {"tensor_model_parallel_size", "4"},
                                       {"pipeline_model_parallel_size", "2"},
                                       {"zero_stage", "7"},
                                       {"seq_length", "1"}},
                                      9);
  EXPECT_THAT(message, AllOf(HasSubstr("6 settings do not fit: (1) zero_stage 7"), HasSubstr("world 9"),
                             HasSubstr("num_attention_heads 6"), HasSubstr("ffn_hidden_size 66"),
                             HasSubstr("num_layers 1"), HasSubstr("seq_length 1")));
}

TEST(ParallelSettings, ZeroStagesGoWithEveryOtherCut) {
  for (const char* stage : {"0", "1", "2", "3"})
    EXPECT_NO_THROW(resolved({{"zero_stage", stage},
                              {"tensor_model_parallel_size", "2"},
                              {"pipeline_model_parallel_size", "2"},
                              {"context_parallel_size", "2"}},
                             16));
}

// --- Legal but poor. ---

TEST(PoorChoices, GoodOnesAreNotWarnedOf) {
  EXPECT_THAT(warnings({}, 1), IsEmpty());
  EXPECT_THAT(warnings(long_rows({{"context_parallel_size", "4"},
                                  {"tensor_model_parallel_size", "2"},
                                  {"zero_stage", "1"},
                                  {"overlap_grad_reduce", "true"},
                                  {"overlap_param_gather", "true"}}),
                       16),
              IsEmpty());
}

TEST(PoorChoices, ShortChunksWithTheirCost) {
  // 256 tokens over 2 * 4 chunks are 32 each: (32 + 300) / 32 = 10.4.
  EXPECT_THAT(warnings({{"context_parallel_size", "4"}, {"seq_length", "256"}}, 4),
              ElementsAre("context_parallel_size 4 cuts seq_length 256 into chunks of 32 tokens, on which attention "
                          "takes about 10 times its time; seq_length 1024 or more, or context_parallel_size 1 or less, "
                          "has chunks of 128"));
  EXPECT_THAT(warnings({{"context_parallel_size", "4"}, {"seq_length", "256"}, {"cp_comm_type", "a2a"}}, 4), IsEmpty())
      << "an all-to-all attends to whole rows";
}

TEST(PoorChoices, PaddingFromOnePercent) {
  // 2 * 3 chunks of 342 hold 2052 tokens, 0.2 % more than 2048; of 1000 tokens 1002 are 0.2 %, of 1001 1008 with tp 2.
  EXPECT_THAT(
      warnings(
          {{"num_attention_heads", "6"}, {"kv_channels", "8"}, {"context_parallel_size", "3"}, {"seq_length", "2048"}},
          3),
      IsEmpty());
  EXPECT_THAT(warnings({{"tensor_model_parallel_size", "4"},
                        {"sequence_parallel", "true"},
                        {"context_parallel_size", "4"},
                        {"seq_length", "1025"}},
                       16),
              ElementsAre("seq_length 1025 is padded to 1040 tokens, 1.4 % of them padding; seq_length 1024 or 1040 "
                          "needs none"));
}

TEST(PoorChoices, B012_FewMicroBatchesAreLegalAndTheirIdleShareIsTold) {
  const Settings four = {{"num_layers", "8"}, {"pipeline_model_parallel_size", "4"}};
  EXPECT_THAT(warnings(four, 4),
              ElementsAre("pipeline_model_parallel_size 4 with 1 micro-batch a step is idle for 75 % of it; "
                          "global_batch_size 9 (9 micro-batches) brings it to 25 %, more virtual stages bring it down "
                          "too"));
  Settings enough = four;
  enough.emplace_back("global_batch_size", "9");
  EXPECT_THAT(warnings(enough, 4), IsEmpty());
  Settings virtual_stages = four;
  virtual_stages.emplace_back("num_layers_per_virtual_pipeline_stage", "1");
  virtual_stages.emplace_back("global_batch_size", "5");  // 2 * 5 >= 3 * 3
  EXPECT_THAT(warnings(virtual_stages, 4), IsEmpty());
  EXPECT_THAT(warnings({{"num_layers", "8"},
                        {"pipeline_model_parallel_size", "2"},
                        {"num_layers_per_virtual_pipeline_stage", "4"},
                        {"global_batch_size", "8"}},
                       2),
              ElementsAre(HasSubstr("num_layers_per_virtual_pipeline_stage 4 has no effect")));
}

TEST(PoorChoices, SharedKeyValueHeads) {
  EXPECT_THAT(
      warnings(long_rows({{"num_query_groups", "2"}, {"context_parallel_size", "4"}, {"cp_comm_type", "a2a"}}), 4),
      ElementsAre(AllOf(HasSubstr("puts each of 2 key/value heads on 2 ranks: 2 times the bytes of K and V"),
                        HasSubstr("hierarchical_context_parallel_sizes [2, 2]"))));
}

TEST(PoorChoices, GathersOfEveryMicroBatch) {
  // 2 layers of 128 * (2 * 8 * 32 + 3 * 384) fp32 weights are 1.625 MiB; half of them come from the other rank.
  EXPECT_THAT(warnings({{"zero_stage", "3"}, {"global_batch_size", "8"}}, 2),
              ElementsAre(AllOf(HasSubstr("each of 4 micro-batches"),
                                HasSubstr("receives about 6.5 MiB a step, 0.8 MiB with zero_stage 2"))));
  EXPECT_THAT(warnings({{"zero_stage", "3"}, {"global_batch_size", "2"}}, 2), IsEmpty());
}

TEST(PoorChoices, WhatHasNoEffect) {
  EXPECT_THAT(warnings({{"zero_stage", "2"}, {"overlap_grad_reduce", "true"}, {"overlap_param_gather", "true"}}, 1),
              ElementsAre(HasSubstr("zero_stage 2 has no effect"), HasSubstr("overlap_grad_reduce has no effect"),
                          HasSubstr("overlap_param_gather has no effect")));
  EXPECT_THAT(warnings({{"overlap_param_gather", "true"}}, 2),
              ElementsAre(HasSubstr("overlap_param_gather has no effect with zero_stage 0")));
  EXPECT_THAT(warnings({{"optimizer", "sgd"}, {"adam_beta1", "0.8"}}, 1),
              ElementsAre("adam_beta1 0.8 has no effect with optimizer sgd"));
  EXPECT_THAT(warnings({{"cp_comm_type", "a2a"}}, 1),
              ElementsAre("cp_comm_type a2a has no effect with context_parallel_size 1"));
  EXPECT_THAT(
      warnings(
          long_rows({{"context_parallel_size", "2"}, {"cp_comm_type", "p2p"}, {"cp_allgather.buffer_size", "1MiB"}}),
          2),
      ElementsAre(HasSubstr("cp_allgather.buffer_size 1048576 has no effect")));
  EXPECT_THAT(
      warnings(long_rows({{"context_parallel_size", "2"}, {"cp_layout", "balanced"}, {"document_mask", "false"}}), 2),
      ElementsAre(HasSubstr("cp_layout balanced deals out packed documents")));
}

// --- Machines. ---

TEST(Hosts, RanksFillOneMachineAfterTheOther) {
  const HostMap uneven(10, 4);
  EXPECT_EQ(uneven.hosts(), 3);
  EXPECT_EQ(uneven.host_of(3), 0);
  EXPECT_EQ(uneven.host_of(4), 1);
  EXPECT_EQ(uneven.host_of(9), 2);
  EXPECT_EQ(uneven.first_rank(2), 8);
  EXPECT_EQ(uneven.end_rank(2), 10);
  EXPECT_THROW(uneven.host_of(10), InternalError);
}

std::optional<HostMap> launched(const std::map<std::string, std::string>& environment) {
  return hosts_of_launcher([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(Hosts, LaunchersTellThePlacement) {
  const auto slurm = launched({{"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"}});
  ASSERT_TRUE(slurm.has_value());
  EXPECT_EQ(slurm->world(), 11);
  EXPECT_EQ(slurm->host_of(8), 2);
  const auto open_mpi = launched({{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
  ASSERT_TRUE(open_mpi.has_value());
  EXPECT_EQ(open_mpi->hosts(), 2);
  const auto mpich = launched({{"PMI_SIZE", "6"}, {"MPI_LOCALNRANKS", "6"}});
  ASSERT_TRUE(mpich.has_value());
  EXPECT_EQ(mpich->hosts(), 1);
  for (const std::map<std::string, std::string>& nothing : std::vector<std::map<std::string, std::string>>{
           {},
           {{"SLURM_STEP_TASKS_PER_NODE", "many"}},
           {{"SLURM_STEP_TASKS_PER_NODE", "4(x2"}},
           {{"SLURM_STEP_TASKS_PER_NODE", "4(x999999999)"}},
           {{"SLURM_STEP_TASKS_PER_NODE", "0"}},
           {{"OMPI_COMM_WORLD_SIZE", "8"}},
           {{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "9"}}})
    EXPECT_FALSE(launched(nothing).has_value()) << (nothing.empty() ? "" : nothing.begin()->second);
}

TEST(Hosts, TensorGroupsAcrossMachinesAreWarnedOf) {
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = 4;
  const ResolvedSizes sizes = {.world_size = 16, .data_parallel_size = 4, .warnings = {}};
  EXPECT_THAT(poor_placement(parallel, sizes, HostMap(16, 16)), IsEmpty());
  EXPECT_THAT(poor_placement(parallel, sizes, HostMap(16, 8)), IsEmpty());
  EXPECT_THAT(poor_placement(parallel, sizes, HostMap(16, 6)),
              ElementsAre(HasSubstr("tensor groups of 4 ranks cross 1 of 2 machine borders")));
  EXPECT_THAT(poor_placement(parallel, sizes, HostMap(std::vector<int64_t>{4, 6, 6})),
              ElementsAre(HasSubstr("cross 1 of 2 machine borders")));
  parallel.rank_order = "dp-tp-cp-pp";  // tensor peers are 4 ranks apart
  EXPECT_THAT(poor_placement(parallel, sizes, HostMap(16, 8)), ElementsAre(HasSubstr("cross 1 of 1")));
  parallel.tensor_model_parallel_size = 1;
  EXPECT_THAT(poor_placement(parallel, sizes, HostMap(16, 3)), IsEmpty());
}

}  // namespace
}  // namespace farspan
