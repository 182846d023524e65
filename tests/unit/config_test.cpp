// SPDX-License-Identifier: Apache-2.0
// From text to a configuration and back: numbers, files, flags, presets, origins, the command line.
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <set>
#include <sys/stat.h>

#include "base/error.h"
#include "config/command_line.h"
#include "config/keys.h"
#include "config/load.h"
#include "config/presets.h"
#include "config/value_text.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using test::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

Config load_text(const std::string& yaml, const Overrides& overrides = {}) {
  const test::ScratchFolder folder;
  return load_config(folder.write("legal.yaml", yaml), overrides);
}

std::string load_error(const std::string& yaml, const Overrides& overrides = {}) {
  return message_of<ConfigError>([&] { load_text(yaml, overrides); });
}

// Every key's value as text.
std::map<std::string, std::string> values_of(const Config& config) {
  std::map<std::string, std::string> values;
  for (const Key& key : config_keys()) values[key.path()] = key.write(config);
  return values;
}

TEST(Numbers, B121_RealsAreReadInEveryFormAndNeverAsText) {
  for (const char* text : {"2e-5", "2.0e-5", "0.00002", "2E-5", "+2e-05", ".2e-4", "20_0.0e-7"}) {
    EXPECT_EQ(load_text(std::string("optimizer:\n  lr: ") + text + "\n").optimizer.lr, 2e-5) << text;
    EXPECT_EQ(load_text("", {{"optimizer.lr", text}}).optimizer.lr, 2e-5) << text;
  }
  EXPECT_THAT(load_error("optimizer:\n  min_lr: 0\n  lr: 2e-5x\n"),
              AllOf(HasSubstr("legal.yaml:3: optimizer.lr: "), HasSubstr("\"2e-5x\"")));
  EXPECT_THAT(load_error("", {{"optimizer.lr", "2e-5x"}}), HasSubstr("--lr: expected a number"));
  for (const char* text : {"", "e5", ".", "1e", "1e+", "1 2", "0x10", "nan", "inf", "-inf", "1e999", "1e-999", "1__0",
                           "_1", "1_", "1,5", "--1", "1e5.0"}) {
    EXPECT_THROW(read_real(text), ValueError) << text;
  }
  EXPECT_EQ(read_real("-1.5"), -1.5);
  EXPECT_EQ(read_real("0e999"), 0);
  EXPECT_EQ(read_real("1.7976931348623157e308"), std::numeric_limits<double>::max());
}

TEST(Numbers, B121_IntegersAreExactOrRefused) {
  EXPECT_EQ(load_text("data:\n  seq_length: 1_024\n").data.seq_length, 1024);
  EXPECT_EQ(load_text("data:\n  seq_length: 1e3\n").data.seq_length, 1000);
  EXPECT_EQ(read_integer("2.5e3"), 2500);
  EXPECT_EQ(read_integer("1000e-3"), 1);
  EXPECT_EQ(read_integer("4.0"), 4);
  EXPECT_EQ(read_integer("-7"), -7);
  EXPECT_EQ(read_integer("0e99"), 0);
  EXPECT_EQ(read_integer("9223372036854775807"), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(read_integer("-9223372036854775808"), std::numeric_limits<int64_t>::min());
  for (const char* text : {"", "1.5", "1e-3", "1.25e1", "9223372036854775808", "1e19", "1e999999999999", "4x", "x4",
                           "0x10", "1__024", "_1", "1_", "true", "- 4", " 4"}) {
    EXPECT_THROW(read_integer(text), ValueError) << text;
  }
  EXPECT_THAT(load_error("data:\n\n  seq_length: 1.5e0\n"),
              HasSubstr("legal.yaml:3: data.seq_length: expected an integer"));
}

TEST(Numbers, BytesTakeAUnit) {
  EXPECT_EQ(read_bytes("1.5e3"), 1500);
  EXPECT_EQ(read_bytes("16GiB"), int64_t{16} << 30);
  EXPECT_EQ(read_bytes("2 KiB"), 2048);
  EXPECT_EQ(read_bytes("16GB"), 16'000'000'000);
  EXPECT_EQ(read_bytes("3 MB"), 3'000'000);
  EXPECT_THAT(load_error("", {{"memory.memory_limit", "16gb"}}),
              HasSubstr("--memory-limit: expected bytes such as 1073741824, 512MiB or 16GB, found \"16gb\""));
  EXPECT_THROW(read_bytes("16B"), ValueError);
  EXPECT_THROW(read_bytes("GiB"), ValueError);
  EXPECT_THROW(read_bytes("99999999TiB"), ValueError);
}

TEST(Values, BooleansAreTrueOrFalse) {
  EXPECT_TRUE(load_text("model:\n  qk_layernorm: true\n").model.qk_layernorm);
  for (const char* text : {"yes", "1", "True", "on", ""}) {
    EXPECT_THROW(read_boolean(text), ValueError) << text;
  }
}

TEST(Values, ChoicesNameTheNearest) {
  EXPECT_THAT(load_text("parallel:\n  cp_comm_type: a2a+p2p\n").parallel.cp_comm_type,
              ElementsAre(CpCommType::a2a_p2p));
  EXPECT_EQ(load_text("memory:\n  recompute_granularity: auto\n").memory.recompute_granularity, Recompute::automatic);
  EXPECT_THAT(
      load_error("parallel:\n  cp_comm_type: all-gathr\n"),
      HasSubstr("expected one of p2p, all_gather, a2a, a2a+p2p, auto, found \"all-gathr\"; did you mean all_gather?"));
}

TEST(Values, PerLayerSettingsAreOneValueOrAList) {
  const Config none = load_text("");
  EXPECT_THAT(none.parallel.cp_comm_type, ElementsAre(CpCommType::automatic));
  EXPECT_EQ(window_of_layer(none.model, 71), 0);

  const std::string file = "model:\n  window_size: [0, 1_024, 0]\nparallel:\n  cp_comm_type: p2p,a2a,p2p\n";
  const Config lists = load_text(file);
  EXPECT_THAT(lists.model.window_size, ElementsAre(0, 1024, 0));
  EXPECT_EQ(window_of_layer(lists.model, 1), 1024);
  EXPECT_EQ(cp_comm_type_of_layer(lists.parallel, 1), CpCommType::a2a);
  EXPECT_EQ(cp_comm_type_of_layer(lists.parallel, 2), CpCommType::p2p);
  EXPECT_EQ(find_key("parallel.cp_comm_type")->write(lists), "[p2p, a2a, p2p]");
  EXPECT_EQ(values_of(load_text(effective_config_yaml(lists))), values_of(lists));

  const Config flags = load_text(file, {{"model.window_size", "7, 8"}, {"model.window_size", "9"}});
  EXPECT_THAT(flags.model.window_size, ElementsAre(7, 8, 9));

  // One value is written as before there were lists: checkpoints compare the text.
  EXPECT_EQ(find_key("model.window_size")->write(load_text("model:\n  window_size: [5]\n")), "5");
  EXPECT_THAT(load_error("model:\n  window_size: []\n"), HasSubstr("found an empty list"));
  EXPECT_THAT(load_error("model:\n  window_size: [1, x]\n"), HasSubstr("expected an integer"));
  EXPECT_THAT(load_error("", {{"parallel.cp_comm_type", ""}}), HasSubstr("expected one"));
}

TEST(Values, PathsMayBeOneOrSeveral) {
  EXPECT_THAT(load_text("data:\n  path: a,b.txt\n").data.path, ElementsAre("a,b.txt"));
  EXPECT_THAT(load_text("data:\n  path: [a.txt, \"b c\"]\n").data.path, ElementsAre("a.txt", "b c"));
  EXPECT_THAT(load_text("", {{"data.path", "a, b"}, {"data.path", "c"}}).data.path, ElementsAre("a", "b", "c"));
  EXPECT_THAT(load_text("data:\n  path: []\n").data.path, IsEmpty());
  EXPECT_THAT(load_error("training:\n  seed: [1, 2]\n"), HasSubstr("expected one value, found a list of 2"));
}

TEST(File, B122_UnknownKeyNamesTheNearestAndTheLine) {
  EXPECT_THAT(
      load_error("model:\n  num_layers: 2\n\nparallel:\n  # four ranks\n\n  contxt_parallel_size: 4\n"),
      HasSubstr("legal.yaml:7: unknown key parallel.contxt_parallel_size; did you mean context_parallel_size?"));
  EXPECT_THAT(load_error("parallel:\n  contxt_parallel: 2\n"), HasSubstr("did you mean context_parallel_size?"));
  EXPECT_THAT(load_error("paralel:\n  context_parallel_size: 2\n"),
              HasSubstr("belongs in section parallel, as parallel.context_parallel_size"));
  EXPECT_THAT(load_error("optimiser:\n  learning: 2\n"),
              HasSubstr("unknown section optimiser, did you mean optimizer?"));
  EXPECT_THAT(load_error("model:\n  rope_scaling:\n    fctor: 2\n"),
              HasSubstr("legal.yaml:3: unknown key model.rope_scaling.fctor; did you mean rope_scaling.factor?"));
  EXPECT_THAT(load_error("model:\n  qqqqqqqq: 2\n"), HasSubstr("unknown key model.qqqqqqqq"));
}

TEST(File, B122_KnownKeyInTheWrongSectionNamesTheRightOne) {
  EXPECT_THAT(
      load_error("training:\n  train_iters: 3\n  lr: 1\n"),
      HasSubstr(
          "legal.yaml:3: key training.lr does not belong here; it belongs in section optimizer, as optimizer.lr"));
  EXPECT_THAT(load_error("num_layers: 3\n"), HasSubstr("it belongs in section model, as model.num_layers"));
  EXPECT_THAT(load_error("parallel:\n  rope_scaling:\n    type: yarn\n"), HasSubstr("as model.rope_scaling.type"));
}

TEST(File, B122_DuplicateKeyNamesBothLines) {
  EXPECT_THAT(load_error("model:\n  num_layers: 2\n  hidden_size: 8\n  num_layers: 2\n"),
              HasSubstr("legal.yaml:4: model.num_layers is given twice, first in line 2"));
  EXPECT_THAT(load_error("model:\n  num_layers: 2\nmodel:\n  hidden_size: 8\n"),
              HasSubstr("legal.yaml:3: model is given twice, first in line 1"));
  EXPECT_THAT(load_error("model: {num_layers: 2, num_layers: 3}\n"), HasSubstr("is given twice"));
  EXPECT_THAT(load_error("model.num_layers: 2\nmodel:\n  num_layers: 3\n"), HasSubstr("is given twice, first at"));
}

TEST(File, FormsThatAreNoConfigurationAreRefusedWithALine) {
  EXPECT_THAT(load_error("- a\n- b\n"), AllOf(HasSubstr("legal.yaml:1"), HasSubstr("found a list")));
  EXPECT_THAT(load_error("\n\nhello\n"), AllOf(HasSubstr("legal.yaml:3"), HasSubstr("found a single value")));
  EXPECT_THAT(load_error("model:\n  num_layers: [1, 2\ndata: 3\n"), HasSubstr("not YAML"));
  EXPECT_THAT(load_error("model:\n\tnum_layers: 2\n"), AllOf(HasSubstr("legal.yaml:2"), HasSubstr("not YAML")));
  EXPECT_THAT(load_error("model: {}\n---\ndata: {}\n"), HasSubstr("a second YAML document"));
  EXPECT_THAT(load_error("model:\n  num_layers:\n"), HasSubstr("legal.yaml:2: model.num_layers has no value"));
  EXPECT_THAT(load_error("model:\n  num_layers: {a: 1}\n"), HasSubstr("unknown key model.num_layers.a"));
  EXPECT_THAT(load_error("model: 3\n"), HasSubstr("model is a section"));
  EXPECT_THAT(load_error("model:\n  rope_scaling: 8\n"), HasSubstr("model.rope_scaling is a group of keys"));
  EXPECT_THAT(load_error("data:\n  path: [{a: 1}]\n"), HasSubstr("a list holds plain values, found a map"));
  EXPECT_THAT(load_error("model: &m {x: *m}\n"), HasSubstr("lies too deep"));
  EXPECT_THAT(load_error(std::string(2 << 20, ' ')), HasSubstr("is larger than"));
  EXPECT_THAT(message_of<ConfigError>([] { load_config("/nowhere/x.yaml", {}); }),
              HasSubstr("/nowhere/x.yaml does not exist"));
  EXPECT_THAT(message_of<ConfigError>([] { load_config("/tmp", {}); }), HasSubstr("is a folder"));
}

TEST(File, PipesAndDevicesAreRefusedAtOnce) {
  const test::ScratchFolder folder;
  const std::string pipe = folder.path("pipe.yaml");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);  // nobody ever writes into it
  for (const std::string& file : {pipe, std::string("/dev/zero")}) {
    EXPECT_THAT(message_of<ConfigError>([&] { load_config(file, {}); }), HasSubstr("is a pipe or a device")) << file;
  }
}

TEST(File, EmptyFilesAndSectionsGiveTheDefaults) {
  const auto defaults = values_of(Config{});
  EXPECT_EQ(values_of(load_text("")), defaults);
  EXPECT_EQ(values_of(load_text("# nothing\n")), defaults);
  EXPECT_EQ(values_of(load_text("model:\ndata: {}\n")), defaults);
}

TEST(Flags, B123_AFlagBeatsTheFileAlsoWithTheDefaultsValue) {
  const std::string file = "training:\n  train_iters: 7\n";
  const std::string fallback = std::to_string(TrainingConfig{}.train_iters);
  const Config no_flag = load_text(file);
  EXPECT_EQ(no_flag.training.train_iters, 7);
  EXPECT_THAT(no_flag.origins.at("training.train_iters"), ::testing::EndsWith("legal.yaml:2"));

  const Config nine = load_text(file, {{"training.train_iters", "9"}});
  EXPECT_EQ(nine.training.train_iters, 9);
  EXPECT_EQ(nine.origins.at("training.train_iters"), "--train-iters");

  const Config as_default = load_text(file, {{"training.train_iters", fallback}});
  EXPECT_EQ(as_default.training.train_iters, TrainingConfig{}.train_iters);
  EXPECT_EQ(as_default.origins.at("training.train_iters"), "--train-iters");
  EXPECT_EQ(as_default.origins.at("training.seed"), "default");
  EXPECT_THAT(effective_config_yaml(as_default), HasSubstr("\n  train_iters: 100  # --train-iters\n"));
}

TEST(Flags, UnknownAndRepeatedOnesAreRefused) {
  EXPECT_THAT(load_error("", {{"training.seed", "1"}, {"training.seed", "2"}}), HasSubstr("--seed is given twice"));
  EXPECT_THAT(load_error("", {{"training.sed", "1"}}), HasSubstr("did you mean seed?"));
}

TEST(Keys, EachHasOneFlagOneHelpAndTheNameOfTheContract) {
  std::set<std::string> flags, paths;
  for (const Key& key : config_keys()) {
    EXPECT_TRUE(flags.insert(key.flag()).second) << key.flag();
    EXPECT_TRUE(paths.insert(key.path()).second) << key.path();
    EXPECT_FALSE(key.help.empty()) << key.path();
    EXPECT_FALSE(key.values.empty()) << key.path();
  }
  EXPECT_EQ(find_key("parallel.context_parallel_size")->flag(), "--context-parallel-size");
  EXPECT_EQ(find_key("model.rope_scaling.type")->flag(), "--rope-scaling-type");
  EXPECT_EQ(find_key("communication.cp_allgather.buffer_size")->flag(), "--cp-allgather-buffer-size");
  EXPECT_EQ(find_key("communication.reduce_scatter.use_ring")->flag(), "--reduce-scatter-use-ring");
  EXPECT_THAT(std::vector<std::string>(config_sections().begin(), config_sections().end()),
              ElementsAre("model", "parallel", "data", "training", "optimizer", "memory", "communication", "output"));
}

// A value that differs from the default for every kind of key: a key whose reader or writer touches another field than
// its own shows up as a second difference, or as none.
TEST(Keys, EachReadsAndWritesItsOwnFieldOnly) {
  const auto defaults = values_of(Config{});
  for (const Key& key : config_keys()) {
    if (key.path() == "model.preset") continue;  // sets other fields on purpose
    std::string text = "7";
    if (key.is_boolean) text = defaults.at(key.path()) == "true" ? "false" : "true";
    if (const size_t bar = key.values.rfind('|'); !key.is_boolean && bar != std::string::npos) {
      text = key.values.substr(bar + 1, key.values.find(',') - bar - 1);
      if (text == defaults.at(key.path())) text = key.values.substr(0, key.values.find('|'));
    }
    std::map<std::string, std::string> expected = defaults;
    expected[key.path()] = key.is_list && !key.is_per_layer ? "[" + text + "]" : text;
    EXPECT_EQ(values_of(load_text("", {{key.path(), text}})), expected) << key.path();
  }
}

TEST(Effective, ReadsBackTheSame) {
  const std::string text =
      "model:\n  preset: llama-3.1-8b\n  num_layers: 3\n  norm_epsilon: 1.0000000000000002e-5\n"
      "parallel:\n  hierarchical_context_parallel_sizes: [2, 4]\n"
      "data:\n  path: ['a b: c', \"tab\\there \\\"x\\\"\", '- d', '~', 'null', '#e', 'f\\g', 'true', 'ünï']\n  split: "
      "'80,20'\n"
      "memory:\n  recompute_modules: [mlp, qkv]\n  memory_limit: 3GiB\n"
      "output:\n  load: ''\n  save: '...'\n";
  const Config first = load_text(text, {{"optimizer.lr", "0.1"}});
  const std::string effective = effective_config_yaml(first);
  const Config second = load_text(effective);
  EXPECT_EQ(values_of(second), values_of(first)) << effective;
  EXPECT_EQ(second.data.path, first.data.path);
  EXPECT_EQ(second.data.path[1], "tab\there \"x\"");
  EXPECT_EQ(second.model.norm_epsilon, 1.0000000000000002e-5);
  EXPECT_THAT(effective, HasSubstr("\n  lr: 0.1  # --lr\n"));
  EXPECT_THAT(effective, HasSubstr("\n  rope_scaling:\n    type: llama3  # preset\n    factor: 8  # preset\n"));
  EXPECT_THAT(effective, HasSubstr("legal.yaml:3\n"));
}

TEST(Presets, ValuesAndOverrides) {
  const Config preset = load_text("model:\n  preset: qwen3-1.7b\n");
  EXPECT_EQ(preset.model.num_layers, 28);
  EXPECT_EQ(preset.model.kv_channels, 128);
  EXPECT_TRUE(preset.model.qk_layernorm);
  EXPECT_EQ(preset.origins.at("model.num_layers"), "preset");

  // The key stands before the preset in the file and beats it all the same.
  const Config beside = load_text("model:\n  num_layers: 2\n  preset: qwen3-1.7b\n");
  EXPECT_EQ(beside.model.num_layers, 2);
  EXPECT_EQ(beside.model.hidden_size, 2048);
  EXPECT_THAT(beside.origins.at("model.num_layers"), ::testing::EndsWith("legal.yaml:2"));

  const Config flag = load_text("model:\n  preset: qwen3-1.7b\n", {{"model.preset", "mistral-7b"}});
  EXPECT_THAT(flag.model.window_size, ElementsAre(4096));
  EXPECT_FALSE(flag.model.qk_layernorm);
  EXPECT_EQ(flag.model.preset, "mistral-7b");

  EXPECT_THAT(load_error("model:\n  preset: qwen3-17b\n"),
              AllOf(HasSubstr("legal.yaml:2: there is no preset qwen3-17b; did you mean qwen3-1.7b?")));
}

// Parameters that the presets imply, against the totals that the models' publishers give (in millions).
TEST(Presets, SizesGiveThePublishedParameterCounts) {
  const std::map<std::string, double> published = {
      {"llama-3.2-1b", 1235.8}, {"llama-3.2-3b", 3212.7}, {"llama-3.1-8b", 8030.3}, {"llama-2-7b", 6738.4},
      {"qwen3-0.6b", 596.0},    {"qwen3-1.7b", 1720.6},   {"qwen3-8b", 8190.7},     {"qwen2.5-0.5b", 494.0},
      {"qwen2.5-7b", 7615.6},   {"mistral-7b", 7241.7}};
  ASSERT_EQ(published.size(), preset_names().size());
  for (const std::string& name : preset_names()) {
    Config config;
    ASSERT_TRUE(apply_preset(config, name));
    const ModelConfig& m = config.model;
    const int64_t query = m.num_attention_heads * m.kv_channels, key = m.num_query_groups * m.kv_channels;
    int64_t layer = 2 * query * m.hidden_size + 2 * key * m.hidden_size + 3 * m.hidden_size * m.ffn_hidden_size;
    layer += 2 * m.hidden_size + (m.add_qkv_bias ? query + 2 * key : 0) + (m.qk_layernorm ? 2 * m.kv_channels : 0);
    const int64_t embeddings = (m.untie_embeddings_and_output_weights ? 2 : 1) * m.vocab_size * m.hidden_size;
    const double millions = static_cast<double>(m.num_layers * layer + embeddings + m.hidden_size) / 1e6;
    EXPECT_NEAR(millions, published.at(name), 0.1) << name;  // the figures are rounded to 0.1
  }
}

const std::vector<CommandSpec>& specs() {
  static const std::vector<CommandSpec> commands = {
      {"train", "t", true, "", {CommandOption::ranks, CommandOption::output, CommandOption::profile}},
      {"groups", "g", false, "parallel", {CommandOption::ranks, CommandOption::ranks_per_host, CommandOption::json}},
      {"generate", "c", true, "", {CommandOption::prompt, CommandOption::max_tokens, CommandOption::temperature}}};
  return commands;
}
CommandLine parse(const std::vector<std::string>& arguments) { return parse_command_line(arguments, specs()); }
std::string parse_error(const std::vector<std::string>& arguments) {
  return message_of<ConfigError>([&] { parse(arguments); });
}

TEST(CommandLine, OptionsKeysAndFile) {
  const CommandLine line = parse({"train", "--ranks", "4", "a.yaml", "--context-parallel-size=2", "--lr", "-1",
                                  "--output", "o", "--path", "x,y", "--path", "z", "--load", "c", "--profile"});
  EXPECT_EQ(line.command, "train");
  EXPECT_EQ(line.config_path, "a.yaml");
  EXPECT_EQ(line.ranks, 4);
  EXPECT_EQ(line.output, "o");
  EXPECT_TRUE(line.profile);
  EXPECT_FALSE(parse({"train", "a.yaml"}).profile);
  EXPECT_EQ(line.load, "c");
  EXPECT_THAT(line.overrides,
              ElementsAre(Pair("parallel.context_parallel_size", "2"), Pair("data.path", "x,y"), Pair("data.path", "z"),
                          Pair("optimizer.lr", "-1"), Pair("output.load", "c")));
}

TEST(CommandLine, BooleanFlagsStandAloneOrTakeAValue) {
  const CommandLine line = parse({"train", "--deterministic", "a.yaml", "--document-mask", "false",
                                  "--pack-documents=false", "--qk-layernorm", "true", "--add-qkv-bias"});
  EXPECT_EQ(line.config_path, "a.yaml");
  EXPECT_THAT(line.overrides,
              ::testing::UnorderedElementsAre(Pair("training.deterministic", "true"),
                                              Pair("data.document_mask", "false"), Pair("data.pack_documents", "false"),
                                              Pair("model.qk_layernorm", "true"), Pair("model.add_qkv_bias", "true")));
  EXPECT_THAT(message_of<ConfigError>([] {
                load_config("", parse({"groups", "--sequence-parallel=maybe"}).overrides);
              }),
              HasSubstr("--sequence-parallel: expected true or false, found \"maybe\""));
}

TEST(CommandLine, GenerateOptions) {
  const CommandLine line = parse(
      {"generate", "a.yaml", "--prompt", "In the beginning, there", "--max-tokens", "1_000", "--temperature", "0.7"});
  EXPECT_EQ(line.prompt, "In the beginning, there");
  EXPECT_EQ(line.max_tokens, 1000);
  EXPECT_EQ(line.temperature, 0.7);
  EXPECT_EQ(parse({"generate", "a.yaml", "--prompt=--dashes"}).prompt, "--dashes");
  EXPECT_EQ(parse({"generate", "a.yaml", "--prompt", "- a list"}).prompt, "- a list");
  EXPECT_EQ(parse({"generate", "a.yaml", "--prompt=--lr"}).prompt, "--lr");
  EXPECT_THAT(parse_error({"generate", "a.yaml", "--max-tokens", "0"}), HasSubstr("--max-tokens 0"));
  EXPECT_THAT(parse_error({"generate", "a.yaml", "--max-tokens", "9223372036854775807"}),
              HasSubstr("--max-tokens 9223372036854775807 is too large; use at most 1000000000"));
  EXPECT_THAT(parse_error({"generate", "a.yaml", "--temperature", "-1"}), HasSubstr("--temperature -1"));
}

TEST(CommandLine, MistakesAreNamed) {
  EXPECT_THAT(parse_error({}), HasSubstr("no command given"));
  EXPECT_THAT(parse_error({"trian", "a.yaml"}), HasSubstr("unknown command trian, did you mean train?"));
  for (const char* later : {"prepare", "import", "export", "doctor", "bench", "report"}) {
    EXPECT_THAT(parse_error({later}), HasSubstr("is not in this version"));
  }
  EXPECT_THAT(parse_error({"--ranks", "2", "train"}), HasSubstr("--ranks stands before the command"));
  EXPECT_THAT(parse_error({"train"}), HasSubstr("no config file given"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "b.yaml"}), HasSubstr("reads one config file, found a.yaml and b.yaml"));
  EXPECT_THAT(parse_error({"train", "--contxt-parallel-size", "4", "a.yaml"}),
              HasSubstr("farspan train has no flag --contxt-parallel-size; did you mean --context-parallel-size?"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--context_parallel_size=4"}),
              HasSubstr("did you mean --context-parallel-size?"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--json"}), HasSubstr("has no flag --json"));
  EXPECT_THAT(parse_error({"groups", "--num-layers", "4"}), HasSubstr("has no flag --num-layers"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--lr"}),
              HasSubstr("--lr needs a value, found nothing; write --lr VALUE"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--lr", "--seed", "1"}),
              HasSubstr("--lr needs a value, found the flag --seed"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--ranks", "0"}), HasSubstr("--ranks 0 is too small; use 1 or more"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--ranks", "two"}), HasSubstr("--ranks: expected an integer"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--output", ""}), HasSubstr("--output is empty; name a folder"));
  EXPECT_THAT(parse_error({"groups", "--ranks-per-host", "0"}), HasSubstr("--ranks-per-host 0 is too small"));
  EXPECT_THAT(parse_error({"train", "a.yaml", "--ranks", "2", "--ranks", "3"}), HasSubstr("--ranks is given twice"));
}

TEST(CommandLine, HelpListsEveryKeyBySection) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"}, {"train", "--help"}, {"train", "a.yaml", "-h"}}) {
    const std::string help = parse(arguments).printout;
    for (const Key& key : config_keys()) EXPECT_THAT(help, HasSubstr("  " + key.flag() + " "));
    for (const std::string& section : config_sections()) EXPECT_THAT(help, HasSubstr("\n" + section + ":\n"));
  }
  EXPECT_THAT(parse({"groups", "--help"}).printout,
              AllOf(HasSubstr("--rank-order"), ::testing::Not(HasSubstr("--lr "))));
  EXPECT_EQ(parse({"--version"}).printout, "farspan " + std::string(kVersion) + "\n");
}

}  // namespace
}  // namespace farspan
