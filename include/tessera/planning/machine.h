#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// The properties of a GPU and its cluster. Rates are data-sheet values. The `..._share` factors
/// are the fractions of these rates that a training step is assumed to reach. The default shares of
/// products, of attention with heads of 64 and of memory were measured within steps on one H200
/// with libtorch 2.11. No other share has been measured.
struct Machine {
  std::string name;
  double memory_bytes = 0;      ///< memory of one device
  double reserved_bytes = 3e9;  ///< memory that tensors cannot use: CUDA context, NCCL buffers
  double flops_half = 0;        ///< FLOP/s of dense matrix products in bf16 and fp16
  /// FLOP/s of matrix products in fp32, in libtorch's default mode (without TF32).
  double flops_fp32 = 0;
  double product_share = 0.76;  ///< fraction of the peak FLOP/s that matrix products reach
  /// Fraction of the peak FLOP/s that attention reaches, with heads of more than 64 elements.
  double attention_share = 0.5;
  double attention_share_64 = 0.39;  ///< as attention_share, with heads of at most 64 elements
  double memory_bandwidth = 0;       ///< memory bandwidth, bytes per second
  /// Fraction of memory_bandwidth that operators without products reach.
  double memory_share = 0.62;
  double operator_latency_s = 2e-6;  ///< the minimum time of an operator
  std::int64_t ranks_per_node = 8;
  double link_bandwidth = 0;      ///< bytes per second from one device to the devices of its node
  double network_bandwidth = 0;   ///< bytes per second from one device to other nodes
  double network_share = 0.8;     ///< fraction of link and network bandwidth that collectives reach
  double link_latency_s = 10e-6;  ///< latency of a collective within a node
  double network_latency_s = 30e-6;  ///< latency of a collective over several nodes
  double flops_fp8 = 0;              ///< FLOP/s of dense 8-bit products; 0: the device has none
  /// Fraction of flops_fp8 that 8-bit products reach. 0: the fraction was not measured; 8-bit
  /// products are then assumed to be as fast as 16-bit products.
  double fp8_share = 0;
  double multiprocessors = 0;  ///< multiprocessors (SMs) of a device; 0: unknown
  /// Multiprocessors that a collective takes from the products and the attention that overlap with
  /// the collective. The default is the limit NCCL_MAX_CTAS=16 of docs/programs/launching.md.
  double collective_multiprocessors = 16;
  /// The source of the shares, for the text of a plan: a device and a libtorch version, or a file.
  std::string shares_from = "one H200, libtorch 2.11";

  /// The bytes of a device's memory that are available to tensors.
  std::int64_t room() const { return static_cast<std::int64_t>(memory_bytes - reserved_bytes); }
  /// The data-sheet FLOP/s of products in `type`. For a device without an 8-bit rate, 8-bit
  /// products have the 16-bit rate.
  double peak_flops(c10::ScalarType type) const;
  /// The FLOP/s that matrix products in `type` are assumed to reach.
  double product_flops(c10::ScalarType type) const;
  /// The FLOP/s that attention in `type` is assumed to reach, with heads of `head_size` elements.
  double attention_flops(c10::ScalarType type, std::int64_t head_size) const;
};

/// The names that machine_of() accepts.
std::vector<std::string> machine_names();
/// Returns a machine. `name` is a known machine, or a TOML file with the fields of Machine by name;
/// a file may start from a known machine: like = "h200". `asked` is the name, in messages, of the
/// option that gave `name`. Throws Error for an unknown name or key, and for a number that is
/// missing or not positive.
Machine machine_of(const std::string& name, const std::string& asked = "machine");

}  // namespace tessera::planning
TESSERA_API_END
