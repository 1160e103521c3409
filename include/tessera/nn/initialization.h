#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/random.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Writes the initial values of a tensor, plain or distributed. Random numbers must depend on `key`
/// and the element's index in the global tensor alone, as those of tessera/dtensor/random.h do.
using Initializer = std::function<void(const at::Tensor& tensor, RandomKey key)>;
/// Pattern of a parameter's FQN (see matches_fqn) and its initialiser; the first match counts.
using Initializers = std::vector<std::pair<std::string, Initializer>>;

namespace init {
/// Every element is `value`.
Initializer constant(double value);
/// Every element is 0.
Initializer zeros();
/// Every element is 1.
Initializer ones();
/// Uniform in [from, to).
Initializer uniform(double from, double to);
/// Normal, of the given mean and standard deviation.
Initializer normal(double mean, double std);
/// Normal, truncated to [low, high], which are values and not multiples of std, as in
/// torch.nn.init.
Initializer trunc_normal(double mean, double std, double low = -2.0, double high = 2.0);
}  // namespace init

/// The argument of reset_parameters(), which fills parameters with it. Each parameter is filled
/// once. Its random stream is the hash of its FQN, so that values depend neither on the mesh nor on
/// the order. The parts of a FusedLinear have the values of separate parameters.
class InitContext {
 public:
  /// Fills a parameter of the module being initialised or of one below it, unless a module above
  /// has filled it. Throws Error for any other parameter, and for one without storage.
  void fill(const Parameter& parameter, const Initializer& initializer) const;
  void fill(const SlotPtr& slot, const Initializer& initializer) const;
  /// Fills those parameters of `module`, the module being initialised, and of the modules below it
  /// that the table matches, adapters excepted (apply_lora). Throws Error for a pattern that
  /// matches none.
  void fill(const ModuleBase& module, const Initializers& table) const;
  /// Sets a buffer to `values`, moved to the buffer's device.
  void set_buffer(const Parameter& buffer, const at::Tensor& values) const;
  /// A key for this module alone, for random numbers other than parameters' values (dropout).
  RandomKey key() const;
  /// FQN of the module being initialised; "" for the outermost.
  const std::string& fqn() const { return fqn_; }

 private:
  friend struct InitRun;
  InitContext(struct InitRun& run, std::string fqn) : run_(run), fqn_(std::move(fqn)) {}
  struct InitRun& run_;
  std::string fqn_;
};

/// Gives every parameter and buffer of `module` and below that is on the meta device uninitialised
/// storage on `device`; layout and requires_grad stay. Not collective. Throws Error for a buffer on
/// the meta device that was made by torch's register_buffer (use register_buffer_slot).
void to_empty(ModuleBase& module, c10::Device device);
/// Calls reset_parameters() of `module` and every module below, parents first. The random numbers
/// of a parameter depend on `seed` and its FQN: the values are bit-equal on every mesh. Not
/// collective. Throws Error if a parameter or buffer is left that no module filled.
void init_weights(ModuleBase& module, std::uint64_t seed);
/// The same, but leaves alone parameters and persistent buffers that have values: for what a load
/// has not filled, such as adapters (apply_lora) of a model that was loaded.
void init_unfilled(ModuleBase& module, std::uint64_t seed);
/// Makes buffers as init_weights does, and leaves alone parameters and the persistent buffers that
/// have been filled: for a model whose parameters are loaded. Not collective.
void init_buffers(ModuleBase& module, std::uint64_t seed = 0);
/// Marks a slot as filled by a load.
void mark_initialized(const SlotPtr& slot);

}  // namespace tessera::nn
TESSERA_API_END
