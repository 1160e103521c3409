// Tests the flags of llama_train: values, files, refused flags, and the page that lists the flags.

#include "examples/llama/train/options.h"

#include <cstdlib>
#include <utility>

#include "examples/llama/cli.h"
#include "testing/environment.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/layouts.h"

namespace llama {
namespace {

using tessera::testing::TemporaryFolder;
using tessera::testing::WriteFile;
using Flags = std::vector<std::string>;

TrainOptions ParseFlags(Flags flags) {
  flags.insert(flags.begin(), {"--config", "c.json", "--text", "t"});
  return parse_train_options(std::move(flags));
}

/// Parses `text` as a config file, together with `flags` and the flags that every run needs.
TrainOptions ParseFile(const std::string& text, Flags flags = {}) {
  const TemporaryFolder folder;
  const std::string file = (folder / "run.toml").string();
  WriteFile(file, text);
  flags.insert(flags.begin(), {"--config-file", file});
  return ParseFlags(std::move(flags));
}

Flags flags_in(const std::string& text) {
  return tessera::testing::split(text, ' ');
}

/// Flags that llama_train must refuse, and words of the error.
struct RefusedFlags {
  std::string flags;
  std::vector<std::string_view> words;
};

void expect_refused(const std::vector<RefusedFlags>& rows, TrainOptions (*parse)(Flags)) {
  for (const RefusedFlags& row : rows) {
    tessera::testing::expect_refusals(
        {{row.flags, [&] { parse(flags_in(row.flags)); }, row.words}});
  }
}

TEST(TrainOptions, ResumeHasAnOptionalValue) {
  EXPECT_EQ(ParseFlags({"--checkpoint", "run"}).resume, "");
  EXPECT_EQ(ParseFlags({"--checkpoint", "run", "--resume"}).resume, "newest");
  EXPECT_EQ(ParseFlags({"--resume", "--checkpoint", "run"}).resume, "newest");
  EXPECT_EQ(ParseFlags({"--checkpoint", "run", "--resume", "auto"}).resume, "auto");
}

TEST(Nearest, FindsTheNameWithTheFewestEdits) {
  EXPECT_EQ(nearest("stpes", {"seq", "steps", "seed"}), "steps");
  EXPECT_EQ(nearest("x", {}), "");
}

TEST(TrainOptions, ConfigFileHasSections) {
  const TrainOptions options = ParseFile(
      "steps = 7\n[training]\nbatch = 6\nparam-dtype = \"bf16\"\n[parallelism]\ndp = 2\nsp = "
      "false\n"
      "[activation_checkpoint]\nac = \"full\"\n[checkpoint]\ncheckpoint = \"run\"\nresume = true\n"
      "[optimizer]\nlr = 0.5\nbetas = [0.8, 0.99]\n[metrics]\nlog-every = 3\n",
      {"--lr", "0.25", "--resume-step", "3"});
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.batch, 6);
  EXPECT_EQ(options.param_dtype, "bf16");
  EXPECT_EQ(options.dp, 2);
  EXPECT_FALSE(options.sp);
  EXPECT_EQ(options.ac, "full");
  EXPECT_EQ(options.lr, 0.25);
  EXPECT_EQ(options.betas, (std::vector<double>{0.8, 0.99}));
  EXPECT_EQ(options.log_every, 3);
  EXPECT_EQ(options.checkpoint, "run");
  EXPECT_EQ(options.resume, "");
  EXPECT_EQ(options.resume_step, 3);
}

TEST(TrainOptions, ConfigFileHasListsAndSwitches) {
  const TrainOptions options = ParseFile(
      "initial-load = \"run\"\nresume = false\nexclude = [\"optimizer\", \"data\"]\n"
      "offload = true\ndecay-matrices-only = false\n");
  EXPECT_EQ(options.resume, "");
  EXPECT_EQ(options.exclude, (Flags{"optimizer", "data"}));
  EXPECT_TRUE(options.offload);
  EXPECT_FALSE(options.decay_matrices_only);
  EXPECT_EQ(ParseFile("resume = true\ncheckpoint = \"run\"\n").resume, "newest");
  EXPECT_EQ(ParseFile("resume = false\n", {"--checkpoint", "run", "--resume", "auto"}).resume,
            "auto");
  EXPECT_EQ(
      ParseFile("resume = \"auto\"\n", {"--checkpoint", "run", "--resume-step", "6"}).resume_step,
      6);
}

TEST(TrainOptions, ErrorsNameTheInvalidConfigEntry) {
  const std::vector<std::pair<const char*, std::vector<std::string_view>>> rows{
      {"[model]\nsteps = 3\n", {"run.toml", "\"steps\"", "[model]", "[training]"}},
      {"[trainig]\nsteps = 3\n", {"[trainig]", "run.toml", "did you mean [training]"}},
      {"[training]\nstpes = 3\n", {"\"stpes\"", "[training]", "did you mean --steps"}},
      {"steps = 3\n[training]\nsteps = 3\n", {"\"steps\"", "twice"}},
      {"sp = true\nno-sp = true\n", {"twice"}},
      {"[training.steps]\nx = 3\n", {"\"steps\""}},
      {"resume = true\nresume-step = 6\ncheckpoint = \"run\"\n", {"--resume", "--resume-step"}},
      {"exclude = []\n", {"run.toml", "\"exclude\"", "empty"}},
      {"async = \"no\"\n", {"run.toml", "\"async\"", "true or false"}},
      {"config-file = \"x.toml\"\n", {"\"config-file\"", "command line"}},
      {"steps = true\n", {"run.toml", "\"steps\"", "value"}},
      {"steps = [3]\n", {"run.toml", "\"steps\"", "list"}},
      {"exclude = [[1]]\n", {"\"exclude\""}},
      {"betas = [0.9]\n", {"--betas"}}};
  for (const auto& [text, words] : rows) {
    tessera::testing::expect_refusals({{text, [&, t = text] { ParseFile(t); }, words}});
  }
}

TEST(TrainOptions, ErrorsNameTheInvalidFlag) {
  expect_refused({{"", {"no model"}},
                  {"--config c", {"no data"}},
                  {"--config c --model m", {"--model", "--config"}},
                  {"--config c --steps x", {"--steps"}},
                  {"--config c --lrr 1", {"did you mean --lr"}},
                  {"--config c --tokens a --weight 1e308 --tokens b --weight 1e308",
                   {"--weight", "no finite sum"}},
                  {"--model m --text t --lora-rank 2 --merge-lora --save-hf d --save-lora d",
                   {"--save-hf", "--save-lora", "d"}},
                  {"--model m --text t --save-hf ./m/.", {"--model", "--save-hf"}},
                  {"--config c --tokens t --profile t", {"--tokens", "--profile", "t"}}},
                 [](Flags flags) { return parse_train_options(std::move(flags)); });
  expect_refused(
      {{"--checkpoint run --resume always", {"--resume", "always"}},
       {"--dp 3", {"--batch 4", "--dp 3"}},
       {"--backend nccl", {"--backend nccl", "--device cuda"}},
       {"--betas 0.9,0.9,0.9,0.9", {"--betas", "4 values"}},
       {"--lr nan", {"--lr", "nan"}},
       {"--seed -1", {"--seed", "-1", "at least 0"}},
       {"--dp 0", {"--dp", "0", "from 1"}},
       {"--dp 2 --accumulate 4", {"--batch 4", "--dp 2 x --accumulate 4"}},
       {"--zero 1", {"--zero", "1"}},
       {"--param-dtype fp8", {"--param-dtype", "fp8"}},
       {"--fp8 --param-dtype fp16", {"--fp8 is given with --param-dtype fp16"}},
       {"--fp8 --device cuda --param-dtype fp32", {"--fp8", "--param-dtype fp32", "bf16"}},
       {"--cp 5", {"--seq 128 is not a multiple of 10, 2 x --cp 5"}},
       {"--cp 2 --dropout 0.1", {"--dropout is given with --cp 2"}},
       {"--cp 2 --lora-rank 2 --lora-dropout 0.1", {"--lora-dropout is given with --cp 2"}},
       {"--ac sometimes", {"--ac", "sometimes"}},
       {"--ac full:0", {"--ac", "full:0"}},
       {"--ac auto", {"--ac auto", "--memory"}},
       {"--memory 2", {"--memory", "--ac auto"}},
       {"--ac auto --memory 0", {"--memory", "0"}},
       {"--min-lr 1e-5", {"--min-lr", "--schedule cosine"}},
       {"--optimizer sgd --betas 0.9,0.99", {"--betas", "--optimizer"}},
       {"--optimizer sgd --moment-dtype bf16", {"--moment-dtype"}},
       {"--momentum 0.9", {"--momentum", "--optimizer sgd or muon"}},
       {"--schedule cosine --decay-ratio 0.1", {"--decay-ratio", "--schedule wsd"}},
       {"--no-loss-parallel --loss-chunks 4", {"--no-loss-parallel", "--loss-chunks 4"}},
       {"--steps 3 --steps=4", {"--steps", "3", "4"}},
       {"--no-sp --sp", {"--sp", "false", "true"}},
       {"--seed 18446744073709551616", {"--seed", "18446744073709551616", "64 bits"}},
       {"--steps +9223372036854775808", {"--steps", "64 bits"}},
       {"--steps 0x10", {"--steps", "decimal"}},
       {"--peak-flops 989", {"--peak-flops", "989 is neither", "989e12"}},
       {"--peak-flops nan", {"--peak-flops", "nan is neither"}},
       {"--eval-every 2", {"--eval-every", "--eval-text"}},
       {"--eval-text a --eval-tokens b", {"--eval-text", "--eval-tokens"}},
       {"--verify --steps 0", {"--verify", "--steps 0"}},
       {"--lora-rank 2 --save-lora d", {"--save-lora", "--config"}},
       {"--checkpoint run --steps 0", {"--checkpoint", "--steps 0"}},
       {"--checkpoint run --resume auto --exclude data", {"--exclude", "--resume auto"}},
       {"--initial-load run --exclude weights", {"--exclude", "weights"}},
       {"--checkpoint-every 2", {"--checkpoint-every", "--checkpoint"}},
       {"--no-async", {"--no-async", "--checkpoint"}},
       {"--resume", {"--resume", "--checkpoint"}},
       {"--checkpoint run --resume --resume-step 2", {"--resume", "--resume-step"}},
       {"--checkpoint run --resume --initial-load x", {"--initial-load", "--resume"}},
       {"--checkpoint run --resume-step 2 --initial-load x", {"--initial-load", "--resume-step"}},
       {"--checkpoint run --exclude data", {"--exclude", "nothing is loaded"}},
       {"--checkpoint run --keep 1", {"--keep", "1"}},
       {"--profile t", {"--text", "--profile", "t"}},
       {"--output-dir run --profile run/config.toml",
        {"config.toml", "--output-dir", "--profile", "run/config.toml"}}},
      ParseFlags);
}

TEST(TrainOptions, KeepTheGivenValues) {
  const auto parsed = [](const char* flags) { return ParseFlags(flags_in(flags)); };
  EXPECT_EQ(parsed("--betas 0.8,0.99").betas, (std::vector<double>{0.8, 0.99}));
  EXPECT_EQ(parsed("--lr 1.5E-3").lr, 1.5e-3);
  EXPECT_EQ(parsed("--peak-flops 989e12").peak_flops, "989e12");
  EXPECT_EQ(parsed("--peak-flops measure").peak_flops, "measure");
  EXPECT_EQ(parsed("--seed 18446744073709551615").seed, 18446744073709551615U);
  EXPECT_EQ(parsed("--steps 3 --steps 3").steps, 3);
  EXPECT_EQ(parsed("--text u").text, (Flags{"t", "u"}));
  EXPECT_EQ(parsed("--eval-tokens a --eval-tokens b").eval_tokens, (Flags{"a", "b"}));
  EXPECT_EQ(parsed("--eval-text t").eval_text, Flags{"t"});
  EXPECT_EQ(parsed("--initial-load run --exclude optimizer,data").exclude,
            (Flags{"optimizer", "data"}));
  EXPECT_EQ(parsed("--lora-rank 2 --save-lora d --initial-load run").save_lora, "d");
  EXPECT_EQ(parsed("--checkpoint run --resume auto --initial-load x").initial_load, "x");
  EXPECT_TRUE(parsed("--verify").verify);
}

TEST(TrainOptions, OutputsNeedDifferentPaths) {
  const Flags outputs{"--output-dir",  "--metrics",    "--profile",
                      "--tensorboard", "--checkpoint", "--save-hf"};
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (std::size_t j = i + 1; j < outputs.size(); ++j) {
      EXPECT_ERROR(ParseFlags({outputs[j], "x", outputs[i], "./a/../x/"}), outputs[i], outputs[j],
                   "both x");
    }
  }
  EXPECT_EQ(ParseFlags({"--profile", "x.json", "--metrics", "x.jsonl"}).profile, "x.json");
}

TEST(TrainOptions, OutputsMustNotOverwriteInputs) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder / name).string(); };
  std::filesystem::create_directory(folder / "m");
  WriteFile(folder / "a.bin", "");
  EXPECT_ERROR(ParseFlags({"--eval-tokens", in_folder("*.bin"), "--profile", in_folder("a.bin")}),
               "--eval-tokens", "--profile");
  EXPECT_EQ(ParseFlags({"--eval-tokens", in_folder("*.bin"), "--profile", in_folder("b")}).profile,
            in_folder("b"));
  const std::string model = in_folder("m");
  const auto with_model = [&](const std::string& flag, const std::string& file) {
    return parse_train_options({"--model", model, "--text", "t", flag, file});
  };
  for (const char* name : {"config.json", "model-00001-of-00002.safetensors", "tokenizer.json",
                           "model.safetensors.index.json"}) {
    const std::string file = model + "/" + name;
    WriteFile(file, "{}");
    EXPECT_ERROR(with_model("--profile", file), "--model", "--profile", file);
  }
  WriteFile(model + "/metrics.jsonl", "");
  EXPECT_EQ(with_model("--metrics", model + "/metrics.jsonl").metrics, model + "/metrics.jsonl");
}

class ResolvedFlags : public testing::TestWithParam<Flags> {};

TEST_P(ResolvedFlags, RoundTripThroughTheConfigFile) {
  const TrainOptions options = parse_train_options(GetParam());
  const TemporaryFolder folder;
  const std::string file = (folder / "run.toml").string();
  WriteFile(file, options.resolved);
  // Paths that follow from --output-dir are not listed in run.toml.
  Flags again{"--config-file", file};
  if (!options.output_dir.empty()) {
    again.insert(again.end(), {"--output-dir", options.output_dir});
  }
  const TrainOptions same = parse_train_options(again);
  EXPECT_EQ(same.resolved, options.resolved);
  EXPECT_EQ(same.listing, options.listing);
  EXPECT_EQ(same.lr, options.lr);
  EXPECT_EQ(same.seed, options.seed);
}

INSTANTIATE_TEST_SUITE_P(
    OfRuns, ResolvedFlags,
    testing::Values(
        flags_in("--config c.json --tokens a*.bin --weight 0.25 --tokens b.bin --weight .75 "
                 "--shuffle 18446744073709551615 --seed 18446744073709551615"),
        Flags{"--model", "m", "--jsonl", "x", "--truncate", "--prompt-field", "1e5",
              "--completion-field", "a \"b\" \\c \xc3\xa9\n'd'", "--eos-token", "2"},
        flags_in("--config c.json --text t --optimizer muon --lr 1.2345678901234567e-4 "
                 "--momentum 0.9 --betas 0.8,0.99 --schedule wsd --min-lr 1e-5 --no-sp --offload "
                 "--loss-chunks 0 --ema 0.5"),
        flags_in("--config c.json --text t --output-dir run --checkpoint-every 3 --keep 2 "
                 "--resume auto --eval-text e --eval-every 5 --peak-flops 1e12 --metrics m.jsonl "
                 "--no-async")));

TEST(ResolvedFlagsFile, ListsEveryFlagInSections) {
  const TrainOptions options =
      ParseFlags(flags_in("--lr 0.25 --output-dir run --checkpoint-every 3"));
  const std::string& text = options.resolved;
  const std::string run = std::filesystem::absolute("run").string();
  EXPECT_TRUE(text.starts_with("\n[model]\n# model is not given\n")) << text;
  EXPECT_CONTAINS(text, "config = '" + std::filesystem::absolute("c.json").string() + "'\n",
                  "\nlr = 0.25\n", "\nseed = 0\n", "\nbetas = [0.9, 0.95]\n", "\nsp = true\n",
                  "\noffload = false\n", "\nparam-dtype = 'fp32'\n", "\n# keep is not given\n",
                  "\n# momentum = 0.95  (for --optimizer sgd or muon)\n",
                  "\n# checkpoint = '" + run + "/checkpoints'  (in --output-dir)\n",
                  "\n# metrics = '" + run + "/metrics.jsonl'  (in --output-dir)\n",
                  "\n\n[activation_checkpoint]\nac = 'none'\n# memory is not given");
  const auto has = [&](const char* name, const char* value) {
    return std::ranges::find(options.listing, std::pair<std::string, std::string>(name, value)) !=
           options.listing.end();
  };
  EXPECT_TRUE(has("--lr", "0.25") && has("--zero", "3"));
  EXPECT_FALSE(has("--momentum", "0.95"));
}

TEST(FlagsPage, MatchesTheFlags) {
  std::ifstream in(TESSERA_TRAINING_DOC);
  const std::string page{std::istreambuf_iterator<char>(in), {}};
  const std::string begin = "<!-- flags -->\n", end = "<!-- end of flags -->";
  const std::size_t from = page.find(begin) + begin.size(), to = page.find(end);
  ASSERT_LT(from, page.size());
  ASSERT_LT(from, to);
  if (std::getenv("TESSERA_UPDATE_DOCS") != nullptr) {
    std::ofstream(TESSERA_TRAINING_DOC) << page.substr(0, from) << flags_page() << page.substr(to);
    return;
  }
  EXPECT_EQ(page.substr(from, to - from), flags_page())
      << "run this test with TESSERA_UPDATE_DOCS=1 in the environment";
}

}  // namespace
}  // namespace llama
