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

/// While a MetaDevice object exists, this thread creates new parameters on the meta device: sizes
/// and types without storage. Factory functions that are called without a device also create
/// tensors on the meta device. Scopes can nest. Like torch.device("meta").
class MetaDevice : tessera::detail::NoCopy {
  tessera::detail::MetaFactoryGuard factories_;
};

/// A function that writes the initial values of a plain or distributed tensor. Random numbers must
/// depend only on `key` and on the index of an element in the global tensor. The functions of
/// tessera/dtensor/random.h draw such numbers.
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

/// The argument of reset_parameters(). reset_parameters() fills parameters by InitContext::fill().
/// Each parameter is filled once. The random numbers of a parameter depend on the parameter's FQN,
/// and depend neither on the mesh nor on the order of the calls. The parts of a FusedLinear get the
/// same values as separate parameters.
class InitContext {
 public:
  /// Fills a parameter of the module being initialised, or of a module below it, unless a parent
  /// module has already filled the parameter. Throws Error for any other parameter, and for a
  /// parameter without storage.
  void fill(const Parameter& parameter, const Initializer& initializer) const;
  void fill(const SlotPtr& slot, const Initializer& initializer) const;
  /// Fills all parameters in and below `module` that match a pattern of `table`, except adapters
  /// (apply_lora). `module` is the module being initialised. Throws Error for a pattern that
  /// matches no parameter.
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

/// Allocates uninitialised storage on `device` for every parameter and buffer on the meta device,
/// in `module` and in the modules below. Layout and requires_grad are unchanged. Not collective.
/// Throws Error for a buffer on the meta device that was made by torch's register_buffer (use
/// register_buffer_slot).
void to_empty(ModuleBase& module, c10::Device device);
/// Calls reset_parameters() of `module` and of every module below, parents first. A parameter's
/// random numbers depend on `seed` and the parameter's FQN: the values are bit-equal on every mesh.
/// Not collective. Throws Error for a parameter or buffer that no module fills.
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
