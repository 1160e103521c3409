#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/random.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// While a MetaDevice exists, this thread creates parameters, and tensors without a given device,
/// on the meta device: sizes without storage. Scopes can nest. Like torch.device("meta").
class MetaDevice : tessera::detail::NoCopy {
  tessera::detail::MetaFactoryGuard factories_;
};

/// A function that writes the initial values of a plain or distributed tensor. Random numbers must
/// depend only on `key` and an element's global index, as in tessera/dtensor/random.h.
using Initializer = std::function<void(const at::Tensor& tensor, RandomKey key)>;
/// Pairs of a pattern for a parameter's FQN (see matches_fqn) and an initialiser. The first pattern
/// that matches determines the initialiser of a parameter.
using Initializers = std::vector<std::pair<std::string, Initializer>>;

namespace init {
/// Returns an initialiser that sets every element to `value`.
Initializer constant(double value);
/// Returns an initialiser that sets every element to 0.
Initializer zeros();
/// Returns an initialiser that sets every element to 1.
Initializer ones();
/// Returns an initialiser that draws random numbers, uniform on [from, to).
Initializer uniform(double from, double to);
/// Returns an initialiser that draws from a normal distribution.
Initializer normal(double mean, double std);
/// Returns an initialiser that draws from a normal distribution, truncated to [low, high]. The
/// bounds are values, not multiples of std, as in torch.nn.init.
Initializer trunc_normal(double mean, double std, double low = -2.0, double high = 2.0);

}  // namespace init

/// The argument of reset_parameters(), which fills each parameter once, by fill(). Random numbers
/// depend on the parameter's FQN, not on the mesh or the order of calls.
class InitContext {
 public:
  /// Fills a parameter in or below the module being initialised. Skips a parameter that a parent
  /// module has already filled. Throws Error for other parameters, and for a parameter without
  /// storage.
  void fill(const Parameter& parameter, const Initializer& initializer) const;
  void fill(const SlotPtr& slot, const Initializer& initializer) const;
  /// Fills the parameters in and below `module` whose FQNs match `table`, except LoRA adapters.
  /// `module`: the module being initialised. Throws Error for a pattern without a match.
  void fill(const ModuleBase& module, const Initializers& table) const;
  /// Sets a buffer to `values`, copied to the buffer's device.
  void set_buffer(const Parameter& buffer, const at::Tensor& values) const;
  /// Returns the random key of the module being initialised, for example for dropout.
  RandomKey key() const;

 private:
  friend struct InitRun;
  friend class Dropout;
  bool buffers_only() const;
  InitContext(struct InitRun& run, std::string fqn) : run_(run), fqn_(std::move(fqn)) {}
  struct InitRun& run_;
  std::string fqn_;
};

/// Allocates storage on `device` for all meta parameters and buffers in and below `module`. The
/// values are undefined; layouts and requires_grad do not change. Not collective. Throws Error for
/// a meta buffer of torch's register_buffer (use register_buffer_slot).
void to_empty(ModuleBase& module, c10::Device device);
/// Calls reset_parameters() of `module` and the modules below, parents first. Initial values depend
/// on `seed` and FQNs, and are bit-equal on every mesh. Not collective. Throws Error for a
/// parameter or buffer that no module fills.
void init_weights(ModuleBase& module, std::uint64_t seed);
/// Like init_weights(), but fills only the parameters and persistent buffers that are still
/// uninitialized, for example the adapters (apply_lora) of a loaded model.
void init_unfilled(ModuleBase& module, std::uint64_t seed);
/// Computes buffers like init_weights(), for a model whose parameters were loaded. Changes neither
/// parameters, nor initialized persistent buffers, nor the key and call counter of an nn::Dropout.
/// Not collective.
void init_buffers(ModuleBase& module, std::uint64_t seed = 0);

}  // namespace tessera::nn
TESSERA_API_END
