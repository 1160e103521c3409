#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// A module with a weight and a bias whose forward can leave out the bias, for a hook to add.
class DeferredBias {
 public:
  /// For row-wise tensor parallelism. With a weight sharded over its inputs the result is a pending
  /// sum, and the bias must be added once, after the reduction. Not collective; every rank must set
  /// the same.
  void set_defer_bias(bool defer) { defer_bias_ = defer; }

 protected:
  bool leaves_out_bias() const { return defer_bias_; }

 private:
  bool defer_bias_ = false;
};

}  // namespace tessera::nn::detail
TESSERA_API_END
