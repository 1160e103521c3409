#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

namespace detail {

/// A module's own parameters and buffers: names, and functions that return the class member of each
/// tensor.
using ModuleMembers = std::vector<std::pair<std::string, std::function<at::Tensor&()>>>;
/// Appends the parameters and buffers of `module` to `found` if `module` has the class that the
/// function handles; otherwise does nothing.
using FindMembers = void (*)(torch::nn::Module& module, ModuleMembers& found);

/// Interface of a module that wraps a libtorch module and uses the libtorch module's parameters.
class AdoptsModule {
 public:
  virtual ~AdoptsModule() = default;
  virtual const torch::nn::Module& adopted_module() const = 0;
};

/// Reserves a libtorch module for one wrapper while the returned pointer exists. Throws Error if
/// another wrapper has reserved the module, because both wrappers would shard the module's
/// parameters.
std::shared_ptr<const void> claim_module(const torch::nn::Module& module);

/// Fills the parameters and buffers of `module` (not of its children) like libtorch's
/// reset_parameters(). Does nothing for classes outside of libtorch. `holder`: the Tessera wrapper,
/// whose ParameterSlots get the values.
void reset_adopted(const torch::nn::Module& module, const ModuleBase& holder,
                   const InitContext& init);

}  // namespace detail

/// Wraps a libtorch module inside an adopted model (nn::adopt, nn::Hooked). The wrapper has the
/// ParameterSlots of the module. The wrapper's hooks never run, because libtorch calls the module
/// directly.
class AdoptedModule final : public ModuleBase, public detail::AdoptsModule {
 public:
  class Maker;
  AdoptedModule(std::shared_ptr<torch::nn::Module> module, const std::string& fqn, Maker& maker);

  void reset_parameters(const InitContext& init) override {
    detail::reset_adopted(*module_, *this, init);
  }
  void train(bool on = true) override;
  bool is_training() const noexcept override { return module_->is_training(); }
  const torch::nn::Module& adopted_module() const override { return *module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;  ///< the wrapped libtorch module
};

/// Builds the AdoptedModule objects. A module that is registered several times gets a single
/// AdoptedModule.
class AdoptedModule::Maker {
 public:
  /// `classes`: functions that find the parameters and buffers of module classes that are not
  /// libtorch's.
  explicit Maker(std::vector<detail::FindMembers> classes) : classes_(std::move(classes)) {}

  /// Registers ParameterSlots for the tensors of `module`, and child modules for its children, in
  /// `holder`. Throws Error for a parameter, or a buffer on the meta device, without a known class
  /// member. `fqn`: FQN of `module`, for messages.
  void fill(ModuleBase& holder, torch::nn::Module& module, const std::string& fqn = "");

 private:
  detail::ModuleMembers tensors_of(torch::nn::Module& module) const;
  void add_parameters(ModuleBase& holder, torch::nn::Module& module, const std::string& fqn);
  void add_buffers(ModuleBase& holder, torch::nn::Module& module, const std::string& fqn);
  std::shared_ptr<ModuleBase> part_of(const std::shared_ptr<torch::nn::Module>& module,
                                      const std::string& fqn);

  std::vector<detail::FindMembers> classes_;
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<ModuleBase>> parts_;
  std::unordered_map<tessera::detail::TensorIdentity, SlotPtr> slots_;
};

}  // namespace tessera::nn
TESSERA_API_END
