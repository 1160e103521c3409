#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// A GPU and its place in a cluster. The rates are those of data sheets; the shares say how much of
/// them a training step is assumed to reach.
struct Machine {
  std::string name;
  double memory_bytes = 0;           ///< of a device
  double reserved_bytes = 3e9;       ///< not for tensors: the context, NCCL's buffers
  double flops_half = 0;             ///< FLOP/s of matrix products in bf16 and fp16, dense
  double flops_fp32 = 0;             ///< in fp32, as libtorch computes them by default
  double product_share = 0.7;        ///< share of these that products reach
  double attention_share = 0.5;      ///< share of these that attention reaches
  double memory_bandwidth = 0;       ///< bytes a second
  double memory_share = 0.8;         ///< share of it that other operators reach
  double operator_latency_s = 2e-6;  ///< the least that an operator takes
  std::int64_t ranks_per_node = 8;
  double link_bandwidth = 0;         ///< bytes a second out of a device, to those of its node
  double network_bandwidth = 0;      ///< bytes a second out of a device, to other nodes
  double network_share = 0.8;        ///< share of both bandwidths that collectives reach
  double link_latency_s = 10e-6;     ///< of a collective within a node
  double network_latency_s = 30e-6;  ///< of a collective over nodes
  double flops_fp8 = 0;  ///< FLOP/s of products in 8 bits, dense; 0: the device has none

  /// Bytes that tensors can have of a device.
  std::int64_t room() const { return static_cast<std::int64_t>(memory_bytes - reserved_bytes); }
  /// FLOP/s of products of a type, by the data sheet; without a rate for 8 bits, that for 16 bits.
  double peak_flops(c10::ScalarType type) const;
};

/// The names that machine_of() knows.
std::vector<std::string> machine_names();
/// `name`: a known machine, or a TOML file with a Machine's fields by name, which may begin from a
/// known one: like = "h200". `asked`: its name in messages. Throws Error for another name, an
/// unknown key, or a number that is missing or not positive.
Machine machine_of(const std::string& name, const std::string& asked = "machine");

}  // namespace tessera::planning
TESSERA_API_END
