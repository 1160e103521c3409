#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// A module with a weight and a bias. Its forward can leave out the bias so that a hook adds it
/// later.
class DeferredBias {
 public:
  /// Sets whether forward leaves out the bias, for row-wise tensor parallelism. If the weight is
  /// sharded over its inputs, forward's result is a pending sum (Partial), and the bias must be
  /// added once, after the reduction. Not collective; every rank must make an equal call.
  void set_defer_bias(bool defer) { defer_bias_ = defer; }

 protected:
  bool leaves_out_bias() const { return defer_bias_; }

 private:
  bool defer_bias_ = false;
};

}  // namespace tessera::nn::detail
TESSERA_API_END
