#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "tessera/comm/trace.h"
#include "tessera/observe/flops.h"

namespace tessera::observe {

/// What one training step is known by.
struct StepMetrics {
  std::int64_t step = 0;  ///< 1-based
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  std::optional<double> loss_scale;  ///< of fp16; nullopt without scaling
  bool skipped = false;              ///< no update, because a gradient overflowed
  double step_time_s = 0;
  double tokens_per_s = 0;             ///< of the whole job
  double tflops = 0;                   ///< per rank, by torchtitan's FLOP formula
  std::optional<double> mfu;           ///< per cent; nullopt where the device's peak is not known
  std::optional<double> mfu_causal;    ///< the same with causal attention counted half
  std::int64_t peak_memory_bytes = 0;  ///< of this rank
  std::int64_t memory_capacity_bytes = 0;  ///< of its device; 0: not known
  comm::TrafficTable comm;                 ///< of this rank in this step
};

/// Fills tokens_per_s, tflops, mfu and mfu_causal from step_time_s and the number of tokens that
/// all ranks together worked on.
void set_throughput(StepMetrics& metrics, std::int64_t tokens, int world_size,
                    const ModelFlops& flops, std::optional<double> peak_flops);
/// Fills peak_memory_bytes and memory_capacity_bytes.
void set_memory(StepMetrics& metrics, const std::string& device_type);

/// One JSON object, without a line end: step loss grad_norm lr step_time_s tokens_per_s tflops mfu
/// mfu_causal peak_memory_bytes comm, and with a loss scale loss_scale skipped; comm as {mesh
/// dimension: {collective: {calls, bytes}}}. What is unknown or not finite is null.
std::string to_json(const StepMetrics& metrics);
/// torchtitan's console line. tps is per rank, as there; mfu is N/A where it is not known.
std::string titan_line(const StepMetrics& metrics, int world_size);

/// Writes metrics to a JSONL file, one line a step, flushed. An older file is replaced; a missing
/// folder is made. Throws Error if the file can't be written.
class MetricsWriter {
 public:
  explicit MetricsWriter(const std::filesystem::path& path);
  void write(const StepMetrics& metrics);

 private:
  std::filesystem::path path_;
  std::ofstream out_;
};

}  // namespace tessera::observe
