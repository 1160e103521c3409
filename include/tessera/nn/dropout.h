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
/// has the sizes, type and layout of x, and so has the gradient, under the same mask. Outside of
/// training, or for p = 0, it is x itself, and the call is not counted.
///
/// The mask is a function of the module's key (set by init_weights or set_key; else made of its
/// name at its first call), the number of calls so far and the element's index in the global
/// tensor, so it is the same on every mesh, and another in each module. In a forward that
/// fully_shard has taken, the global tensor is that of all data-parallel ranks, which compare their
/// rows when it begins; else nothing is communicated (docs/random.md). One thread at a time: calls
/// are counted.
class Dropout : public Module<Dropout> {
 public:
  /// Throws Error unless 0 <= p < 1.
  explicit Dropout(double p = 0.5);
  /// Throws Error for an x that is a pending sum (Partial), for a plain x whose part of the global
  /// tensor is unknown, and if this module has neither key nor name, since it was called in
  /// another's forward without being registered in any module.
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

  /// nullopt if no key was set and the module has not been called yet.
  const std::optional<RandomKey>& key() const { return key_; }
  void set_key(RandomKey key) { key_ = key; }
  /// The number of calls so far, which selects the next mask. Set it back to repeat a call;
  /// activation checkpointing does so by itself.
  std::uint64_t calls() const { return calls_; }
  void set_calls(std::uint64_t calls) { calls_ = calls; }

 private:
  double p_;
  std::optional<RandomKey> key_;
  std::uint64_t calls_ = 0;
};

}  // namespace tessera::nn
TESSERA_API_END
