#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/comm/trace.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::observe {

/// FLOPs per token of forward and backward, without recomputation, by torchtitan's formula.
struct ModelFlops {
  double per_token = 0;         ///< 6 (parameters - embedding) + 12 layers * hidden * sequence
  double per_token_causal = 0;  ///< like per_token, without the masked half of attention
};
/// Returns the FLOPs per token of a decoder model. `hidden`: heads * head_dim. `sequence`: tokens
/// per sample. `embedding_parameters`: 0 if the embedding is tied to the output layer.
ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence);

/// Returns the peak FLOP/s of dense matrix products by device name ("NVIDIA H100 80GB HBM3"), from
/// data sheets. fp32 is without TF32. Returns nullopt for unknown devices, CPUs, and dtypes other
/// than bf16, fp16 and fp32.
std::optional<double> peak_flops(const std::string& device_name,
                                 c10::ScalarType type = c10::kBFloat16);

// Functions that return properties of the device of this process. `device_type` is "cpu" or "cuda".
// Not collective; thread safe.

/// Returns the name of the current CUDA device, or of the CPU; "" if unknown.
std::string device_name(const std::string& device_type);

/// Returns the compute capability of the current CUDA device: 89 for 8.9; 0 if unknown.
int compute_capability();

/// The memory of one rank, in bytes.
struct MemoryUse {
  /// Peak memory. On a CPU: resident memory of this process; on cuda: memory reserved by libtorch.
  std::int64_t peak_bytes = 0;
  /// Peak memory allocated to tensors. On cuda, this memory is a part of the reserved memory. On a
  /// CPU, the value is known only after count_tensor_memory() was called.
  std::optional<std::int64_t> peak_active_bytes;
  std::int64_t capacity_bytes = 0;  ///< total memory of the machine or device; 0 if unknown
};
/// Returns this process's highest memory use since the last call. Resident memory (CPU) is the
/// maximum since the process began. Does not wait for the device.
MemoryUse take_memory_use(const std::string& device_type);

/// Starts to count the memory of CPU tensors in this process, for metrics. Earlier allocations are
/// not counted. Must not be called while other threads use tensors.
void count_tensor_memory();

/// Measures the FLOP/s of square matrix products in `type`, for about a second. Use the result as
/// the peak rate of devices that peak_flops() does not know. The result is the mean over ranks that
/// compute at the same time, equal on all ranks. Collective over `world`.
double measure_peak_flops(comm::World& world, c10::ScalarType type);

/// The metrics of a model's experts in one training step. Losses are means over micro-batches.
struct ExpertMetrics {
  double load_balancing_loss = 0;  ///< load-balancing loss, not multiplied by its coefficient
  double z_loss = 0;               ///< router z-loss, not multiplied by its coefficient
  /// The largest number of tokens of an expert, divided by the mean number of tokens per expert,
  /// for the layer in which this ratio is largest.
  double largest_over_mean = 0;
};

/// The metrics of one training step.
struct StepMetrics {
  std::int64_t step = 0;  ///< number of the step, from 1
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  std::optional<double> loss_scale{};  ///< loss scale with fp16; nullopt without loss scaling
  bool skipped = false;         ///< whether the update was skipped because a gradient overflowed
  double step_time_s = 0;       ///< the step's duration in seconds
  double data_time_s = 0;       ///< seconds of step_time_s spent waiting for the batch
  double tokens_per_s = 0;      ///< tokens per second over all ranks
  double tflops = 0;            ///< TFLOP/s per rank, by torchtitan's FLOP formula
  std::optional<double> mfu{};  ///< model FLOPs utilization in %; nullopt if the peak is unknown
  std::optional<double> mfu_causal{};  ///< `mfu` with half of the FLOPs of attention
  std::int64_t peak_memory_bytes = 0;  ///< peak memory of this rank in this step (CUDA: reserved)
  std::optional<std::int64_t> peak_active_bytes{};  ///< peak memory of tensors, if known
  std::int64_t memory_capacity_bytes = 0;           ///< memory of this rank's device; 0 if unknown
  /// Seconds between the previous step and this step in which training waited for a checkpoint.
  std::optional<double> checkpoint_stall_s{};
  std::optional<double> eval_loss{};       ///< loss on held-out data, if evaluated after this step
  std::optional<ExpertMetrics> experts{};  ///< metrics of the experts; nullopt without experts
  comm::TrafficTable comm{};               ///< this rank's communication traffic in this step
};

/// Sets the fields tokens_per_s, tflops, mfu and mfu_causal from step_time_s and `tokens`, the
/// number of tokens over all ranks. `peak_flops` is the FLOP/s of one device.
void set_throughput(StepMetrics& metrics, std::int64_t tokens, int world_size,
                    const ModelFlops& flops, std::optional<double> peak_flops);
/// Returns the metrics of a step as one JSON object, without a line end. Unknown and non-finite
/// numbers are null.
/// * Always: step loss grad_norm lr step_time_s data_time_s tokens_per_s tflops mfu mfu_causal
///   peak_memory_bytes, comm: {mesh dimension: {collective: {calls, bytes}}}.
/// * If known: loss_scale skipped peak_active_bytes checkpoint_stall_s eval_loss; with experts
///   router_aux_loss router_z_loss expert_load (largest over mean) dropped_tokens (always 0).
std::string to_json(const StepMetrics& metrics);

}  // namespace tessera::observe
TESSERA_API_END
