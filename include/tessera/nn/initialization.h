#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/random.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// Writes the initial values of a tensor, plain or distributed. Draws random ones with `key` only.
using Initializer = std::function<void(const at::Tensor& tensor, RandomKey key)>;
/// Pattern of a FQN (see matches_fqn) -> initialiser; the first match counts.
using Initializers = std::vector<std::pair<std::string, Initializer>>;

namespace init {
Initializer constant(double value);
Initializer zeros();
Initializer ones();
Initializer uniform(double from, double to);
Initializer normal(double mean, double std);
/// Normal cut to [low, high] (absolute values, as in torch.nn.init).
Initializer trunc_normal(double mean, double std, double low = -2.0, double high = 2.0);
}  // namespace init

/// What a module needs to initialise itself: fills each parameter once, with a random stream that
/// is the hash of the parameter's FQN, so that the values do not depend on mesh or order.
class InitContext {
 public:
  /// Fills a parameter or buffer of the module being initialised, or one below it, unless a module
  /// further up has.
  void fill(const Parameter& parameter, const Initializer& initializer) const;
  void fill(const SlotPtr& slot, const Initializer& initializer) const;
  /// Fills what the table matches among the parameters of `module`, the module being initialised,
  /// and of those below it. Throws Error for a pattern that matches none.
  void fill(const ModuleBase& module, const Initializers& table) const;
  /// Gives a buffer its values (moved to the buffer's device).
  void set_buffer(const Parameter& buffer, const at::Tensor& values) const;
  /// For random numbers other than a parameter's first values (dropout): of this module alone.
  RandomKey key() const;
  /// FQN of the module being initialised; "" for the outermost.
  const std::string& fqn() const { return fqn_; }

 private:
  friend struct InitRun;
  InitContext(struct InitRun& run, std::string fqn) : run_(run), fqn_(std::move(fqn)) {}
  struct InitRun& run_;
  std::string fqn_;
};

/// Gives every meta parameter and buffer below `module` real, uninitialised storage on `device`,
/// keeping layout and requires_grad. Not collective. Throws Error for a buffer on the meta device
/// that was made by torch's register_buffer (use register_buffer_slot).
void to_empty(ModuleBase& module, c10::Device device);
/// Calls reset_parameters() of every module below, parents first, each parameter filled once, with
/// random streams keyed by `seed` and the parameter's FQN: bit-equal on every mesh. Not collective.
/// Throws Error if something is left that nobody filled.
void init_weights(ModuleBase& module, std::uint64_t seed);
/// Re-makes buffers as init_weights does and leaves parameters alone: for a model whose parameters
/// are loaded.
void init_buffers(ModuleBase& module, std::uint64_t seed = 0);
/// Throws Error naming the first parameters or buffers whose storage nobody has filled.
void check_initialized(const ModuleBase& module);
/// After a load has filled a slot.
void mark_initialized(const SlotPtr& slot);

}  // namespace tessera::nn
