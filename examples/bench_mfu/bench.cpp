// bench_mfu: model shapes, measurements and results.

#include "examples/bench_mfu/bench.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace bench {
namespace {

constexpr std::string_view kQwen7b = R"({"architectures": ["Qwen2ForCausalLM"],
 "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
 "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
 "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "max_position_embeddings": 131072, "initializer_range": 0.02, "tie_word_embeddings": false}
)";

constexpr std::string_view kQwen1b = R"({"architectures": ["Qwen2ForCausalLM"],
 "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
 "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
 "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "max_position_embeddings": 131072, "initializer_range": 0.02, "tie_word_embeddings": true}
)";

constexpr std::string_view kLlama8b = R"({"architectures": ["LlamaForCausalLM"],
 "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
 "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
 "max_position_embeddings": 8192, "initializer_range": 0.02, "tie_word_embeddings": false}
)";

}  // namespace

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"llmq-1.5b", kQwen1b, 1024, 16,
       "llmq on one H100, bf16: 58,000 tokens/s; at the GPU's peak its products would take 55 % of "
       "that time"},
      {"llmq-7b", kQwen7b, 1024, 4,
       "llmq on one H100, bf16: 14,000 tokens/s; at the GPU's peak its products would take 60 % of "
       "that time"},
      {"torchtitan-8b", kLlama8b, 8192, 1,
       "torchtitan on 8 H100, bf16, FSDP: 33 % MFU eager, 39 to 40 % compiled"}};
  return all;
}

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const Shape& shape : shapes()) {
    names.emplace_back(shape.name);
  }
  return names;
}

const Shape& shape_of(std::string_view name) {
  return *std::ranges::find(shapes(), name, &Shape::name);
}

using nlohmann::json;

namespace {

std::vector<std::string> run_flags(const Trial& trial, const BenchOptions& o) {
  std::vector<std::string> flags{"--config", trial.config.string(),
                                 "--dp",     std::to_string(trial.mesh.dp),
                                 "--cp",     std::to_string(trial.mesh.cp),
                                 "--tp",     std::to_string(trial.mesh.tp),
                                 "--batch",  std::to_string(trial.batch),
                                 "--seq",    std::to_string(trial.seq),
                                 "--steps",  std::to_string(o.steps),
                                 "--ac",     trial.ac,
                                 "--device", o.device};
  for (const std::string& flag : o.flags) {
    if (!flag.empty()) {
      flags.push_back(flag);
    }
  }
  return flags;
}

/// FLOPs of a step over all ranks, as llama_plan counts them in the step's operators. llama_plan
/// prints FLOPs only for a machine, and they are equal for every machine.
double flops_of_step(std::vector<std::string> flags, const std::filesystem::path& folder) {
  const std::filesystem::path plan = folder / "plan.json";
  flags.insert(flags.begin(), llama::program_path("llama_plan"));
  flags.insert(flags.end(), {"--gpu", "h100", "--json", plan.string()});
  const int code = llama::run_logged(flags, folder / "plan.log");
  TESSERA_CHECK(code == 0, llama::error_in(folder / "plan.log"));
  std::ifstream in(plan);
  const json ranks = json::parse(in).at("kinds");
  double flops = 0;
  for (const json& kind : ranks) {
    flops += kind.at("ranks").get<double>() * kind.at("flops").get<double>();
  }
  return flops;
}

/// The activation checkpointing that llama_train chose for --ac auto, read from its log.
std::string chosen_ac(const std::filesystem::path& log) {
  constexpr std::string_view kBegin = "--ac auto: ";
  std::ifstream in(log);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(kBegin)) {
      return line.substr(kBegin.size(), line.find(' ', kBegin.size()) - kBegin.size());
    }
  }
  tessera::fail("the run with --ac auto printed no choice in ", log.string());
}

std::vector<json> counted_steps(const std::filesystem::path& metrics, std::int64_t warmup) {
  std::ifstream in(metrics);
  std::vector<json> steps;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with('{')) {
      steps.push_back(json::parse(line));
    }
  }
  steps.erase(steps.begin(), steps.begin() + std::min<std::ptrdiff_t>(warmup, std::ssize(steps)));
  TESSERA_CHECK(!steps.empty(), "the run has no step after the warm-up in ", metrics.string());
  return steps;
}

/// The step with the median time. All figures of a run are taken from this step, so that the
/// figures are consistent.
json middle_step(std::vector<json> steps) {
  const auto middle = steps.begin() + std::ssize(steps) / 2;
  std::ranges::nth_element(steps, middle, {},
                           [](const json& step) { return step.at("step_time_s").get<double>(); });
  return *middle;
}

std::int64_t most(const std::vector<json>& steps, const char* key) {
  std::int64_t most = 0;
  for (const json& step : steps) {
    most = std::max(most, step.at(key).get<std::int64_t>());
  }
  return most;
}

Figures figures_of(const std::vector<json>& steps, double flops, std::int64_t ranks) {
  const json step = middle_step(steps);
  Figures figures{.step_time_s = step.at("step_time_s"),
                  .tokens_per_s = step.at("tokens_per_s"),
                  .reserved_bytes = most(steps, "peak_memory_bytes")};
  if (step.contains("peak_active_bytes")) {
    figures.active_bytes = most(steps, "peak_active_bytes");
  }
  if (!step.at("mfu").is_null()) {
    figures.mfu = step.at("mfu").get<double>();
    figures.mfu_causal = step.at("mfu_causal").get<double>();
    figures.peak_flops = step.at("tflops").get<double>() * 1e12 / (*figures.mfu / 100);
    figures.hfu =
        100 * flops / (figures.step_time_s * static_cast<double>(ranks)) / *figures.peak_flops;
  }
  return figures;
}

/// A way to run PyTorch's step: its name in results, and the script's flags.
struct PeerKind {
  const char* name;
  std::vector<std::string> flags;
};

const std::vector<PeerKind>& peer_kinds() {
  static const std::vector<PeerKind> kinds{
      {"eager", {}},
      {"compiled", {"--compile"}},
      {"compiled_without_fsdp", {"--compile", "--parallel", "none"}}};
  return kinds;
}

/// Measures the step of a trial on PyTorch, with the script options.peer and the same tokens.
PeerFigures measure_peer(const Trial& trial, const BenchOptions& o, const PeerKind& kind,
                         const std::filesystem::path& folder, const std::filesystem::path& tokens) {
  PeerFigures figures{.name = kind.name};
  const std::filesystem::path log = folder / ("peer-" + figures.name + ".log");
  std::vector<std::string> command{"/usr/bin/env",
                                   "python3",
                                   o.peer,
                                   "--config",
                                   trial.config.string(),
                                   "--tokens",
                                   tokens.string(),
                                   "--ac",
                                   trial.ac,
                                   "--batch",
                                   std::to_string(trial.batch),
                                   "--seq",
                                   std::to_string(trial.seq),
                                   "--warm",
                                   std::to_string(o.warmup),
                                   "--steps",
                                   std::to_string(o.steps - o.warmup),
                                   "--device",
                                   o.device};
  command.insert(command.end(), kind.flags.begin(), kind.flags.end());
  try {
    TESSERA_CHECK(trial.mesh.ranks() == 1, "--peer runs one rank, not ", trial.mesh.ranks());
    TESSERA_CHECK(trial.ac == "none" || trial.ac == "full", "--peer has no --ac ", trial.ac);
    TESSERA_CHECK(llama::run_logged(command, log) == 0, llama::error_in(log));
    const json step = middle_step(counted_steps(log, /*warmup=*/0));
    figures.step_time_s = step.at("step_time_s");
    figures.tokens_per_s = step.at("tokens_per_s");
  } catch (const tessera::Error& error) {
    figures.error = error.what();
  } catch (const json::exception& error) {
    figures.error = error.what();
  }
  return figures;
}

}  // namespace

Result measure(const Trial& trial, const BenchOptions& options, const std::filesystem::path& folder,
               const std::filesystem::path& tokens) {
  std::filesystem::create_directories(folder);
  std::vector<std::string> flags = run_flags(trial, options);
  std::vector<std::string> command{llama::program_path("tessera-run"), "--nproc",
                                   std::to_string(trial.mesh.ranks()), "--",
                                   llama::program_path("llama_train")};
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {"--tokens", tokens.string(), "--peak-flops", options.peak_flops,
                                 "--metrics", (folder / "metrics.jsonl").string()});
  Result result{.trial = trial};
  try {
    // Makes llama_train report peak_active_bytes on a CPU too.
    setenv("TESSERA_COUNT_MEMORY", "1", 1);
    const int code = llama::run_logged(command, folder / "run.log");
    TESSERA_CHECK(code == 0, llama::error_in(folder / "run.log"));
    if (trial.ac == "auto") {
      result.trial.ac = chosen_ac(folder / "run.log");
      flags = run_flags(result.trial, options);
    }
    const double flops = flops_of_step(flags, folder);
    result.figures = figures_of(counted_steps(folder / "metrics.jsonl", options.warmup), flops,
                                trial.mesh.ranks());
  } catch (const tessera::Error& error) {
    result.error = error.what();
  } catch (const json::exception& error) {
    result.error = error.what();
  }
  for (const PeerKind& kind : peer_kinds()) {
    if (!options.peer.empty()) {
      result.peers.push_back(measure_peer(result.trial, options, kind, folder, tokens));
    }
  }
  return result;
}

void write_tokens(const std::filesystem::path& path, std::int64_t count) {
  constexpr std::int32_t kMagic = 20240520;
  constexpr std::int64_t kPeriod = 61;
  std::array<std::int32_t, 256> header{kMagic, 1, static_cast<std::int32_t>(count)};
  std::vector<std::uint16_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<std::uint16_t>(i % kPeriod));
  }
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(header.data()), sizeof(header));
  out.write(reinterpret_cast<const char*>(tokens.data()), std::ssize(tokens) * 2);
  out.close();
  TESSERA_CHECK(out, "can't write ", path.string(), "; give --out a folder that may be written");
}

using nlohmann::ordered_json;

namespace {

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json();
}

std::string percent(const std::optional<double>& share) {
  return share ? fmt::format("{:.1f} %", *share) : "-";
}

std::string gib(const std::optional<std::int64_t>& bytes) {
  return bytes ? fmt::format("{:.3g}", static_cast<double>(*bytes) / (1 << 30)) : "-";
}

std::string tera(const std::optional<double>& flops) {
  return flops ? fmt::format("{:.3g}", *flops / 1e12) : "-";
}

std::string mesh_text(const Trial& trial) {
  const Degrees& mesh = trial.mesh;
  return mesh.cp == 1 ? fmt::format("{}x{}", mesh.dp, mesh.tp)
                      : fmt::format("{}x{}x{}", mesh.dp, mesh.cp, mesh.tp);
}

}  // namespace

std::string to_table(const std::vector<Result>& results) {
  constexpr auto kFormat =
      "{:<16} {:>6} {:>10} {:>6} {:>6} {:>10} {:>8} {:>8} {:>8} {:>12} {:>11} {:>13}\n";
  std::string text = fmt::format(kFormat, "model", "mesh", "ac", "batch", "seq", "tokens/s", "MFU",
                                 "causal", "HFU", "peak TFLOP/s", "active GiB", "reserved GiB");
  for (const Result& result : results) {
    const Trial& trial = result.trial;
    const Figures& figures = result.figures;
    if (!result.error.empty()) {
      text += fmt::format("{:<16} {:>6} {:>10} {:>6} {:>6}   {}\n", trial.shape(), mesh_text(trial),
                          trial.ac, trial.batch, trial.seq, result.error);
      continue;
    }
    text += fmt::format(kFormat, trial.shape(), mesh_text(trial), trial.ac, trial.batch, trial.seq,
                        fmt::format("{:.0f}", figures.tokens_per_s), percent(figures.mfu),
                        percent(figures.mfu_causal), percent(figures.hfu), tera(figures.peak_flops),
                        gib(figures.active_bytes), gib(figures.reserved_bytes));
  }
  return text;
}

std::string peers_text(const std::vector<Result>& results) {
  std::string text;
  for (const Result& result : results) {
    for (const PeerFigures& peer : result.peers) {
      std::string speed = fmt::format("{:.0f} tokens/s", peer.tokens_per_s);
      if (result.error.empty()) {
        speed += fmt::format("; ours is {:.2f} times as fast",
                             result.figures.tokens_per_s / peer.tokens_per_s);
      }
      text +=
          fmt::format("PyTorch {}, {} {} {}: {}\n", peer.name, result.trial.shape(),
                      result.trial.ac, result.trial.batch, peer.error.empty() ? speed : peer.error);
    }
  }
  return text;
}

ordered_json json_of(const std::vector<PeerFigures>& peers) {
  ordered_json json = ordered_json::object();
  for (const PeerFigures& peer : peers) {
    json[peer.name] = peer.error.empty() ? ordered_json{{"step_time_s", peer.step_time_s},
                                                        {"tokens_per_s", peer.tokens_per_s}}
                                         : ordered_json{{"error", peer.error}};
  }
  return json;
}

std::string to_json(const std::vector<Result>& results) {
  ordered_json runs = ordered_json::array();
  for (const Result& result : results) {
    const Trial& trial = result.trial;
    const Figures& figures = result.figures;
    const bool ran = result.error.empty();
    runs.push_back({{"model", trial.shape()},
                    {"ac", trial.ac},
                    {"batch", trial.batch},
                    {"seq", trial.seq},
                    {"dp", trial.mesh.dp},
                    {"cp", trial.mesh.cp},
                    {"tp", trial.mesh.tp},
                    {"step_time_s", ran ? ordered_json(figures.step_time_s) : ordered_json()},
                    {"tokens_per_s", ran ? ordered_json(figures.tokens_per_s) : ordered_json()},
                    {"peak_flops", or_null(figures.peak_flops)},
                    {"mfu", or_null(figures.mfu)},
                    {"mfu_causal", or_null(figures.mfu_causal)},
                    {"hfu", or_null(figures.hfu)},
                    {"active_bytes", or_null(figures.active_bytes)},
                    {"reserved_bytes", ran ? ordered_json(figures.reserved_bytes) : ordered_json()},
                    {"peer", json_of(result.peers)},
                    {"error", ran ? ordered_json() : ordered_json(result.error)}});
  }
  // Invalid UTF-8, which an error message may contain, is replaced.
  return ordered_json{{"runs", runs}}.dump(2, ' ', false, ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace bench
