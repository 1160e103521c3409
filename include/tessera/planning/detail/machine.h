#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// A GPU and its cluster. Rates (FLOP/s, bytes per second) are data-sheet values. A `..._share` is
/// the fraction of a rate that training reaches. product_share, attention_share_64 and memory_share
/// were measured on one H200 (libtorch 2.11); the others are estimates.
struct Machine {
  std::string name;
  double memory_bytes = 0;      ///< memory of one device in bytes
  double reserved_bytes = 3e9;  ///< memory that tensors cannot use: CUDA context, NCCL buffers
  double flops_half = 0;        ///< FLOP/s of dense matrix products in bf16 and fp16
  /// FLOP/s of matrix products in fp32, in libtorch's default mode (without TF32).
  double flops_fp32 = 0;
  double product_share = 0.76;  ///< fraction of the peak FLOP/s that matrix products reach
  /// Fraction of the peak FLOP/s that attention reaches, with heads of more than 64 elements.
  double attention_share = 0.5;
  double attention_share_64 = 0.39;  ///< like attention_share, for heads of at most 64 elements
  double memory_bandwidth = 0;       ///< memory bandwidth, bytes per second
  /// Fraction of memory_bandwidth that operators without matrix products reach.
  double memory_share = 0.62;
  double operator_latency_s = 2e-6;  ///< the minimum time of an operator, in seconds
  std::int64_t ranks_per_node = 8;
  double link_bandwidth = 0;      ///< bytes per second between two devices of one machine
  double network_bandwidth = 0;   ///< bytes per second that a device sends to other machines
  double network_share = 0.8;     ///< fraction of link and network bandwidth that collectives reach
  double link_latency_s = 10e-6;  ///< seconds of latency of a collective within a machine
  double network_latency_s = 30e-6;  ///< seconds of latency of a collective over several machines
  double flops_fp8 = 0;              ///< FLOP/s of dense 8-bit matrix products; 0: unsupported
  /// Fraction of flops_fp8 that 8-bit products reach, fitted to two steps on one H200 (libtorch
  /// 2.11). The special value 0 means that 8-bit products are
  /// as fast as 16-bit products.
  double fp8_share = 0.45;
  double multiprocessors = 0;  ///< multiprocessors (SMs) of a device; 0: unknown
  /// Multiprocessors that a collective takes from matrix products and attention that run at the
  /// same time. The default is that of NCCL_MAX_CTAS=16 (docs/programs/launching.md).
  double collective_multiprocessors = 16;
  /// The source of the `..._share` values, for messages: a device and libtorch version, or a file.
  std::string shares_from = "one H200, libtorch 2.11";

  /// Returns the bytes of a device's memory that are available to tensors.
  std::int64_t room() const { return static_cast<std::int64_t>(memory_bytes - reserved_bytes); }
  /// Returns the data-sheet FLOP/s of matrix products in `type`. If flops_fp8 is 0, 8-bit matrix
  /// products have the 16-bit rate.
  double peak_flops(c10::ScalarType type) const;
  /// Returns the FLOP/s that matrix products in `type` are assumed to reach.
  double product_flops(c10::ScalarType type) const;
  /// Returns the FLOP/s that attention in `type` is assumed to reach, with heads of `head_size`
  /// elements.
  double attention_flops(c10::ScalarType type, std::int64_t head_size) const;
};

}  // namespace tessera::planning
TESSERA_API_END
