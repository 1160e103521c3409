#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/trace.h"

namespace tessera::observe {

/// What one training step is known by.
struct StepMetrics {
  std::int64_t step = 0;  ///< 1-based
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  double step_time_s = 0;
  double tokens_per_s = 0;  ///< of the whole job
  double tflops = 0;        ///< per rank, by torchtitan's FLOP formula
  std::optional<double> mfu;         ///< per cent; nullopt where the device's peak is not known
  std::optional<double> mfu_causal;  ///< the same with causal attention counted half
  std::int64_t peak_memory_bytes = 0;
  comm::TrafficTable comm;
};

/// FLOPs of one token, forward and backward.
struct ModelFlops {
  double per_token = 0;         ///< 6 (N - N_embedding) + 12 L hidden S
  double per_token_causal = 0;  ///< with attention counted half
};
ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence);

/// Dense bf16 peak of a device by name, FLOP/s; nullopt if it is not in the table.
std::optional<double> peak_flops(const std::string& device_name);
/// Peak resident memory of this process, bytes.
std::int64_t peak_resident_bytes();
/// Physical memory of this machine, bytes.
std::int64_t physical_memory_bytes();

/// One JSON object a line: step loss grad_norm lr step_time_s tokens_per_s tflops mfu
/// peak_memory_bytes comm.
std::string to_json(const StepMetrics& metrics);
/// torchtitan's console line.
std::string titan_line(const StepMetrics& metrics, int world_size);

/// Appends metrics to a JSONL file, flushed per step.
class MetricsWriter {
 public:
  explicit MetricsWriter(const std::filesystem::path& path);
  void write(const StepMetrics& metrics);

 private:
  std::ofstream out_;
};

}  // namespace tessera::observe
