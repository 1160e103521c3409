#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "tessera/dtensor/random.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// In training, zeroes each element with probability p and scales the others by 1/(1-p). The result
/// has the sizes, type and layout of x. The gradient uses the mask of the forward. Outside of
/// training, or for p = 0, the result is x itself, and the call is not counted.
///
/// The mask depends on the module's key, the number of calls so far and the element's index in the
/// global tensor. The mask is therefore the same on every mesh, and different in each module.
/// init_weights or set_key sets the key; otherwise the first call derives it from the module's
/// name. In the forward of a model with fully_shard, the global tensor includes the rows of all
/// data-parallel ranks, which compare their row counts when the forward begins; otherwise nothing
/// is communicated (docs/random.md). Thread safety: one thread at a time, because calls are
/// counted.
class Dropout : public Module<Dropout> {
 public:
  /// Throws Error unless 0 <= p < 1.
  explicit Dropout(double p = 0.5);
  /// Throws Error if x is a pending sum (Partial), and if x is plain and its part of the global
  /// tensor is unknown. Also throws if this module has neither a key nor a name: this happens if it
  /// is called in another module's forward but is not registered in any module.
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

  /// The module's random key; nullopt if no key was set and the module has not been called yet.
  const std::optional<RandomKey>& key() const { return key_; }
  void set_key(RandomKey key) { key_ = key; }
  /// The number of calls so far, which selects the next mask. To repeat a call, reset the number;
  /// activation checkpointing does so automatically.
  std::uint64_t calls() const { return calls_; }
  void set_calls(std::uint64_t calls) { calls_ = calls; }

 private:
  double p_;
  std::optional<RandomKey> key_;
  std::uint64_t calls_ = 0;
};

}  // namespace tessera::nn
TESSERA_API_END
