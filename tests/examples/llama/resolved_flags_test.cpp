// The file that llama_train leaves of its flags starts the same run.

#include "examples/llama/train/options/train_options.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "testing/errors.h"
#include "testing/files.h"

namespace llama {
namespace {

using tessera::testing::TemporaryFolder;
using tessera::testing::WriteFile;
using Flags = std::vector<std::string>;

class ResolvedFlags : public testing::TestWithParam<Flags> {};

TEST_P(ResolvedFlags, ComeBackFromTheirFile) {
  const TrainOptions options = parse_train_options(GetParam());
  const TemporaryFolder folder;
  const std::string file = (folder / "run.toml").string();
  WriteFile(file, options.resolved);
  // What a run leaves to its folder is not in the file.
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
        Flags{"--config", "c.json", "--text", "t"},
        Flags{"--config", "c.json", "--tokens", "a*.bin", "--weight", "0.25", "--tokens", "b.bin",
              "--weight", ".75", "--shuffle", "18446744073709551615", "--seed",
              "18446744073709551615"},
        Flags{"--model", "m", "--jsonl", "x", "--truncate", "--prompt-field", "1e5",
              "--completion-field", "a \"b\" \\c \xc3\xa9\n'd'", "--eos-token", "2"},
        Flags{"--config",    "c.json",    "--text",        "t",
              "--optimizer", "muon",      "--lr",          "1.2345678901234567e-4",
              "--momentum",  "0.9",       "--betas",       "0.8,0.99",
              "--schedule",  "wsd",       "--min-lr",      "1e-5",
              "--no-sp",     "--offload", "--loss-chunks", "0",
              "--ema",       "0.5"},
        Flags{"--model", "m", "--text", "t", "--lora-rank", "4", "--lora-targets", "a.**,b.*",
              "--freeze", "model.embed_tokens.**", "--save-lora", "l"},
        Flags{"--config",           "c.json",  "--text",       "t", "--output-dir", "run",
              "--checkpoint-every", "3",       "--keep",       "2", "--resume",     "auto",
              "--eval-text",        "e",       "--eval-every", "5", "--peak-flops", "1e12",
              "--metrics",          "m.jsonl", "--no-async"}));

TEST(ResolvedFlagsFile, HasEveryFlag) {
  const std::string text = parse_train_options({"--config", "c.json", "--text", "t", "--lr", "0.25",
                                                "--output-dir", "run", "--checkpoint-every", "3"})
                               .resolved;
  EXPECT_CONTAINS(text, "config = '" + std::filesystem::absolute("c.json").string() + "'\n");
  EXPECT_CONTAINS(text, "\nlr = 0.25\n");
  EXPECT_CONTAINS(text, "\nseed = 0\n");
  EXPECT_CONTAINS(text, "\nbetas = [0.9, 0.95]\n");
  EXPECT_CONTAINS(text, "\nsp = true\n");
  EXPECT_CONTAINS(text, "\noffload = false\n");
  EXPECT_CONTAINS(text, "\nreshard-last = false\n");
  EXPECT_CONTAINS(text, "\nparam-dtype = 'fp32'\n");
  EXPECT_CONTAINS(text, "# model is not given\n");
  EXPECT_CONTAINS(text, "\n# keep is not given\n");
  EXPECT_CONTAINS(text, "\n# momentum = 0.95  (for --optimizer sgd and muon)\n");
  const std::string run = std::filesystem::absolute("run").string();
  EXPECT_CONTAINS(text, "\n# checkpoint = '" + run + "/checkpoints'  (in --output-dir)\n");
  EXPECT_CONTAINS(text, "\n# metrics = '" + run + "/metrics.jsonl'  (in --output-dir)\n");
}

TEST(ResolvedFlagsFile, HasSections) {
  const std::string text = parse_train_options({"--config", "c.json", "--text", "t"}).resolved;
  EXPECT_TRUE(text.starts_with("\n[model]\n# model is not given\n")) << text;
  EXPECT_CONTAINS(text, "\n\n[activation_checkpoint]\nac = 'none'\n\n[checkpoint]\n");
}

TEST(ResolvedFlagsListing, HasWhatTheRunUses) {
  const auto listing = parse_train_options({"--config", "c.json", "--text", "t"}).listing;
  const auto has = [&](const char* name, const char* value) {
    return std::ranges::find(listing, std::pair<std::string, std::string>(name, value)) !=
           listing.end();
  };
  EXPECT_TRUE(has("--lr", "0.001"));
  EXPECT_TRUE(has("--zero", "3"));
  EXPECT_FALSE(has("--momentum", "0.95"));
}

}  // namespace
}  // namespace llama
