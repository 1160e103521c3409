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

/// A module's own parameters and buffers (not those of child modules). Each element is a name, and
/// a function that returns the class member that stores the tensor of this name.
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

/// Reserves a libtorch module for one wrapper, until the returned pointer is destroyed. Throws
/// Error if another wrapper has reserved the module, because both wrappers would shard the
/// parameters of the module independently.
std::shared_ptr<const void> claim_module(const torch::nn::Module& module);

/// Fills the parameters and buffers of `module` (not of its children) like reset_parameters() of
/// libtorch. Does nothing for classes that are not libtorch's. `holder` is the Tessera module that
/// wraps `module`; the values are written to the ParameterSlots of `holder`.
void reset_adopted(const torch::nn::Module& module, const ModuleBase& holder,
                   const InitContext& init);

}  // namespace detail

/// Wraps a libtorch module that is inside an adopted model (nn::adopt, nn::Hooked). An
/// AdoptedModule has the ParameterSlots of the wrapped module. The hooks of an AdoptedModule never
/// run, because libtorch calls the wrapped module directly.
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

  /// Registers ParameterSlots in `holder` for the parameters and buffers of `module`, and child
  /// modules for the modules inside `module`. Throws Error if no class member is known for a
  /// parameter, or for a buffer on the meta device. `fqn`: the FQN of `module`, for messages.
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
