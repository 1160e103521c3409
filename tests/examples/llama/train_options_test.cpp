#include "examples/llama/train/options/train_options.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"
#include "testing/environment.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace llama {
namespace {

/// The flags that every run needs, and others.
TrainOptions ParseFlags(std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"--config", "c.json", "--text", "t"});
  return parse_train_options(std::move(flags));
}

TEST(TrainOptions, ResumeHasAnOptionalValue) {
  EXPECT_EQ(ParseFlags({"--checkpoint", "run"}).resume, "");
  EXPECT_EQ(ParseFlags({"--checkpoint", "run", "--resume"}).resume, "newest");
  EXPECT_EQ(ParseFlags({"--resume", "--checkpoint", "run"}).resume, "newest");
  EXPECT_EQ(ParseFlags({"--checkpoint", "run", "--resume", "auto"}).resume, "auto");
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--resume", "always"}), "--resume", "always");
}

TEST(TrainOptions, FlagsWinOverTheConfigFile) {
  const tessera::testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "run.toml").string();
  tessera::testing::WriteFile(
      file, "steps = 7\nlr = 0.25\nsp = false\nconfig = \"c.json\"\ntext = \"t\"\n");
  const TrainOptions options = parse_train_options({"--lr", "0.5", "--config-file", file});
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.lr, 0.5);
  EXPECT_FALSE(options.sp);
  EXPECT_EQ(options.config, "c.json");
}

TEST(TrainOptions, RefusesWhatContradictsItself) {
  EXPECT_ERROR(parse_train_options({}), "no model given");
  EXPECT_ERROR(parse_train_options({"--config", "c"}), "no data given");
  EXPECT_ERROR(parse_train_options({"--config", "c", "--model", "m"}), "both given");
  EXPECT_ERROR(parse_train_options({"--config", "c", "--text", "t", "--dp", "3"}), "--batch 4");
  EXPECT_ERROR(parse_train_options({"--config", "c", "--steps", "x"}), "--steps");
  EXPECT_ERROR(parse_train_options({"--config", "c", "--lrr", "1"}), "did you mean --lr");
  EXPECT_ERROR(parse_train_options({"--config", "c", "--text", "t", "--backend", "nccl"}),
               "--device cuda");
}

TEST(Nearest, FindsTheFewestEdits) {
  EXPECT_EQ(nearest("stpes", {"seq", "steps", "seed"}), "steps");
  EXPECT_EQ(nearest("x", {}), "");
}

/// The same with a file of this text.
TrainOptions ParseFile(const std::string& text, std::vector<std::string> flags = {}) {
  const tessera::testing::TemporaryFolder folder;
  const std::string file = (folder / "run.toml").string();
  tessera::testing::WriteFile(file, text);
  flags.insert(flags.begin(), {"--config-file", file});
  return ParseFlags(std::move(flags));
}

TEST(TrainOptions, AFileHasSections) {
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

TEST(TrainOptions, AFlagOutsideOfItsSectionIsRefused) {
  EXPECT_ERROR(ParseFile("[model]\nsteps = 3\n"),
               "run.toml: \"steps\" is in [model], but belongs to [training]; move it there");
  EXPECT_ERROR(ParseFile("[trainig]\nsteps = 3\n"), "unknown section [trainig] in ",
               "run.toml; did you mean [training]?");
  EXPECT_ERROR(ParseFile("[training]\nstpes = 3\n"), "unknown name \"stpes\" in [training] of ",
               "did you mean --steps? (--help-all lists all)");
  EXPECT_ERROR(ParseFile("steps = 3\n[training]\nsteps = 3\n"), "\"steps\" is given twice");
  EXPECT_ERROR(ParseFile("sp = true\nno-sp = true\n"), "is given twice");
  EXPECT_ERROR(ParseFile("[training.steps]\nx = 3\n"), "\"steps\" must be a string, a number");
}

TEST(TrainOptions, AFileHasListsAndFlags) {
  const TrainOptions options = ParseFile(
      "initial-load = \"run\"\nresume = false\nexclude = [\"optimizer\", \"data\"]\n"
      "betas = [0.8, 0.99]\nsp = false\noffload = true\ndecay-matrices-only = false\n");
  EXPECT_EQ(options.resume, "");
  EXPECT_EQ(options.exclude, (std::vector<std::string>{"optimizer", "data"}));
  EXPECT_EQ(options.betas, (std::vector<double>{0.8, 0.99}));
  EXPECT_FALSE(options.sp);
  EXPECT_TRUE(options.offload);
  EXPECT_FALSE(options.decay_matrices_only);
  EXPECT_EQ(ParseFile("resume = true\ncheckpoint = \"run\"\n").resume, "newest");
  EXPECT_EQ(ParseFile("resume = false\n", {"--checkpoint", "run", "--resume", "auto"}).resume,
            "auto");
  EXPECT_EQ(
      ParseFile("resume = \"auto\"\n", {"--checkpoint", "run", "--resume-step", "6"}).resume_step,
      6);
  EXPECT_ERROR(ParseFile("resume = true\nresume-step = 6\ncheckpoint = \"run\"\n"),
               "--resume and --resume-step are both given");
  EXPECT_ERROR(ParseFile("exclude = []\n"), "run.toml: \"exclude\" is an empty list");
  EXPECT_ERROR(ParseFile("async = \"no\"\n"), "run.toml: \"async\" must be true or false");
  EXPECT_ERROR(ParseFile("config-file = \"x.toml\"\n"), "\"config-file\" is for the command line");
  EXPECT_ERROR(ParseFile("steps = true\n"), "run.toml: \"steps\" takes a value");
  EXPECT_ERROR(ParseFile("steps = [3]\n"), "run.toml: \"steps\" takes one value, no list");
  EXPECT_ERROR(ParseFile("exclude = [[1]]\n"), "\"exclude\" must be a string, a number");
}

TEST(TrainOptions, BetasAreTwo) {
  EXPECT_EQ(ParseFlags({"--betas", "0.8,0.99"}).betas, (std::vector<double>{0.8, 0.99}));
  EXPECT_ERROR(ParseFlags({"--betas", "0.9"}), "--betas");
  EXPECT_ERROR(ParseFlags({"--betas", "0.9,0.9,0.9,0.9"}), "--betas has 4 values; give two, B1,B2");
  EXPECT_ERROR(ParseFile("betas = [0.9]\n"), "--betas");
}

TEST(TrainOptions, NumbersAreFinite) {
  for (const char* flag : {"--lr", "--lora-alpha", "--ema", "--eps", "--seq", "--weight"}) {
    EXPECT_ERROR(ParseFlags({flag, "nan"}), std::string(flag) + ": nan is not a number ");
  }
  EXPECT_ERROR(ParseFlags({"--lr", "inf"}), "--lr: inf is not a number of at least 0");
  for (const char* seed : {"--seed", "--shuffle"}) {
    EXPECT_ERROR(ParseFlags({seed, "-1"}),
                 std::string(seed) + ": -1 is not a number of at least 0");
  }
  EXPECT_ERROR(parse_train_options({"--config", "c", "--tokens", "a", "--weight", "1e308",
                                    "--tokens", "b", "--weight", "1e308"}),
               "the sum of all --weight is not finite");
  EXPECT_ERROR(ParseFlags({"--dp", "0"}), "--dp: 0 is not a number from 1 to 1000000");
}

TEST(TrainOptions, ThePeakIsANumberOrMeasured) {
  EXPECT_EQ(ParseFlags({"--peak-flops", "989e12"}).peak_flops, "989e12");
  EXPECT_EQ(ParseFlags({"--peak-flops", "measure"}).peak_flops, "measure");
  for (const char* wrong : {"989", "nan", "measured", "-1e12", "0x1p40", "1e12 "}) {
    EXPECT_ERROR(ParseFlags({"--peak-flops", wrong}), "--peak-flops", wrong,
                 " is neither measure nor a number of FLOP/s, such as 989e12");
  }
}

TEST(TrainOptions, RefusesWhatWouldChangeNothing) {
  EXPECT_ERROR(ParseFlags({"--min-lr", "1e-5"}), "--min-lr is given, but is for --schedule cosine");
  EXPECT_ERROR(ParseFlags({"--optimizer", "sgd", "--betas", "0.9,0.99"}), "--betas is given");
  EXPECT_ERROR(ParseFlags({"--optimizer", "sgd", "--moment-dtype", "bf16"}),
               "--moment-dtype is given");
  EXPECT_ERROR(ParseFlags({"--momentum", "0.9"}), "is for --optimizer sgd and muon");
  EXPECT_ERROR(ParseFlags({"--schedule", "cosine", "--decay-ratio", "0.1"}), "for --schedule wsd");
  EXPECT_ERROR(ParseFlags({"--no-loss-parallel", "--loss-chunks", "4"}),
               "gathers the logits, which --loss-chunks 4 leaves out");
}

TEST(TrainOptions, OutputsNeedDifferentPlaces) {
  const std::vector<std::string> outputs{"--output-dir",    "--metrics",     "--trace",
                                         "--memory-report", "--tensorboard", "--checkpoint",
                                         "--save-hf"};
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (std::size_t j = i + 1; j < outputs.size(); ++j) {
      EXPECT_ERROR(ParseFlags({outputs[j].c_str(), "x", outputs[i].c_str(), "./a/../x/"}),
                   outputs[i], " and ", outputs[j], " are both x; give each its own path");
    }
  }
  EXPECT_ERROR(parse_train_options({"--model", "m", "--text", "t", "--lora-rank", "2",
                                    "--merge-lora", "--save-hf", "d", "--save-lora", "d"}),
               "--save-hf and --save-lora are both d");
  EXPECT_EQ(ParseFlags({"--trace", "x.json", "--metrics", "x.jsonl"}).trace, "x.json");
}

TEST(TrainOptions, OutputsAreNotWhatTheRunWritesByItself) {
  const tessera::testing::TemporaryFolder folder;
  std::filesystem::create_directory_symlink(folder.path(), folder / "link");
  EXPECT_ERROR(ParseFlags({"--metrics", (folder / "m.jsonl").string().c_str(), "--trace",
                           (folder / "link/report.html").string().c_str()}),
               "report.html of --metrics and --trace are both ");
  EXPECT_ERROR(ParseFlags({"--output-dir", "run", "--memory-report", "run/metrics.jsonl"}),
               "--metrics and --memory-report are both run/metrics.jsonl");
  EXPECT_ERROR(ParseFlags({"--output-dir", "run", "--trace", "run/config.toml"}),
               "config.toml of --output-dir and --trace are both run/config.toml");
}

TEST(TrainOptions, OutputsAreNotWhatTheRunReads) {
  EXPECT_ERROR(ParseFlags({"--eval-text", "held", "--metrics", "held"}),
               "--eval-text and --metrics are both held");
  EXPECT_ERROR(ParseFlags({"--trace", "t"}), "--text and --trace are both t");
  EXPECT_EQ(ParseFlags({"--eval-text", "t"}).eval_text, std::vector<std::string>{"t"});
  EXPECT_ERROR(parse_train_options({"--config", "c", "--tokens", "t", "--memory-report", "t"}),
               "--tokens and --memory-report are both t");
}

TEST(TrainOptions, OutputsAreNotFilesThatAGlobMatches) {
  const tessera::testing::TemporaryFolder folder;
  tessera::testing::WriteFile(folder / "a.bin", "");
  const std::string file = (folder / "a.bin").string();
  const std::string glob = (folder / "*.bin").string();
  for (const char* flag : {"--tokens", "--jsonl"}) {
    EXPECT_ERROR(parse_train_options({"--config", "c", flag, glob, "--memory-report", file}), flag,
                 " and --memory-report are both ", file);
  }
  EXPECT_ERROR(ParseFlags({"--eval-tokens", glob, "--trace", file}), "--eval-tokens and --trace");
  EXPECT_EQ(ParseFlags({"--eval-tokens", glob, "--trace", (folder / "b.json").string()}).trace,
            (folder / "b.json").string());
}

TEST(TrainOptions, OutputsAreNotTheModelThatIsRead) {
  const tessera::testing::TemporaryFolder folder;
  const std::string model = (folder / "m").string();
  std::filesystem::create_directory(model);
  for (const char* name : {"config.json", "model-00001-of-00002.safetensors", "tokenizer.json",
                           "model.safetensors.index.json"}) {
    const std::string file = model + "/" + name;
    tessera::testing::WriteFile(file, "{}");
    EXPECT_ERROR(parse_train_options({"--model", model, "--text", "t", "--memory-report", file}),
                 "--model and --memory-report are both ", file);
  }
  EXPECT_ERROR(parse_train_options({"--model", model, "--text", "t", "--save-hf", model + "/."}),
               "--model and --save-hf are both ");
  tessera::testing::WriteFile(model + "/metrics.jsonl", "");
  EXPECT_EQ(
      parse_train_options({"--model", model, "--text", "t", "--metrics", model + "/metrics.jsonl"})
          .metrics,
      model + "/metrics.jsonl");
}

TEST(TrainOptions, ASecondValueOfAFlagIsRefused) {
  EXPECT_ERROR(ParseFlags({"--steps", "3", "--steps=4"}),
               "--steps is given as 3 and as 4, but has one value; leave one of them out");
  EXPECT_ERROR(ParseFlags({"--no-sp", "--sp"}), "--sp is given as false and as true");
  EXPECT_ERROR(parse_train_options({"--model", "a", "--model", "b", "--text", "t"}),
               "--model is given as a and as b");
  EXPECT_EQ(ParseFlags({"--steps", "3", "--steps", "3"}).steps, 3);
}

TEST(TrainOptions, RepeatedDataFlagsAddUp) {
  const TrainOptions options =
      ParseFlags({"--text", "u", "--eval-tokens", "a", "--eval-tokens", "b"});
  EXPECT_EQ(options.text, (std::vector<std::string>{"t", "u"}));
  EXPECT_EQ(options.eval_tokens, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(ParseFlags({"--eval-text", "a", "--eval-text", "b"}).eval_text,
            (std::vector<std::string>{"a", "b"}));
}

TEST(TrainOptions, WholeNumbersFitInto64Bits) {
  EXPECT_EQ(ParseFlags({"--seed", "18446744073709551615"}).seed, 18446744073709551615U);
  for (const char* flag : {"--seed", "--shuffle"}) {
    EXPECT_ERROR(ParseFlags({flag, "18446744073709551616"}), flag,
                 "18446744073709551616 does not fit into 64 bits; give a smaller number");
  }
  for (const char* flag : {"--steps", "--warmup", "--resume-step"}) {
    EXPECT_ERROR(ParseFlags({flag, "+9223372036854775808"}), flag, "does not fit into 64 bits");
  }
}

TEST(TrainOptions, NumbersAreDecimal) {
  const std::vector<std::pair<const char*, const char*>> wrong{
      {"--lr", "0x1p-10"},      {"--steps", "0x10"},       {"--seed", "0x1"},
      {"--loss-chunks", "0x4"}, {"--betas", "0.9,0x1p-1"}, {"--zero", "0x2"}};
  for (const auto& each : wrong) {
    EXPECT_ERROR(ParseFlags({each.first, each.second}), each.first, " is not a decimal number");
  }
  EXPECT_EQ(ParseFlags({"--lr", "1.5E-3"}).lr, 1.5e-3);
}

TEST(TrainOptions, VerifyingNeedsAStepAndNoComparison) {
  EXPECT_TRUE(ParseFlags({"--verify"}).verify);
  EXPECT_FALSE(planned(ParseFlags({"--verify"})).verify);
  EXPECT_ERROR(ParseFlags({"--verify", "--steps", "0"}), "--verify is given with --steps 0");
  const tessera::testing::ScopedVariable compares("TESSERA_COMPARE", "folder");
  EXPECT_ERROR(ParseFlags({"--verify"}), "--verify is given with TESSERA_COMPARE");
}

TEST(TrainOptions, SavedAdaptersNeedWeightsThatAreKept) {
  EXPECT_ERROR(ParseFlags({"--lora-rank", "2", "--save-lora", "d"}),
               "--save-lora is given with --config, whose weights are drawn anew");
  EXPECT_EQ(ParseFlags({"--lora-rank", "2", "--save-lora", "d", "--initial-load", "run"}).save_lora,
            "d");
}

TEST(TrainOptions, CheckpointsNeedSteps) {
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--steps", "0"}), "--steps 0");
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--resume", "auto", "--exclude", "data"}),
               "would leave it out again at each start");
}

TEST(TrainOptions, ExcludeIsAList) {
  EXPECT_EQ(ParseFlags({"--initial-load", "run", "--exclude", "optimizer,data"}).exclude,
            (std::vector<std::string>{"optimizer", "data"}));
  EXPECT_ERROR(ParseFlags({"--initial-load", "run", "--exclude", "weights"}), "--exclude",
               "weights");
}

TEST(TrainOptions, CheckpointOptionsNeedTheFolder) {
  for (const char* flag : {"--checkpoint-every", "--keep", "--resume-step"}) {
    EXPECT_ERROR(ParseFlags({flag, "2"}), flag, "without --checkpoint");
  }
  EXPECT_ERROR(ParseFlags({"--no-async"}), "--no-async is given without --checkpoint");
  EXPECT_ERROR(ParseFlags({"--resume"}), "--resume is given without --checkpoint");
}

TEST(TrainOptions, TwoStartsAreRefused) {
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--resume", "--resume-step", "2"}),
               "--resume and --resume-step are both given");
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--resume", "--initial-load", "x"}),
               "--initial-load and --resume are both given");
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--resume-step", "2", "--initial-load", "x"}),
               "--initial-load and --resume-step are both given");
  EXPECT_EQ(
      ParseFlags({"--checkpoint", "run", "--resume", "auto", "--initial-load", "x"}).initial_load,
      "x");
}

TEST(TrainOptions, ExcludeNothingWhereNothingIsLoaded) {
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--exclude", "data"}), "--exclude",
               "nothing is loaded");
}

TEST(TrainOptions, KeepAtLeastTwo) {
  EXPECT_ERROR(ParseFlags({"--checkpoint", "run", "--keep", "1"}), "--keep", "1");
}

}  // namespace
}  // namespace llama
