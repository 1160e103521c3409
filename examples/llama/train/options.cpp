// The table of llama_train's flags, and checks that involve several flags. The command line,
// --config-file, --help and docs/programs/training.md are made from the table.

#include "examples/llama/train/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <regex>
#include <utility>
#include <variant>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

using O = TrainOptions;
using Member = std::variant<bool O::*, int O::*, std::int64_t O::*, std::uint64_t O::*, double O::*,
                            std::string O::*, std::optional<double> O::*,
                            std::optional<std::int64_t> O::*, std::optional<std::uint64_t> O::*,
                            std::vector<std::string> O::*, std::vector<double> O::*>;
using Check = std::function<void(CLI::Option&)>;

/// Which runs use a flag. Giving the flag for any other run is an error.
struct Use {
  bool (*when)(const O&) = nullptr;  ///< whether a run uses the flag; nullptr: every run does
  const char* where = "";            ///< describes, in messages, which runs use the flag
};

enum class Form {
  kOne,       ///< a flag with one value, or a switch
  kNegated,   ///< a switch that also has a --no- form
  kRepeated,  ///< a list: the flag can be given several times, each with one value
  kComma,     ///< a list of comma-separated values
};

struct Flag {
  const char* name;
  Member member;
  const char* value;     ///< the value's placeholder in --help: "FILE"; "": a switch
  const char* standard;  ///< the default in words, for --help; "": none
  const char* help;
  Check check{};
  Use use{};
  Form form = Form::kOne;
  bool first = false;        ///< whether --help also lists the flag (--help-all lists all)
  const char* implied = "";  ///< the value of a flag that is given without a value
};

struct Section {
  const char* name;
  std::vector<Flag> flags;
};

/// The maximum degree of parallelism, so that multiplying degrees cannot overflow.
constexpr std::int64_t kMaxDegree = 1'000'000;

Check by(const CLI::Validator& validator) {
  return [validator](CLI::Option& option) { option.check(validator); };
}

Check one_of(std::vector<std::string> names) {
  return by(CLI::IsMember(std::move(names)));
}

/// Checks --peak-flops. Rejects small numbers, which are probably meant in TFLOP/s.
std::string check_peak(const std::string& text) {
  std::string number = text;
  const bool valid = text == "measure" || number_between(1e6, 1e18)(number).empty();
  return valid
             ? ""
             : text + " is neither measure nor a number of FLOP/s from 1e6 to 1e18, such as 989e12";
}

/// Checks --ac. A number of blocks can follow "selective" and "full".
std::string check_ac(const std::string& text) {
  static const std::regex valid("none|auto|(selective|full)(:[1-9][0-9]{0,5})?");
  return std::regex_match(text, valid)
             ? ""
             : text +
                   " must be none, selective, full, auto, selective:N or full:N; with :N, only the "
                   "first N blocks are recomputed";
}

const Use kLora{[](const O& o) { return o.lora_rank > 0; }, "--lora-rank"};
const Use kJsonl{[](const O& o) { return !o.jsonl.empty(); }, "--jsonl"};
const Use kCuda{[](const O& o) { return o.device == "cuda"; }, "--device cuda"};
// A planned run uses --memory to decide whether the run fits into the memory.
const Use kAutoAc{[](const O& o) { return o.ac == "auto" || o.planned; }, "--ac auto"};
const Use kAdam{[](const O& o) { return o.optimizer != "sgd"; }, "--optimizer adamw or muon"};
// A planned run accepts the flags of outputs such as --checkpoint, but writes no outputs.
const Use kCheckpoint{[](const O& o) { return !o.checkpoint.empty() || o.planned; },
                      "--checkpoint"};
const Use kExport{[](const O& o) { return !o.save_hf.empty() || o.planned; }, "--save-hf"};
const Use kProfile{[](const O& o) { return !o.profile.empty() || o.planned; }, "--profile"};
const Use kHeldOut{[](const O& o) { return !o.eval_text.empty() || !o.eval_tokens.empty(); },
                   "--eval-text or --eval-tokens"};

std::vector<Section> make_table() {
  const Check at_least_0 = by(number_of_at_least_0()), above_0 = by(number_above_0());
  const Check degree = by(number_between(1, kMaxDegree)), share = by(number_between(0.0, 1.0));
  const CLI::Validator degree_or_rest(
      [check = number_between(1, kMaxDegree)](std::string& text) {
        return text == "-1" ? "" : check(text);
      },
      "");
  const Check dropout = by(number_between(0.0, 0.999)), decay = by(number_between(0.0, 0.999999));
  const Check types = one_of({"fp32", "bf16", "fp16"}), wide_types = one_of({"fp32", "bf16"});
  // clang-format off
  return {
      {"model",
       {{"model", &O::model, "DIR", "",
         "Hugging Face folder with config.json and *.safetensors; each rank reads only its shards",
         {}, {}, Form::kOne, true},
        {"config", &O::config, "FILE", "",
         "A config.json without weights; --seed gives initial weights with the same bits on any "
         "mesh", {}, {}, Form::kOne, true},
        {"tokenizer", &O::tokenizer, "FILE", "the model's own, or bytes",
         "tokenizer.json or tokenizer.model, for --text and --jsonl", {}, {}, Form::kOne, true},
        {"dropout", &O::dropout, "P", "0",
         "Dropout probability of attention and MLP results; equal masks on every mesh", dropout},
        {"freeze", &O::freeze, "PATTERN[,PATTERN]", "",
         "Name patterns of parameters that are not trained, such as \"model.embed_tokens.**\"",
         {}, {}, Form::kComma},
        {"lora-rank", &O::lora_rank, "R", "",
         "Train only LoRA adapters, whose rank is R", above_0},
        {"lora-alpha", &O::lora_alpha, "A", "the rank",
         "The LoRA adapters are scaled by A / rank", above_0, kLora},
        {"lora-targets", &O::lora_targets, "PATTERN[,PATTERN]", "model.layers.*.*.*_proj",
         "Name patterns of the modules that get LoRA adapters", {}, kLora, Form::kComma},
        {"lora-dropout", &O::lora_dropout, "P", "0",
         "Dropout probability of the LoRA adapters' input", dropout, kLora}}},
      {"training",
       {{"tokens", &O::tokens, "GLOB", "",
         "Glob, in quotes, of llm.c token shards; the files of all globs are read in the order of "
         "their names, or the globs in the shares of --weight", {}, {}, Form::kRepeated, true},
        {"weight", &O::weights, "W", "",
         "Share of the samples from one --tokens; give one --weight for each --tokens, in order",
         above_0, {[](const O& o) { return !o.tokens.empty(); }, "--tokens"}, Form::kRepeated},
        {"text", &O::text, "FILE", "",
         "Text file (also gzip or zstd), tokenized at the start; several files separately, in order",
         {}, {}, Form::kRepeated, true},
        {"jsonl", &O::jsonl, "GLOB", "",
         "Glob, in quotes, of JSONL prompts and completions; only completions have a loss",
         {}, {}, Form::kRepeated},
        {"prompt-field", &O::prompt_field, "NAME", "prompt",
         "Key of the prompt in --jsonl", {}, kJsonl},
        {"completion-field", &O::completion_field, "NAME", "completion",
         "Key of the completion in --jsonl", {}, kJsonl},
        {"truncate", &O::truncate, "", "",
         "Cut --jsonl samples that are longer than --seq (otherwise an error)", {}, kJsonl},
        {"shuffle", &O::shuffle, "SEED", "the order of the data",
         "Seed of a random order of the samples, which differs in each pass over the data",
         at_least_0},
        {"document-mask", &O::document_mask, "", "",
         "Each token attends only to its own document, and positions start at 0 in each document",
         {}, {[](const O& o) { return o.jsonl.empty(); }, "--tokens or --text"}},
        {"eos-token", &O::eos_token, "ID", "the tokenizer's or the model's",
         "The token that ends a document or a completion",
         at_least_0, {[](const O& o) { return o.document_mask || !o.jsonl.empty(); }, "--document-mask or --jsonl"}},
        {"steps", &O::steps, "N", "10",
         "Number of optimizer steps", at_least_0, {}, Form::kOne, true},
        {"batch", &O::batch, "N", "4",
         "Sequences per step, over all ranks", above_0, {}, Form::kOne, true},
        {"seq", &O::seq, "N", "128",
         "Tokens per sequence", above_0, {}, Form::kOne, true},
        {"accumulate", &O::accumulate, "N", "1",
         "Number of micro-batches into which each rank splits its sequences of a step", degree},
        {"seed", &O::seed, "N", "0",
         "Seed of the initial weights and of dropout", at_least_0},
        {"clip", &O::clip, "X", "1.0",
         "Gradients are clipped to this norm", above_0},
        {"z-loss", &O::z_loss, "Z", "0",
         "Add Z * log(sum of exp(logits))^2 per token to the training loss", at_least_0},
        {"router-aux-loss", &O::router_aux_loss, "X", "router_aux_loss_coef of a configuration with output_router_logits, else 0",
         "Add X times the load-balancing loss of a model with experts to the training loss", at_least_0},
        {"router-z-loss", &O::router_z_loss, "X", "0",
         "Add X times the mean log(sum of exp(router logits))^2 to the training loss", at_least_0},
        {"label-smoothing", &O::label_smoothing, "E", "0",
         "Share of each target that is spread over the vocabulary in training", share},
        {"loss-chunks", &O::loss_chunks, "N", "chunks of 640 MiB if the logits are larger",
         "Compute the loss in N chunks of tokens, so that the full logits never exist; 0 or 1: "
         "one chunk", by(number_between(0, kMaxDegree))},
        {"param-dtype", &O::param_dtype, "T", "bf16 on CUDA, fp32 on CPU",
         "Type of gathered parameters and of computation: fp32, bf16, or fp16 with loss scaling; "
         "master weights are fp32", types, {}, Form::kOne, true},
        {"reduce-dtype", &O::reduce_dtype, "T", "fp32",
         "Type of gradient reduction: fp32 or bf16", wide_types},
        {"fp8", &O::fp8, "", "",
         "Experimental: compute the blocks' linear layers in FP8; no GPU has shown a gain yet"},
        {"offload", &O::offload, "", "off",
         "Keep shards, gradients and the optimizer's state in the host's memory",
         {}, {}, Form::kNegated},
        {"device", &O::device, "cpu|cuda", "cpu",
         "Where to compute: cpu or cuda", one_of({"cpu", "cuda"}), {}, Form::kOne, true},
        {"allow-math-attention", &O::allow_math_attention, "", "",
         "Train on CUDA even if no fused attention kernel supports the model (otherwise an error)",
         {}, kCuda},
        {"deterministic", &O::deterministic, "", "",
         "Use libtorch's deterministic algorithms on CUDA, also in the backward of attention",
         {}, kCuda}}},
      {"validation",
       {{"eval-text", &O::eval_text, "FILE", "",
         "Held-out text, whose loss is printed at the end; several files are one text",
         {}, {}, Form::kRepeated, true},
        {"eval-tokens", &O::eval_tokens, "GLOB", "",
         "Glob, in quotes, of held-out llm.c token shards", {}, {}, Form::kRepeated},
        {"eval-every", &O::eval_every, "N", "at the end only",
         "Evaluate the held-out data also after every N steps", above_0, kHeldOut}}},
      {"optimizer",
       {{"optimizer", &O::optimizer, "O", "adamw",
         "adamw, sgd, or muon (for the blocks' matrices, with adamw for all other parameters)",
         one_of({"adamw", "sgd", "muon"})},
        {"lr", &O::lr, "X", "1e-3",
         "Peak learning rate", at_least_0, {}, Form::kOne, true},
        {"betas", &O::betas, "B1,B2", "0.9,0.95",
         "AdamW's decay rates of the first and second moment", decay, kAdam, Form::kComma},
        // The minimum of --eps is 1.2e-38, because smaller values are subnormal in fp32.
        {"eps", &O::eps, "X", "1e-8",
         "AdamW's epsilon, added to the square root", by(number_between(1.2e-38, 1e38)), kAdam},
        {"moment-dtype", &O::moment_dtype, "T", "fp32",
         "Type of AdamW's moments: fp32, or bf16 with stochastic rounding", wide_types, kAdam},
        {"momentum", &O::momentum, "M", "0.95",
         "Momentum of sgd and muon",
         by(number_between(0.0, 0.9999)), {[](const O& o) { return o.optimizer != "adamw"; }, "--optimizer sgd or muon"}},
        {"weight-decay", &O::weight_decay, "X", "0.1",
         "Weight decay of the optimizer, on every parameter", at_least_0},
        {"decay-matrices-only", &O::decay_matrices_only, "", "",
         "Apply no weight decay to norms and biases"},
        {"ema", &O::ema, "DECAY", "",
         "Decay of a moving average of the weights, for evaluation and saved models",
         decay}}},
      {"lr_scheduler",
       {{"schedule", &O::schedule, "S", "constant",
         "constant, cosine, linear, or wsd (constant, then linear decay)",
         one_of({"constant", "cosine", "linear", "wsd"}), {}, Form::kOne, true},
        {"warmup", &O::warmup, "N", "0",
         "Steps of linear warm-up", at_least_0, {}, Form::kOne, true},
        {"min-lr", &O::min_lr, "X", "0",
         "Learning rate at the end of a decaying schedule",
         at_least_0, {[](const O& o) { return o.schedule != "constant"; }, "--schedule cosine, linear or wsd"}},
        {"decay-ratio", &O::decay_ratio, "R", "0.2",
         "Share of the steps in which the schedule wsd decays",
         share, {[](const O& o) { return o.schedule == "wsd"; }, "--schedule wsd"}}}},
      {"parallelism",
       {{"dp", &O::dp, "N", "1",
         "FSDP degree; -1: the number of ranks divided by the other degrees",
         by(degree_or_rest), {}, Form::kOne, true},
        {"tp", &O::tp, "N", "1",
         "Tensor-parallel degree", degree, {}, Form::kOne, true},
        {"ep", &O::ep, "N", "1",
         "Expert-parallel degree: the experts of each layer are split over N ranks, which have different sequences",
         degree, {}, Form::kOne, true},
        {"cp", &O::cp, "N", "1",
         "Context-parallel degree: each sequence is split over N ranks; 2N must divide --seq",
         degree, {}, Form::kOne, true},
        {"dp-replicate", &O::dp_replicate, "N", "1",
         "Number of model replicas that are sharded separately (HSDP)", degree},
        {"zero", &O::zero, "2|3", "3",
         "3: free gathered parameters between forward and backward; 2: keep gathered parameters",
         by(CLI::IsMember({2, 3}))},
        {"reshard-last", &O::reshard_last, "", "off",
         "With --zero 3, also free the gathered parameters of the last block, final norm and head",
         {}, {}, Form::kNegated},
        {"sp", &O::sp, "", "on with --tp",
         "Sequence parallelism: shard tokens between attention and MLP", {}, {}, Form::kNegated},
        {"sp-regather", &O::sp_regather, "", "on",
         "With --sp, reduce the gradients of gathered inputs while weight gradients are computed; "
         "with --ac none, also save only the shards of the inputs, and gather the inputs again in "
         "backward", {}, {}, Form::kNegated},
        {"loss-parallel", &O::loss_parallel, "", "on with --tp",
         "Keep the logits sharded over the vocabulary", {}, {}, Form::kNegated},
        {"backend", &O::backend, "gloo|nccl", "gloo on CPU, nccl on CUDA",
         "Back end of collectives: gloo or nccl", one_of({"gloo", "nccl"})}}},
      {"activation_checkpoint",
       {{"ac", &O::ac, "A", "none",
         "Activation checkpointing: none; full: recompute the blocks; selective: recompute all "
         "operators except attention and half of the matrix products; full:N, selective:N: only in "
         "the first N blocks; auto: the least recomputation that fits into memory",
         [](CLI::Option& option) { option.check(check_ac, ""); }, {}, Form::kOne, true},
        {"memory", &O::memory, "GIB", "5/6 of the smallest GPU's, less 3 GB",
         "Memory for tensors on each device with --ac auto, in GiB",
         by(number_above_0_to(1e6)), kAutoAc}}},
      {"checkpoint",
       {{"checkpoint", &O::checkpoint, "DIR", "",
         "Folder of checkpoints, saved at the end and at SIGTERM or SIGUSR1",
         {}, {}, Form::kOne, true},
        {"checkpoint-every", &O::checkpoint_every, "N", "at the end only",
         "Save checkpoints also after every N steps", above_0, kCheckpoint, Form::kOne, true},
        {"async", &O::async, "", "on",
         "Write checkpoints from a copy in host memory, while training continues",
         {}, {}, Form::kNegated},
        {"keep", &O::keep, "K", "all",
         "Newest checkpoints to keep, at least 2", by(number_between(2, 1'000'000)), kCheckpoint},
        {"resume", &O::resume, " [auto]", "",
         "Continue from the newest step in --checkpoint; auto: start a new run if there is no step",
         one_of({"newest", "auto"}), kCheckpoint, Form::kOne, true, "newest"},
        {"resume-step", &O::resume_step, "N", "",
         "Continue from checkpoint step N", at_least_0, kCheckpoint},
        {"initial-load", &O::initial_load, "DIR", "",
         "Start at step 0 with the state of another run's checkpoint"},
        {"exclude", &O::exclude, "PART[,PART]", "",
         "State of a checkpoint that is not loaded: optimizer, data (to use other data), or both",
         one_of({"optimizer", "data"}), {}, Form::kComma},
        {"save-hf", &O::save_hf, "DIR", "",
         "Write the weights as a Hugging Face folder at the end; with --steps 0, the initial or "
         "loaded weights", {}, {}, Form::kOne, true},
        {"save-hf-dtype", &O::save_hf_dtype, "T", "fp32",
         "Type of the weights of --save-hf: fp32, bf16 or fp16", types, kExport},
        {"save-lora", &O::save_lora, "DIR", "",
         "Write the LoRA adapters at the end, in PEFT's format", {}, kLora},
        {"merge-lora", &O::merge_lora, "", "",
         "Merge the LoRA adapters into the weights of --save-hf", {}, kLora}}},
      {"metrics",
       {{"metrics", &O::metrics, "FILE.jsonl", "",
         "File for one JSON object per step; run.json is written to the same folder"},
        {"tensorboard", &O::tensorboard, "DIR", "",
         "Folder for TensorBoard files with torchtitan's metric names"},
        {"log-every", &O::log_every, "N", "10",
         "Steps between console lines", above_0},
        {"peak-flops", &O::peak_flops, "X|measure", "the data sheet's, for known GPUs",
         "Peak for MFU: a device's FLOP/s, or measure: FLOP/s of a matrix product on this device",
         [](CLI::Option& option) { option.check(check_peak, ""); }}}},
      {"profiling",
       {{"profile", &O::profile, "FILE.json", "",
         "Write a libtorch profile of each rank, with module names, as Chrome traces: FILE.json, "
         "FILE.rank1.json, ..."},
        {"profile-steps", &O::profile_steps, "A:B", "the last",
         "First and last step of --profile", {}, kProfile}}},
      {"job",
       {{"output-dir", &O::output_dir, "DIR", "",
         "New folder for the run's config.toml (all flags), metrics and checkpoints",
         {}, {}, Form::kOne, true},
        {"verify", &O::verify, "", "",
         "Before the first step, compare the results for one sample per data-parallel rank with "
         "the results of one rank"}}}};
  // clang-format on
}

const std::vector<Section>& table() {
  static const std::vector<Section> sections = make_table();
  return sections;
}

void declare(CLI::App& app, const Flag& flag, TrainOptions& o) {
  const std::string name = std::string("--") + flag.name;
  const std::string standard =
      *flag.standard == '\0' ? "" : std::string(" (") + flag.standard + ")";
  const std::string help = flag.help + standard;
  std::visit(
      [&](auto member) {
        if constexpr (std::is_same_v<decltype(member), bool O::*>) {
          const std::string negated = std::string(",!--no-") + flag.name;
          add_switch(app, flag.form == Form::kNegated ? name + negated : name, o.*member, help);
        } else {
          CLI::Option& option = *app.add_option(name, o.*member, help);
          option.option_text(flag.value);
          if (flag.form == Form::kRepeated) {
            option.allow_extra_args(false);  // one value each time the flag is given
          } else if (flag.form == Form::kComma) {
            option.delimiter(',');
          }
          if (*flag.implied != '\0') {
            option.expected(0, 1)->default_str(flag.implied);
          }
          if (flag.check) {
            flag.check(option);
          }
        }
      },
      flag.member);
}

void declare_all(CLI::App& app, TrainOptions& o) {
  for (const Section& section : table()) {
    app.option_defaults()->group(section.name);
    for (const Flag& flag : section.flags) {
      declare(app, flag, o);
    }
  }
}

FlagNames first_flags() {
  FlagNames names;
  for (const Section& section : table()) {
    for (const Flag& flag : section.flags) {
      if (flag.first) {
        names.emplace_back(flag.name);
      }
    }
  }
  return names;
}

/// Throws Error if the user gives a flag that this run does not use. Returns all other flags that
/// this run does not use.
std::vector<LeftOut> unused_flags(const CLI::App& app, const TrainOptions& o) {
  std::vector<LeftOut> unused;
  for (const Section& section : table()) {
    for (const Flag& flag : section.flags) {
      if (flag.use.when == nullptr || flag.use.when(o)) {
        continue;
      }
      TESSERA_CHECK(app.get_option(std::string("--") + flag.name)->count() == 0, "--", flag.name,
                    " is given, but works only with ", flag.use.where, "; leave --", flag.name,
                    " out, or pass ", flag.use.where);
      unused.push_back({flag.name, std::string("for ") + flag.use.where});
    }
  }
  return unused;
}

}  // namespace

std::string flags_page() {
  std::string page =
      "\n| flag | default | meaning |\n|---|---|---|\n"
      "| `--config-file FILE.toml` | | TOML file with flags |\n";
  for (const Section& section : table()) {
    page += std::string("| **`[") + section.name + "]`** | | |\n";
    for (const Flag& flag : section.flags) {
      const std::string name =
          (flag.form == Form::kNegated ? "--[no-]" : "--") + std::string(flag.name);
      // A "|" in a value is escaped, because "|" would end the cell of the Markdown table.
      const std::string value = CLI::detail::find_and_replace(flag.value, "|", "\\|");
      page += "| `" + name +
              (value.empty() || flag.value[0] == '[' || flag.value[0] == ' ' ? "" : " ") + value +
              "` | " + flag.standard + " | " + flag.help + " |\n";
    }
  }
  return page + "\n";
}

bool resumes(const TrainOptions& o) {
  return !o.resume.empty() || o.resume_step >= 0;
}

std::string product_text(const std::vector<std::pair<std::string, std::int64_t>>& degrees) {
  std::string text;
  for (const auto& [name, degree] : degrees) {
    if (degree != 1) {
      text += (text.empty() ? "" : " x ") + name + " " + std::to_string(degree);
    }
  }
  return text.empty() ? degrees.front().first + " 1" : text;
}

std::pair<std::int64_t, std::int64_t> parse_step_range(const std::string& text) {
  static const std::regex form("([0-9]{1,18}):([0-9]{1,18})");
  std::smatch parts;
  const bool matches = std::regex_match(text, parts, form);
  const std::int64_t first = matches ? std::stoll(parts[1]) : 0;
  const std::int64_t last = matches ? std::stoll(parts[2]) : 0;
  TESSERA_CHECK(first >= 1 && first <= last, "--profile-steps ", text,
                " is not a range of steps; pass A:B with 1 <= A <= B, such as 2:3");
  return {first, last};
}

std::filesystem::path record_file(const TrainOptions& o) {
  const std::filesystem::path folder = o.output_dir.empty()
                                           ? std::filesystem::path(o.metrics).parent_path()
                                           : std::filesystem::path(o.output_dir);
  return folder / "run.json";
}

namespace {

void check_fine_tuning(const TrainOptions& o) {
  TESSERA_CHECK(!o.merge_lora || !o.save_hf.empty(),
                "--merge-lora is given without --save-hf, which writes the merged weights; pass "
                "--save-hf DIR");
  TESSERA_CHECK(
      o.save_lora.empty() || !o.model.empty() || !o.initial_load.empty() || !o.checkpoint.empty(),
      "--save-lora is given with --config, but the adapters would be useless: the random base "
      "weights are not saved; pass --model DIR or --checkpoint DIR");
  TESSERA_CHECK(o.lora_rank == 0 || o.save_hf.empty() || o.merge_lora,
                "--save-hf would write the weights without the trained adapters of --lora-rank; "
                "add --merge-lora, or pass --save-lora instead of --save-hf");
}

void check_data(const TrainOptions& o, bool needed) {
  const int kinds = static_cast<int>(!o.tokens.empty()) + static_cast<int>(!o.text.empty()) +
                    static_cast<int>(!o.jsonl.empty());
  TESSERA_CHECK(kinds <= 1,
                "only one of --tokens, --text and --jsonl can be given; leave out the other flags");
  TESSERA_CHECK(!needed || kinds == 1,
                "no data given; pass --tokens GLOB, --text FILE or --jsonl FILE (or --steps 0)");
  TESSERA_CHECK(o.eval_text.empty() || o.eval_tokens.empty(),
                "--eval-text and --eval-tokens are both given; pass one of them");
  TESSERA_CHECK(o.weights.empty() || o.weights.size() == o.tokens.size(), "--weight is given ",
                o.weights.size(), " times, but --tokens is given ", o.tokens.size(),
                " times; pass one --weight for each --tokens, or no --weight");
  TESSERA_CHECK(
      std::isfinite(std::accumulate(o.weights.begin(), o.weights.end(), 0.0)),
      "the --weight values have no finite sum; pass smaller weights with the same ratios");
}

void check_parallelism(const TrainOptions& o) {
  // Each rank gets the same number of sequences, so that the mean over ranks equals the mean over
  // the batch.
  const std::int64_t parts = o.dp_replicate * std::abs(o.dp) * o.ep * o.accumulate;
  TESSERA_CHECK(o.batch % parts == 0, "--batch ", o.batch, " is not a multiple of ",
                product_text({{"--dp", o.dp},
                              {"--ep", o.ep},
                              {"--dp-replicate", o.dp_replicate},
                              {"--accumulate", o.accumulate}}),
                "; pass a multiple, so that all micro-batches of all data-parallel ranks have "
                "equally many sequences");
  TESSERA_CHECK(o.device == "cuda" || o.backend != "nccl",
                "--backend nccl needs --device cuda; on the CPU pass --backend gloo");
  TESSERA_CHECK(o.loss_parallel || o.loss_chunks.value_or(1) <= 1,
                "--no-loss-parallel gathers the full logits, but --loss-chunks ", *o.loss_chunks,
                " never computes the full logits; leave out one of the two flags");
  TESSERA_CHECK(o.zero == 3 || !o.reshard_last,
                "--reshard-last is given with --zero 2, which keeps all parameters gathered; leave "
                "out one of the two flags");
  TESSERA_CHECK(
      o.cp == 1 || o.seq % (2 * o.cp) == 0, "--seq ", o.seq, " is not a multiple of ", 2 * o.cp,
      ", 2 x --cp ", o.cp,
      "; each rank takes two chunks of every sequence, and all chunks have equal lengths");
  TESSERA_CHECK(o.cp == 1 || (o.dropout == 0 && o.lora_dropout == 0),
                o.dropout > 0 ? "--dropout" : "--lora-dropout", " is given with --cp ", o.cp,
                ", but the dropout masks would differ from the masks without --cp; leave out one "
                "of the two flags");
}

void check_checkpoints(const TrainOptions& o) {
  TESSERA_CHECK(o.async || !o.checkpoint.empty(),
                "--no-async is given without --checkpoint; pass --checkpoint DIR");
  TESSERA_CHECK(o.resume.empty() || o.resume_step < 0,
                "--resume and --resume-step are both given; pass one of them");
  // --initial-load is allowed with --resume auto: a restarted run then continues from the steps
  // that this run has saved.
  TESSERA_CHECK(o.initial_load.empty() || !resumes(o) || o.resume == "auto", "--initial-load and ",
                o.resume_step >= 0 ? "--resume-step" : "--resume",
                " are both given; pass one of them");
  TESSERA_CHECK(o.checkpoint.empty() || o.steps > 0 || resumes(o),
                "--checkpoint is given with --steps 0, so there is nothing to save; pass --steps "
                "N; to load a checkpoint, pass --initial-load DIR instead of --checkpoint");
  TESSERA_CHECK(
      o.exclude.empty() || o.resume != "auto" || !o.initial_load.empty(),
      "--exclude is given with --resume auto, so each restart would discard the optimizer or data "
      "state again; pass --exclude with --initial-load, or once with --resume");
  TESSERA_CHECK(o.exclude.empty() || resumes(o) || !o.initial_load.empty(),
                "--exclude is given, but nothing is loaded; pass --resume or --initial-load");
  TESSERA_CHECK(!o.verify || o.steps > 0,
                "--verify is given with --steps 0, but a run without steps reads no data to verify "
                "with; pass --steps 1 or more");
  TESSERA_CHECK(o.profile_steps.empty() || parse_step_range(o.profile_steps).second <= o.steps,
                "--profile-steps ", o.profile_steps, " ends after --steps ", o.steps,
                "; pass a range that ends at step ", o.steps, " or before");
}

// Returns the input files that the flags name. Reads the command line, because the options of a
// planned run do not contain every file.
std::vector<NamedFile> read_files(const CLI::App& app) {
  std::vector<NamedFile> files;
  for (const char* flag : {"--model", "--config", "--text", "--tokens", "--jsonl", "--tokenizer",
                           "--eval-text", "--eval-tokens", "--initial-load", "--config-file"}) {
    for (const std::string& file : app.get_option(flag)->results()) {
      files.push_back({flag, file, /*is_read=*/true});
    }
  }
  return files;
}

std::vector<LeftOut> place_outputs(const CLI::App& app, TrainOptions& o) {
  if (o.output_dir.empty()) {
    return {};
  }
  std::vector<LeftOut> placed{{"output-dir", "another run needs another folder"}};
  const auto place = [&](const char* flag, std::string& output, const char* name) {
    if (app.get_option(std::string("--") + flag)->count() == 0) {
      output = std::filesystem::path(o.output_dir) / name;
      placed.push_back({flag, "in --output-dir"});
    }
  };
  place("metrics", o.metrics, "metrics.jsonl");
  place("tensorboard", o.tensorboard, "tensorboard");
  const bool saves = o.checkpoint_every > 0 || o.keep > 0 || resumes(o);
  if (saves) {
    place("checkpoint", o.checkpoint, "checkpoints");
  }
  return placed;
}

void check_outputs(const TrainOptions& o) {
  std::vector<NamedFile> files = o.inputs;
  const std::string record = o.metrics.empty() ? "" : record_file(o).string();
  // A resumed run keeps config.toml and writes config-2.toml, or the next name that is free.
  const bool writes_flags = !o.output_dir.empty() && !resumes(o);
  const std::string flags = writes_flags ? o.output_dir + "/config.toml" : "";
  for (const NamedFile& written : {NamedFile{"--output-dir", o.output_dir},
                                   {"config.toml of --output-dir", flags},
                                   {"--metrics", o.metrics},
                                   {"run.json of --metrics", record},
                                   {"--profile", o.profile},
                                   {"--tensorboard", o.tensorboard},
                                   {"--checkpoint", o.checkpoint},
                                   {"--save-hf", o.save_hf},
                                   {"--save-lora", o.save_lora}}) {
    files.push_back(written);
  }
  check_files_differ(files);
}

/// Checks combinations of flags. All ranks have equal flags, so all ranks fail at the same check.
void check_consistent(const CLI::App& app, const TrainOptions& o) {
  TESSERA_CHECK(o.model.empty() != o.config.empty(),
                o.model.empty() ? "no model given; pass --model DIR or --config FILE"
                                : "--model and --config are both given; pass one of them");
  check_data(o, /*needed=*/o.steps > 0 && !o.planned);
  const std::size_t betas = app.get_option("--betas")->count();
  TESSERA_CHECK(betas == 0 || betas == 2, "--betas has ", betas, betas == 1 ? " value" : " values",
                "; pass two values, B1,B2");
  TESSERA_CHECK(o.min_lr <= o.lr, "--min-lr ", o.min_lr, " is more than --lr ", o.lr,
                ", the peak learning rate; pass a smaller --min-lr");
  TESSERA_CHECK(!o.fp8 || o.param_dtype != "fp16",
                "--fp8 is given with --param-dtype fp16, but fp16 does not have the range of "
                "scaled FP8 numbers; pass --param-dtype bf16");
  TESSERA_CHECK(!o.fp8 || o.device != "cuda" || o.param_dtype == "bf16",
                "--fp8 is given with --param-dtype ", o.param_dtype,
                ", but FP8 matrix products on CUDA return bf16; pass --param-dtype bf16, or "
                "leave out --fp8");
  check_parallelism(o);
  TESSERA_CHECK(o.ac != "auto" || o.memory || o.device == "cuda" || o.planned,
                "--ac auto is given on the CPU, where all ranks share the memory; pass --memory "
                "GIB, the memory that each rank may use");
  if (!o.planned) {
    check_checkpoints(o);
    check_fine_tuning(o);
  }
}

void parse(CLI::App& app, std::vector<std::string> arguments, const FlagNames& first) {
  parse_command_line(app, std::move(arguments),
                     {{"model", "config"},
                      {"tokens", "text", "jsonl"},
                      {"weight", "text"},
                      {"weight", "jsonl"},
                      {"eval-text", "eval-tokens"},
                      {"resume", "resume-step"}},
                     first);
}

/// Sets defaults that depend on other flags, after all flags have been parsed.
void finish(CLI::App& app, TrainOptions& o) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() > 0) {
      o.given.push_back("--" + option->get_single_name());
    }
  }
  if (o.param_dtype.empty()) {
    o.param_dtype = o.device == "cuda" ? "bf16" : "fp32";
  }
  if (o.backend.empty()) {
    o.backend = o.device == "cuda" ? "nccl" : "gloo";
  }
  const std::vector<LeftOut> placed = place_outputs(app, o);
  const std::vector<LeftOut> unused = unused_flags(app, o);
  check_consistent(app, o);
  o.inputs = read_files(app);
  check_outputs(o);
  std::vector<ResolvedFlag> flags = resolve_flags(app);
  leave_out(flags, unused);
  for (const ResolvedFlag& flag : flags) {
    if (flag.note.empty() && !flag.values.empty()) {
      o.listing.emplace_back("--" + flag.name, CLI::detail::join(flag.values, ","));
    }
  }
  o.shared = shared_by_ranks(flags);
  leave_out(flags, placed);
  o.resolved = to_toml(flags);
}

}  // namespace

TrainOptions with_all_degrees(TrainOptions o, std::int64_t ranks) {
  if (o.dp > 0) {
    return o;
  }
  const std::int64_t others = o.dp_replicate * o.ep * o.cp * o.tp;
  TESSERA_CHECK(
      ranks % others == 0,
      product_text(
          {{"--tp", o.tp}, {"--ep", o.ep}, {"--cp", o.cp}, {"--dp-replicate", o.dp_replicate}}),
      " does not divide the ", ranks,
      " running ranks, so --dp -1 can't be computed; start a multiple of ", others, " ranks");
  o.dp = ranks / others;
  check_parallelism(o);
  return o;
}

namespace {

TrainOptions planned(TrainOptions o) {
  TESSERA_CHECK(o.dp > 0,
                "--dp -1 is given, but llama_plan has no running ranks to count; pass --dp N");
  o.planned = true;
  if (!o.model.empty() && o.config.empty()) {
    o.config = o.model + "/config.json";
    o.model.clear();
  }
  for (std::string* file : {&o.checkpoint, &o.initial_load, &o.metrics, &o.save_hf, &o.save_lora,
                            &o.tensorboard, &o.output_dir, &o.profile}) {
    file->clear();
  }
  o.steps = std::max<std::int64_t>(o.steps, 1);
  return o;
}

}  // namespace

TrainOptions parse_train_options(std::vector<std::string> arguments) {
  TrainOptions o;
  CLI::App app(
      "Trains a Llama on a mesh of dp-replicate x dp x ep x cp x tp ranks. For more than one rank, "
      "start llama_train under tessera-run, torchrun, Slurm or Open MPI.",
      "llama_train");
  declare_all(app, o);
  parse(app, std::move(arguments), first_flags());
  finish(app, o);
  return o;
}

TrainOptions parse_plan_options(std::vector<std::string> arguments,
                                const std::function<void(CLI::App&)>& declare,
                                const std::function<bool()>& uses_gpu) {
  TrainOptions o;
  CLI::App app(
      "Plans the memory, computation and communication of every rank of a llama_train run: "
      "executes a real step of the real model for one rank of each kind, without values, in one "
      "process and without a GPU. Accepts llama_train's flags.",
      "llama_plan");
  app.option_defaults()->group("plan");
  declare(app);
  FlagNames first = first_flags();
  for (const CLI::Option* option : app.get_options()) {
    first.push_back(option->get_single_name());
  }
  declare_all(app, o);
  parse(app, std::move(arguments), first);
  if (app.get_option("--device")->count() == 0 && uses_gpu()) {
    o.device = "cuda";
  }
  o = planned(std::move(o));
  finish(app, o);
  return o;
}

}  // namespace llama
