// Metrics of a training step: derived values, and output as JSON lines (for programs) and as
// torchtitan's console line (for people).
#include "tessera/observe/metrics.h"
#include "tessera/observe/detail/metrics_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::observe {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

/// Returns a number as JSON. An unknown number is null, because 0 would look like a measured value.
ordered_json optional_number(const std::optional<double>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

/// Returns communication traffic as JSON: for each mesh dimension, an entry for each collective.
ordered_json traffic_json(const comm::TrafficTable& table) {
  ordered_json groups = ordered_json::object();
  for (const auto& [key, traffic] : table) {
    const auto& [group, collective] = key;
    groups[group][collective] = {{"calls", traffic.calls}, {"bytes", traffic.bytes}};
  }
  return groups;
}

/// Returns the lines of a metrics file, except the lines of steps after step `last`.
std::string records_up_to(const std::filesystem::path& path, std::int64_t last) {
  std::ifstream in(path);
  std::string kept;
  for (std::string line; std::getline(in, line) && !in.eof();) {
    try {
      if (json::parse(line).at("step").get<std::int64_t>() > last) {
        break;  // the resumed run repeats the steps after `last`
      }
    } catch (const json::exception& error) {
      fail("the metrics file '", path.string(), "' has a line that is not a record of metrics (",
           error.what(), "): pass another file, or remove this file");
    }
    kept += line + '\n';
  }
  return kept;
}

}  // namespace

/// Computes FLOP/s and MFU per rank, and tokens_per_s for the whole job.
void set_throughput(StepMetrics& metrics, std::int64_t tokens, int world_size,
                    const ModelFlops& flops, std::optional<double> peak_flops) {
  metrics.tokens_per_s = static_cast<double>(tokens) / metrics.step_time_s;
  // Counts an equal number of tokens for each rank. With tensor parallelism, a rank processes more
  // tokens, but does only a part of the work for each token.
  const double per_rank = metrics.tokens_per_s / world_size;
  metrics.tflops = per_rank * flops.per_token / 1e12;
  if (!peak_flops || tokens == 0) {
    return;
  }
  metrics.mfu = 100 * per_rank * flops.per_token / *peak_flops;
  metrics.mfu_causal = 100 * per_rank * flops.per_token_causal / *peak_flops;
}

void set_memory(StepMetrics& metrics, const std::string& device_type) {
  const auto use = take_memory_use(device_type);
  metrics.peak_memory_bytes = use.peak_bytes;
  metrics.peak_active_bytes = use.peak_active_bytes;
  metrics.memory_capacity_bytes = use.capacity_bytes;
}

/// The keys of the JSON object keep their order, so that all lines of a file have equal columns.
std::string to_json(const StepMetrics& metrics) {
  ordered_json json = {{"step", metrics.step},
                       {"loss", metrics.loss},
                       {"grad_norm", metrics.grad_norm},
                       {"lr", metrics.lr},
                       {"step_time_s", metrics.step_time_s},
                       {"data_time_s", metrics.data_time_s},
                       {"tokens_per_s", metrics.tokens_per_s},
                       {"tflops", metrics.tflops},
                       {"mfu", optional_number(metrics.mfu)},
                       {"mfu_causal", optional_number(metrics.mfu_causal)},
                       {"peak_memory_bytes", metrics.peak_memory_bytes},
                       {"comm", traffic_json(metrics.comm)}};
  // Only runs with loss scaling have the metrics loss_scale and skipped.
  if (metrics.loss_scale) {
    json["loss_scale"] = *metrics.loss_scale;
    json["skipped"] = metrics.skipped;
  }
  if (metrics.peak_active_bytes) {
    json["peak_active_bytes"] = *metrics.peak_active_bytes;
  }
  if (metrics.checkpoint_stall_s) {
    json["checkpoint_stall_s"] = *metrics.checkpoint_stall_s;
  }
  if (metrics.experts) {
    json["router_aux_loss"] = optional_number(metrics.experts->load_balancing_loss);
    json["router_z_loss"] = optional_number(metrics.experts->z_loss);
    json["expert_load"] = optional_number(metrics.experts->largest_over_mean);
    json["dropped_tokens"] = 0;
  }
  if (metrics.eval_loss) {
    json["eval_loss"] = *metrics.eval_loss;
  }
  return json.dump();
}

std::string grouped(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  // "inf" and "nan" are not divided into groups of three digits.
  if (!std::isfinite(value)) {
    return text;
  }
  // The sign of a number is not counted when digits are divided into groups of three.
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  std::size_t position = text.find('.');
  if (position == std::string::npos) {
    position = text.size();
  }
  while (position > first + 3) {
    position -= 3;
    text.insert(position, 1, ',');
  }
  return text;
}

/// Formats a size with about three significant digits; a size in bytes has no decimals.
std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; std::fabs(bytes) >= 1024 && unit + 1 < kUnits.size(); ++unit) {
    bytes /= 1024;
  }
  const int decimals = unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", bytes, decimals, kUnits[unit]);
}

/// The console line has torchtitan's format, so that runs of torchtitan and Tessera are comparable.
std::string titan_line(const StepMetrics& metrics, int world_size) {
  const auto peak = static_cast<double>(metrics.peak_memory_bytes);
  const auto capacity = static_cast<double>(metrics.memory_capacity_bytes);
  return fmt::format(
      "step: {:2}  loss: {:8.5f}  grad_norm: {:7.4f}  memory: {:5.2f}GiB({:.2f}%)  tps: {}  "
      "tflops: {}  mfu: {}",
      metrics.step, metrics.loss, metrics.grad_norm, peak / (1 << 30),
      capacity > 0 ? 100 * peak / capacity : 0, grouped(metrics.tokens_per_s / world_size),
      grouped(metrics.tflops, 2), metrics.mfu ? fmt::format("{:.2f}%", *metrics.mfu) : "N/A");
}

MetricsWriter::MetricsWriter(const std::filesystem::path& path, std::int64_t resumed)
    : path_(files::absolute_path(path)) {
  std::error_code ignored;  // an error is ignored, because opening the file reports it
  if (path.has_parent_path()) {
    std::filesystem::create_directories(path.parent_path(), ignored);
  }
  if (resumed > 0 && std::filesystem::is_regular_file(path)) {
    // The file is replaced atomically, so that an interrupted write does not lose the old lines.
    files::write_file(path, records_up_to(path, resumed));
  }
  out_.open(path, resumed > 0 ? std::ios::app : std::ios::trunc);
  TESSERA_CHECK(out_, "cannot write the metrics file '", path.string(),
                "': pass a file in a writable folder");
}

void MetricsWriter::write(const StepMetrics& metrics) {
  // The metrics file is flushed after each step, so that a killed run loses no step.
  out_ << to_json(metrics) << '\n' << std::flush;
  TESSERA_CHECK(out_, "writing the metrics file '", path_.string(),
                "' failed: check that the disk has room");
}

namespace {

/// The vendor's data-sheet values of a device for dense matrix products, in TFLOP/s.
struct Peak {
  std::vector<std::string_view> words;  ///< words that the device's name must contain
  double half;                          ///< data-sheet TFLOP/s in bf16 and fp16
  double fp32;  ///< TFLOP/s in fp32: without TF32 (NVIDIA), on matrix cores (AMD)
};

/// In the table of devices, more specific names come first. PCIe and NVL boards have a lower clock
/// rate than SXM boards. An MI250X appears as two devices.
const std::vector<Peak>& peaks() {
  static const std::vector<Peak> table = {
      {{"A100"}, 312, 19.5},       {{"A6000"}, 154.85, 38.7}, {{"H100", "NVL"}, 835, 60},
      {{"H100", "PCIE"}, 756, 51}, {{"H100"}, 989, 67},       {{"H800"}, 989, 67},
      {{"H200"}, 989, 67},         {{"GH200"}, 989, 67},      {{"H20"}, 148, 44},
      {{"B200"}, 2250, 75},        {{"B300"}, 2250, 75},      {{"GB200"}, 2500, 80},
      {{"GB300"}, 2500, 80},       {{"L40S"}, 362, 91.6},     {{"L4"}, 121, 30.3},
      {{"A10"}, 125, 31.2},        {{"A40"}, 149.7, 37.4},    {{"MI250X"}, 191.5, 47.9},
      {{"MI300X"}, 1307, 163.4},   {{"MI325X"}, 1307, 163.4}, {{"MI355X"}, 2500, 157.3},
  };
  return table;
}

/// Splits a device name into upper-case words: "A100-SXM4-80GB" gives A100, SXM4 and 80GB. Names
/// are compared by whole words, so that "A10" does not match "A100".
std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words(1);
  for (const unsigned char c : name) {
    if (std::isalnum(c)) {
      words.back().push_back(static_cast<char>(std::toupper(c)));
    } else if (!words.back().empty()) {
      words.emplace_back();
    }
  }
  return words;
}

}  // namespace

/// Counts 6 FLOPs per parameter: 2 in forward, 4 in backward. Embeddings do not count. Attention
/// adds 12 * layers * hidden * sequence, or half of this number with a causal mask.
ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence) {
  const double dense = 6.0 * static_cast<double>(parameters - embedding_parameters);
  const double attention = 12.0 * static_cast<double>(layers) * static_cast<double>(hidden) *
                           static_cast<double>(sequence);
  return {dense + attention, dense + attention / 2};
}

/// Returns the FLOP/s of the first device in the table whose words all occur in `device_name`.
std::optional<double> peak_flops(const std::string& device_name, c10::ScalarType type) {
  // words_of() can return a last word "". No device in the table has a word "".
  const auto words = words_of(device_name);
  const auto has = [&](std::string_view word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  const auto found = std::find_if(peaks().begin(), peaks().end(), [&](const Peak& peak) {
    return std::all_of(peak.words.begin(), peak.words.end(), has);
  });
  if (found == peaks().end()) {
    return std::nullopt;
  }
  switch (type) {
    case c10::kBFloat16:
    case c10::kHalf:
      return found->half * 1e12;
    case c10::kFloat:
      return found->fp32 * 1e12;
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::observe
