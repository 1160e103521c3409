#include "tessera/observe/metrics.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "number_text.h"
#include "tessera/core/error.h"
#include "tessera/observe/device.h"

namespace tessera::observe {
namespace {

using nlohmann::ordered_json;

ordered_json optional_number(const std::optional<double>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json traffic_json(const comm::TrafficTable& table) {
  ordered_json groups = ordered_json::object();
  for (const auto& [key, traffic] : table) {
    const auto& [group, collective] = key;
    groups[group][collective] = {{"calls", traffic.calls}, {"bytes", traffic.bytes}};
  }
  return groups;
}

}  // namespace

void set_throughput(StepMetrics& metrics, std::int64_t tokens, int world_size,
                    const ModelFlops& flops, std::optional<double> peak_flops) {
  metrics.tokens_per_s = static_cast<double>(tokens) / metrics.step_time_s;
  const double per_rank = metrics.tokens_per_s / world_size;
  metrics.tflops = per_rank * flops.per_token / 1e12;
  if (!peak_flops) return;
  metrics.mfu = 100 * per_rank * flops.per_token / *peak_flops;
  metrics.mfu_causal = 100 * per_rank * flops.per_token_causal / *peak_flops;
}

void set_memory(StepMetrics& metrics, const std::string& device_type) {
  const auto use = memory_use(device_type);
  metrics.peak_memory_bytes = use.peak_bytes;
  metrics.memory_capacity_bytes = use.capacity_bytes;
}

std::string to_json(const StepMetrics& metrics) {
  ordered_json json = {{"step", metrics.step},
                       {"loss", metrics.loss},
                       {"grad_norm", metrics.grad_norm},
                       {"lr", metrics.lr},
                       {"step_time_s", metrics.step_time_s},
                       {"tokens_per_s", metrics.tokens_per_s},
                       {"tflops", metrics.tflops},
                       {"mfu", optional_number(metrics.mfu)},
                       {"mfu_causal", optional_number(metrics.mfu_causal)},
                       {"peak_memory_bytes", metrics.peak_memory_bytes},
                       {"comm", traffic_json(metrics.comm)}};
  if (metrics.loss_scale) {
    json["loss_scale"] = *metrics.loss_scale;
    json["skipped"] = metrics.skipped;
  }
  return json.dump();
}

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

MetricsWriter::MetricsWriter(const std::filesystem::path& path) : path_(path) {
  std::error_code ignored;  // the file's own error says more
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), ignored);
  out_.open(path, std::ios::trunc);
  TESSERA_CHECK(out_, "cannot write the metrics file '", path.string(),
                "': give a file in a folder that may be written");
}

void MetricsWriter::write(const StepMetrics& metrics) {
  out_ << to_json(metrics) << '\n' << std::flush;
  TESSERA_CHECK(out_, "writing the metrics file '", path_.string(),
                "' failed: check that the disk has room");
}

}  // namespace tessera::observe
