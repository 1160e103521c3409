#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// FLOPs per token, forward and backward, without recomputation.
struct ModelFlops {
  double per_token = 0;         ///< 6 (N - N_embedding) + 12 L hidden S: torchtitan's formula
  double per_token_causal = 0;  ///< the same without the masked half of attention
};
/// `hidden` is heads * head_dim, `sequence` the number of tokens in a sample. If the embedding is
/// tied to the output, its parameters take part in a product: pass 0 for `embedding_parameters`.
ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence);

/// Peak FLOP/s of a device's dense matrix products in `type`, by its name ("NVIDIA H100 80GB
/// HBM3"); nullopt if the table lacks it, for example for a CPU, or a type other than bf16, fp16
/// and fp32. Makers' figures, without sparsity; fp32 as libtorch computes it by default, without
/// TF32.
std::optional<double> peak_flops(const std::string& device_name,
                                 c10::ScalarType type = c10::kBFloat16);

// What a program runs on. `device_type` is "cpu" or "cuda". Not collective; thread safe.

/// The name of the device, of the current one where there are several; "" if it is not known.
std::string device_name(const std::string& device_type);

/// The current CUDA device's, as a number: 89 for 8.9; 0 if it is not known.
int compute_capability();

/// The memory of one rank, in bytes.
struct MemoryUse {
  std::int64_t peak_bytes = 0;  ///< cpu: resident, of this process; cuda: reserved by libtorch
  /// cuda: the part of what was reserved that tensors had; cpu: what tensors had, if
  /// count_tensor_memory() was called.
  std::optional<std::int64_t> peak_active_bytes;
  std::int64_t capacity_bytes = 0;  ///< of the machine, or of the device; 0: not known
};
/// The highest use of memory since the last call, on a CPU since the process began. Does not wait
/// for the device.
MemoryUse take_memory_use(const std::string& device_type);

/// Peak resident memory of this process, in bytes.
std::int64_t peak_resident_bytes();
/// Physical memory of this machine, in bytes.
std::int64_t physical_memory_bytes();

}  // namespace tessera::observe

namespace tessera::comm {
class World;
}

namespace tessera::observe {

/// FLOP/s of a device, found by products of square matrices in `type`: what MFU is against where
/// no data sheet is, and on a CPU. The median of several windows, in which all ranks compute, so
/// that those of one host share its cores as they do in training; the mean over the ranks. Takes
/// about a second, and draws no random numbers. Collective over `world`, and the same on all ranks.
double measure_peak_flops(comm::World& world, c10::ScalarType type);

/// The metrics of one training step.
struct StepMetrics {
  std::int64_t step = 0;  ///< 1-based
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  std::optional<double> loss_scale;    ///< with fp16; nullopt without scaling
  bool skipped = false;                ///< no update, because a gradient overflowed
  double step_time_s = 0;              ///< seconds
  double data_time_s = 0;              ///< the part of it that the step waited for its batch
  double tokens_per_s = 0;             ///< of the whole job
  double tflops = 0;                   ///< per rank, by torchtitan's FLOP formula
  std::optional<double> mfu;           ///< per cent; nullopt without the device's peak, or tokens
  std::optional<double> mfu_causal;    ///< the same with causal attention counted half
  std::int64_t peak_memory_bytes = 0;  ///< on this rank; cuda: reserved, in this step
  std::optional<std::int64_t> peak_active_bytes;  ///< what tensors had of it, if known
  std::int64_t memory_capacity_bytes = 0;         ///< of its device; 0: not known
  /// For how long a checkpoint kept training waiting between the step before and this one.
  std::optional<double> checkpoint_stall_s;
  std::optional<double> eval_loss;  ///< on held-out data after this step, if it was evaluated
  comm::TrafficTable comm;          ///< of this rank in this step
};

/// Fills tokens_per_s, tflops, mfu and mfu_causal, from step_time_s and the number of tokens of all
/// ranks together. `peak_flops`: FLOP/s of one device.
void set_throughput(StepMetrics& metrics, std::int64_t tokens, int world_size,
                    const ModelFlops& flops, std::optional<double> peak_flops);
/// Fills peak_memory_bytes, peak_active_bytes and memory_capacity_bytes, of the time since the last
/// call (take_memory_use).
void set_memory(StepMetrics& metrics, const std::string& device_type);

/// One JSON object, without a line end: step loss grad_norm lr step_time_s data_time_s tokens_per_s
/// tflops mfu mfu_causal peak_memory_bytes comm, with a loss scale loss_scale skipped, if
/// known peak_active_bytes, after a checkpoint checkpoint_stall_s, and eval_loss where there is
/// one; comm as {mesh dimension:
/// {collective: {calls, bytes}}}. What is unknown or not finite is null.
std::string to_json(const StepMetrics& metrics);
/// torchtitan's console line. tps is per rank, as there; mfu is N/A where it is not known.
std::string titan_line(const StepMetrics& metrics, int world_size);

/// Writes metrics to a JSONL file, one line per step, flushed. Makes a missing folder. For one rank
/// and one thread. Throws Error if the file can't be written.
class MetricsWriter {
 public:
  /// Keeps the records of an existing file up to step `resumed`; a new run keeps none.
  explicit MetricsWriter(const std::filesystem::path& path, std::int64_t resumed = 0);
  void write(const StepMetrics& metrics);
  /// Writes the record of the last write() again, with more in it, in its place. Does nothing where
  /// the file is a pipe, which has the record already.
  void write_again(const StepMetrics& metrics);

 private:
  std::filesystem::path path_;
  std::size_t last_bytes_ = 0;  ///< size of the last record
  std::ofstream out_;
};

}  // namespace tessera::observe
TESSERA_API_END
