// SPDX-License-Identifier: Apache-2.0
// What fits together, what is refused and with which words, and what follows from the rest.
#include "config/validate.h"

#include <array>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "config/keys.h"
#include "config/launch.h"
#include "config/load.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Config with(const Overrides& overrides) { return load_config("", overrides); }

std::string refusal(const Overrides& overrides, int world = 1, ResolveScope scope = ResolveScope::run) {
  return message_of<ConfigError>([&] {
    Config config = with(overrides);
    resolve(config, world, scope);
  });
}

ResolvedSizes resolved(const Overrides& overrides, int world = 1, ResolveScope scope = ResolveScope::run) {
  Config config = with(overrides);
  return resolve(config, world, scope);
}

TEST(Resolve, B011_WorldThatIsNoMultipleOfTheModelParallelProduct) {
  EXPECT_THAT(
      refusal({{"parallel.tensor_model_parallel_size", "2"}, {"parallel.context_parallel_size", "2"}}, 2,
              ResolveScope::grid),
      HasSubstr("world 2, need a multiple of 4 (tensor_model_parallel_size 2 * context_parallel_size 2); use 4 ranks"));
  EXPECT_THAT(
      refusal({{"parallel.tensor_model_parallel_size", "2"}, {"parallel.pipeline_model_parallel_size", "2"}}, 6,
              ResolveScope::grid),
      HasSubstr("world 6, need a multiple of 4 (tensor_model_parallel_size 2 * pipeline_model_parallel_size 2); use 4 "
                "or 8 ranks"));
  EXPECT_THAT(refusal({{"parallel.tensor_model_parallel_size", "4"},
                       {"parallel.context_parallel_size", "4"},
                       {"parallel.pipeline_model_parallel_size", "2"}},
                      63, ResolveScope::grid),
              AllOf(HasSubstr("world 63, need a multiple of 32"), HasSubstr("use 32 or 64 ranks")));
  EXPECT_THAT(refusal({{"parallel.context_parallel_size", "4"}}, 2), HasSubstr("world 2, need a multiple of 4"));
  EXPECT_EQ(resolved({{"parallel.context_parallel_size", "4"}}, 8).data_parallel_size, 2);
}

TEST(Resolve, GridScopeTakesAnySizesAndNothingElse) {
  const Overrides sizes = {{"parallel.tensor_model_parallel_size", "2"},
                           {"parallel.context_parallel_size", "4"},
                           {"parallel.pipeline_model_parallel_size", "3"},
                           {"model.num_layers", "0"}};
  EXPECT_EQ(resolved(sizes, 48, ResolveScope::grid).data_parallel_size, 2);
  EXPECT_THAT(refusal({{"parallel.rank_order", "tp-cp-dp"}}, 1, ResolveScope::grid),
              HasSubstr("rank_order \"tp-cp-dp\""));
  EXPECT_THAT(refusal({{"parallel.rank_order", "tp-cp-dp-dp"}}, 1, ResolveScope::grid), HasSubstr("tp-cp-dp-pp"));
  EXPECT_EQ(resolved({{"parallel.rank_order", "pp-dp-cp-tp"}}, 2, ResolveScope::grid).data_parallel_size, 2);
  EXPECT_THAT(refusal({{"parallel.context_parallel_size", "0"}}, 1, ResolveScope::grid),
              HasSubstr("context_parallel_size 0 is too small; use 1 or more"));
  EXPECT_THAT(refusal({{"parallel.tensor_model_parallel_size", "2147483647"},
                       {"parallel.context_parallel_size", "2147483647"},
                       {"parallel.pipeline_model_parallel_size", "2147483647"}},
                      1, ResolveScope::grid),
              HasSubstr("use smaller parallel sizes"));
}

TEST(Resolve, B013_BatchThatDoesNotDivideNamesWhatDoes) {
  EXPECT_THAT(refusal({{"training.global_batch_size", "8"}, {"training.micro_batch_size", "3"}}),
              HasSubstr("global_batch_size 8 is not a multiple of micro_batch_size 3 * data-parallel size 1; use "
                        "global_batch_size 6 or 9, or micro_batch_size 1, 2, 4 or 8"));
  EXPECT_THAT(refusal({{"training.global_batch_size", "4"}, {"training.micro_batch_size", "1"}}, 3),
              AllOf(HasSubstr("use global_batch_size 3 or 6"), Not(HasSubstr("or micro_batch_size"))));
  EXPECT_EQ(resolved({{"training.global_batch_size", "12"}, {"training.micro_batch_size", "2"}}, 3).micro_batches, 2);
}

TEST(Resolve, B015_AnySeqLengthFitsAnyContextParallelSize) {
  // Rows are padded inside, so 1022 tokens over 2 ranks need no other length.
  EXPECT_EQ(resolved({{"data.seq_length", "1022"}, {"parallel.context_parallel_size", "2"}}, 2).world_size, 2);
  EXPECT_THAT(refusal({{"data.seq_length", "1"}}), HasSubstr("seq_length 1 is too small; use 2 or more"));
  EXPECT_THAT(refusal({{"data.seq_length", "2147483648"}}), HasSubstr("use at most 2147483647"));
  EXPECT_NO_THROW(resolved({{"data.seq_length", "2147483647"}}));
}

TEST(Resolve, HeadsNameWhatWorks) {
  EXPECT_THAT(
      refusal({{"model.hidden_size", "130"}}),
      HasSubstr("hidden_size 130 is not a multiple of num_attention_heads 4; use hidden_size 128 or 132, or give "
                "kv_channels"));
  EXPECT_NO_THROW(resolved({{"model.hidden_size", "130"}, {"model.kv_channels", "32"}}));
  EXPECT_THAT(
      refusal({{"model.num_attention_heads", "12"}, {"model.num_query_groups", "5"}, {"model.kv_channels", "8"}}),
      HasSubstr("num_attention_heads 12 is not a multiple of num_query_groups 5; use num_query_groups 1, 2, 3, 4, 6 or "
                "12"));
  EXPECT_THAT(refusal({{"model.kv_channels", "33"}}),
              HasSubstr("kv_channels 33 is odd, but rotary embedding turns channels in "
                        "pairs; use 32 or 34"));
  EXPECT_THAT(refusal({{"model.hidden_size", "36"}}),
              HasSubstr("kv_channels 9 (hidden_size / num_attention_heads) is odd"));
  EXPECT_THAT(refusal({{"model.kv_channels", "258"}}), HasSubstr("kv_channels 258 is too large; use 256 or less"));
  EXPECT_NO_THROW(resolved({{"model.kv_channels", "256"}}));
}

TEST(Resolve, AllReasonsComeAtOnce) {
  const std::string message = refusal({{"model.num_layers", "0"}, {"data.seq_length", "1"}, {"optimizer.lr", "-1"}});
  EXPECT_THAT(message,
              AllOf(::testing::StartsWith("3 settings do not fit: (1) num_layers 0"), HasSubstr("; (2) seq_length 1"),
                    HasSubstr("lr -1 must not be negative"), Not(HasSubstr("\n"))));
}

// One wrong value each; the message names the key and the value found.
TEST(Resolve, WrongValuesAreNamedWithTheirKey) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"model.num_layers", "-1"},
      {"model.hidden_size", "0"},
      {"model.num_attention_heads", "0"},
      {"model.num_query_groups", "-4"},
      {"model.kv_channels", "-2"},
      {"model.ffn_hidden_size", "-8"},
      {"model.vocab_size", "-1"},
      {"model.vocab_size", "2147483648"},
      {"model.rotary_base", "0"},
      {"model.norm_epsilon", "0"},
      {"model.window_size", "-1"},
      {"model.softmax_scale", "-0.5"},
      {"model.attention_dropout", "1"},
      {"model.hidden_dropout", "-0.1"},
      {"model.init_method_std", "-1"},
      {"model.rope_scaling.factor", "8"},
      {"data.split", "a"},
      {"data.split", "949,50,1"},
      {"data.split", "0,5"},
      {"data.split", "95,-5"},
      {"training.train_iters", "-1"},
      {"training.micro_batch_size", "0"},
      {"training.global_batch_size", "-2"},
      {"training.seed", "-1"},
      {"training.eval_interval", "-1"},
      {"training.eval_iters", "-1"},
      {"training.log_interval", "0"},
      {"optimizer.lr", "-1"},
      {"optimizer.min_lr", "0.5"},
      {"optimizer.lr_warmup_iters", "-1"},
      {"optimizer.lr_decay_iters", "-1"},
      {"optimizer.weight_decay", "-1"},
      {"optimizer.adam_beta1", "1"},
      {"optimizer.adam_beta2", "-0.1"},
      {"optimizer.adam_eps", "0"},
      {"optimizer.clip_grad", "-1"},
      {"memory.recompute_modules", "core_attn"},
      {"memory.mlp_tile_tokens", "-1"},
      {"memory.loss_tile_tokens", "-1"},
      {"memory.memory_limit", "-1"},
      {"communication.distributed_timeout_seconds", "0"},
      {"communication.cp_allgather.buffer_size", "-1"},
      {"parallel.zero_stage", "4"},
      {"parallel.zero_stage", "-1"},
      {"parallel.num_layers_per_virtual_pipeline_stage", "-1"},
      {"parallel.decoder_first_pipeline_num_layers", "-1"},
      {"output.save_interval", "-1"},
      {"output.keep", "-1"},
  };
  for (const auto& [path, value] : wrong) {
    SCOPED_TRACE(path + " " + value);
    const std::string name = path.substr(path.find('.') + 1);
    EXPECT_THAT(refusal({{path, value}}), AllOf(::testing::StartsWith(name), HasSubstr(value)));
  }
}

TEST(Resolve, AbsentFeaturesAreRefusedWithWhatWorks) {
  const std::vector<std::array<std::string, 3>> absent = {
      {"data.format", "jsonl", "use text or fasta"},
      {"data.format", "megatron", "use text or fasta"},
      {"data.format", "tokens", "use text or fasta"},
      {"data.tokenizer", "tokenizer.json", "use byte or dna"},
      {"memory.recompute_granularity", "auto", "use none, selective or full"},
      {"memory.cpu_offload_activations", "true", "use false"},
      {"memory.optimizer_cpu_offload", "true", "use false"},
      {"communication.reduce_scatter.use_ring", "true", "use false"},
      {"output.tensorboard", "true", "use false"},
  };
  for (const auto& [path, value, works] : absent) {
    SCOPED_TRACE(path + " " + value);
    EXPECT_THAT(refusal({{path, value}}), AllOf(HasSubstr("not in this version"), HasSubstr(works)));
  }
}

// Every key whose feature this version has: a value other than the default passes.
TEST(Resolve, WhatThisVersionHasIsAccepted) {
  for (const auto& [path, value] : Overrides{{"parallel.cp_comm_type", "p2p"},
                                             {"parallel.cp_comm_type", "all_gather"},
                                             {"parallel.cp_comm_type", "a2a"},
                                             {"parallel.cp_comm_type", "a2a+p2p"},
                                             {"parallel.cp_comm_type", "p2p,a2a"},
                                             {"parallel.cp_layout", "contiguous"},
                                             {"parallel.cp_layout", "balanced"},
                                             {"parallel.zero_stage", "1"},
                                             {"parallel.zero_stage", "2"},
                                             {"parallel.zero_stage", "3"},
                                             {"parallel.overlap_grad_reduce", "true"},
                                             {"parallel.overlap_param_gather", "true"},
                                             {"model.attention_dropout", "0.1"},
                                             {"model.hidden_dropout", "0.1"},
                                             {"communication.backend", "mpi"},
                                             {"communication.cp_allgather.overlap", "false"},
                                             {"communication.cp_allgather.buffer_size", "1024"},
                                             {"training.precision", "bf16"},
                                             {"training.device", "cpu"},
                                             {"training.deterministic", "true"},
                                             {"data.format", "fasta"},
                                             {"data.tokenizer", "dna"},
                                             {"data.split", "100"},
                                             {"data.split", "100,0"},
                                             {"memory.recompute_granularity", "none"},
                                             {"memory.recompute_granularity", "full"},
                                             {"memory.recompute_modules", "mlp,qkv"},
                                             {"memory.memory_limit", "1GiB"},
                                             {"communication.backend", "threads"},
                                             {"model.window_size", "16"},
                                             {"model.window_size", "16,0"},
                                             {"model.rotary_interleaved", "true"},
                                             {"training.train_iters", "0"},
                                             {"output.trace", "true"},
                                             {"optimizer.optimizer", "sgd"}}) {
    EXPECT_NO_THROW(resolved({{path, value}})) << path << " " << value;
  }
}

TEST(Resolve, RopeScalingParametersMustFitTheirType) {
  EXPECT_NO_THROW(resolved({{"model.rope_scaling.type", "linear"}, {"model.rope_scaling.factor", "4"}}));
  EXPECT_THAT(refusal({{"model.rope_scaling.type", "ntk"}, {"model.rope_scaling.factor", "0.5"}}),
              HasSubstr("at least 1"));
  EXPECT_THAT(refusal({{"model.rope_scaling.type", "llama3"}, {"model.rope_scaling.low_freq_factor", "4"}}),
              HasSubstr("low_freq_factor 4 must be above 0 and below high_freq_factor 4"));
  EXPECT_THAT(refusal({{"model.rope_scaling.type", "yarn"}, {"model.rope_scaling.beta_slow", "32"}}),
              HasSubstr("beta_slow 32"));
  EXPECT_THAT(
      refusal({{"model.rope_scaling.type", "yarn"}, {"model.rope_scaling.original_max_position_embeddings", "0"}}),
      HasSubstr("original_max_position_embeddings 0"));

  // A preset's factor goes with the preset's type, so switching the type off is enough.
  Config off = with({{"model.preset", "llama-3.2-1b"}, {"model.rope_scaling.type", "none"}});
  resolve(off, 1);
  EXPECT_EQ(off.model.rope_scaling.factor, 1);
}

TEST(Resolve, RopeScalingParametersOfAnotherTypeAreRefused) {
  EXPECT_THAT(refusal({{"model.rope_scaling.beta_fast", "16"}}),
              HasSubstr("rope_scaling.beta_fast 16 does nothing with rope_scaling.type none; use type yarn, or "
                        "beta_fast 32"));
  EXPECT_THAT(refusal({{"model.rope_scaling.type", "linear"},
                       {"model.rope_scaling.factor", "2"},
                       {"model.rope_scaling.original_max_position_embeddings", "4096"}}),
              HasSubstr("use type llama3 or yarn, or original_max_position_embeddings 8192"));
  EXPECT_THAT(refusal({{"model.rope_scaling.type", "yarn"}, {"model.rope_scaling.high_freq_factor", "8"}}),
              HasSubstr("high_freq_factor 8 does nothing with rope_scaling.type yarn"));
}

TEST(Resolve, PerLayerListsHaveOneValueForEachLayer) {
  EXPECT_THAT(refusal({{"model.window_size", "16,0,16"}}),
              HasSubstr("window_size has 3 values for 2 layers; give 1, or 2"));
  EXPECT_THAT(refusal({{"parallel.cp_comm_type", "p2p,p2p,a2a"}, {"model.num_layers", "4"}}),
              HasSubstr("cp_comm_type has 3 values for 4 layers; give 1, or 4"));
  EXPECT_THAT(refusal({{"model.window_size", "16,-1"}}), HasSubstr("window_size -1 is too small"));

  // A list of equal values says what one value says, and a checkpoint holds the text of one.
  Config equal = with({{"model.window_size", "16,16"}, {"parallel.cp_comm_type", "p2p,p2p"}});
  resolve(equal, 1);
  EXPECT_EQ(equal.model.window_size, std::vector<int64_t>{16});
  EXPECT_EQ(equal.parallel.cp_comm_type.size(), 1u);

  Config from_program;
  from_program.model.window_size.clear();
  EXPECT_THAT(message_of<ConfigError>([&] { resolve(from_program, 1); }), HasSubstr("window_size has 0 values"));
}

TEST(Resolve, EvaluationNeedsRowsAndBatches) {
  for (const char* split : {"100", "100,0"}) {
    EXPECT_THAT(refusal({{"training.eval_interval", "5"}, {"data.split", split}}),
                AllOf(HasSubstr("eval_interval 5 does nothing with split"), HasSubstr("use a split such as 95,5")));
  }
  EXPECT_THAT(refusal({{"training.eval_interval", "5"}, {"training.eval_iters", "0"}}),
              HasSubstr("eval_interval 5 does nothing with eval_iters 0"));
  EXPECT_NO_THROW(resolved({{"training.eval_interval", "5"}}));
}

TEST(Resolve, RecomputeModulesNeedSelective) {
  EXPECT_THAT(refusal({{"memory.recompute_modules", "mlp"}, {"memory.recompute_granularity", "full"}}),
              HasSubstr("recompute_modules does nothing with recompute_granularity full"));
}

TEST(Resolve, LoadWeightsOnlyNeedsLoad) {
  EXPECT_THAT(refusal({{"output.load_weights_only", "true"}}),
              HasSubstr("load_weights_only true does nothing without load"));
  EXPECT_NO_THROW(resolved({{"output.load_weights_only", "true"}, {"output.load", "checkpoints/step_3"}}));
}

TEST(Resolve, WarmUpAgainstTheStepsItIsPartOf) {
  EXPECT_THAT(refusal({{"optimizer.lr_warmup_iters", "20"}, {"optimizer.lr_decay_iters", "10"}}),
              HasSubstr("lr_warmup_iters 20 is more than lr_decay_iters 10, of which it is part; use 10 or less"));
  const Config short_run = with({{"optimizer.lr_warmup_iters", "20"}, {"training.train_iters", "10"}});
  Config sized = short_run;
  resolve(sized, 1);
  EXPECT_EQ(sized.optimizer.lr_decay_iters, 20) << "a run may end inside its warm-up";
}

TEST(Resolve, FillsInWhatFollows) {
  Config config =
      with({{"model.hidden_size", "512"}, {"model.num_attention_heads", "8"}, {"training.micro_batch_size", "2"}});
  const ResolvedSizes sizes = resolve(config, 3);
  EXPECT_EQ(config.model.ffn_hidden_size, 1408);  // 8/3 * 512 = 1365.3, up to 22 * 64
  EXPECT_EQ(config.model.num_query_groups, 8);
  EXPECT_EQ(config.model.kv_channels, 64);
  EXPECT_EQ(config.model.softmax_scale, 0.125);
  EXPECT_EQ(config.training.global_batch_size, 6);
  EXPECT_EQ(config.optimizer.lr_decay_iters, config.training.train_iters);
  EXPECT_EQ(config.memory.mlp_tile_tokens, 11904);  // 64 MiB / (1408 * 4) = 11915, down to 93 * 128
  EXPECT_EQ(config.origins.at("model.kv_channels"), "derived");
  EXPECT_EQ(config.origins.at("model.hidden_size"), "--hidden-size");
  EXPECT_EQ(sizes.world_size, 3);
  EXPECT_EQ(sizes.data_parallel_size, 3);
  EXPECT_EQ(sizes.micro_batches, 1);

  EXPECT_EQ(config.memory.loss_tile_tokens, 0);  // until the tokenizer has told the vocabulary
  config.model.vocab_size = 1 << 20;
  resolve(config, 3);
  EXPECT_EQ(config.memory.loss_tile_tokens, 128);  // 64 MiB hold 16 such rows, but fewer than 128 are never used
}

TEST(Resolve, ResolvedConfigurationsReadBackAndResolveToThemselves) {
  Config config = with({{"model.preset", "qwen2.5-0.5b"}, {"parallel.context_parallel_size", "2"}});
  resolve(config, 4);
  const std::string once = effective_config_yaml(config);
  const ResolvedSizes again = resolve(config, 4);
  EXPECT_EQ(effective_config_yaml(config), once);
  EXPECT_EQ(again.data_parallel_size, 2);
}

TEST(WorldSize, IsGivenOrTheProductOfTheParallelSizes) {
  const Config config = with({{"parallel.tensor_model_parallel_size", "2"}, {"parallel.context_parallel_size", "4"}});
  EXPECT_EQ(world_size(config, 0), 8);
  EXPECT_EQ(world_size(config, 16), 16);
  EXPECT_EQ(world_size(Config{}, 0), 1);
  EXPECT_EQ(world_size(with({{"parallel.context_parallel_size", "-3"}}), 0), 1);  // which resolve then refuses
  EXPECT_THROW(world_size(config, -1), ConfigError);
  EXPECT_THROW(world_size(config, 65537), ConfigError);
  EXPECT_THROW(world_size(with({{"parallel.context_parallel_size", "2147483647"},
                                {"parallel.tensor_model_parallel_size", "2147483647"},
                                {"parallel.pipeline_model_parallel_size", "2147483647"}}),
                          0),
               ConfigError);
}

using Environment = std::map<std::string, std::string>;

Launch launch_of(const Environment& environment) {
  return read_launch([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launch, B114_TheLauncherTellsItsProcesses) {
  for (const Environment& environment :
       std::vector<Environment>{{{"OMPI_COMM_WORLD_SIZE", "2"}},
                                {{"PMI_SIZE", "2"}},
                                {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_NTASKS", "2"}, {"SLURM_PROCID", "0"}},
                                {{"SLURM_NTASKS", "2"}, {"SLURM_PROCID", "1"}}}) {
    EXPECT_EQ(launch_of(environment).processes, 2) << environment.begin()->first;
    EXPECT_THAT(launch_of(environment).claim, HasSubstr("started 2 processes")) << environment.begin()->first;
  }
  for (const Environment& environment :
       std::vector<Environment>{{},
                                {{"OMPI_COMM_WORLD_SIZE", "1"}, {"PMI_SIZE", "1"}},
                                {{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}},  // a batch script, not a step
                                {{"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}},
                                {{"SLURM_NTASKS", "8"}},
                                {{"PMI_SIZE", "many"}}}) {
    EXPECT_EQ(launch_of(environment).processes, 1);
    EXPECT_EQ(launch_of(environment).claim, "");
  }
}

TEST(Launch, B114_RanksAndBackendMustAgreeWithTheLauncher) {
  const Launch alone;
  const Launch two = launch_of({{"OMPI_COMM_WORLD_SIZE", "2"}});
  EXPECT_EQ(agreed_ranks(8, alone), 8);
  EXPECT_EQ(agreed_ranks(0, two), 2);
  EXPECT_EQ(agreed_ranks(2, two), 2);
  EXPECT_THAT(message_of<ConfigError>([&] { agreed_ranks(3, two); }),
              AllOf(HasSubstr("--ranks 3"), HasSubstr("(OMPI_COMM_WORLD_SIZE=2)")));

  const auto backend = [](Backend choice) {
    CommunicationConfig communication;
    communication.backend = choice;
    return communication;
  };
  EXPECT_FALSE(ranks_are_processes(backend(Backend::automatic), alone, 8));
  EXPECT_TRUE(ranks_are_processes(backend(Backend::automatic), two, 2));
  EXPECT_THAT(message_of<ConfigError>([&] { ranks_are_processes(backend(Backend::threads), two, 2); }),
              HasSubstr("backend threads"));
  EXPECT_THAT(message_of<ConfigError>([&] { ranks_are_processes(backend(Backend::mpi), alone, 4); }),
              HasSubstr("mpirun -n 4"));
}

}  // namespace
}  // namespace farspan
