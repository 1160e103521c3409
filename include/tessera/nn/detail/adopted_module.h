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

/// Names of a module's own parameters and buffers, and the members of its class with these tensors.
using ModuleMembers = std::vector<std::pair<std::string, std::function<at::Tensor&()>>>;
/// Adds the members of a module of one class. Adds nothing for a module of another class.
using FindMembers = void (*)(torch::nn::Module& module, ModuleMembers& found);

/// A module with the parameters of a module of libtorch.
class AdoptsModule {
 public:
  virtual ~AdoptsModule() = default;
  virtual const torch::nn::Module& adopted_module() const = 0;
};

/// Claims a module for one owner, until the returned pointer is destroyed. Throws Error if another
/// owner has claimed it: both would shard its parameters separately.
std::shared_ptr<const void> claim_module(const torch::nn::Module& module);

/// Fills the own parameters and buffers of `module` with the initial values of libtorch's class.
/// `holder` has the slots. Does nothing for other classes.
void reset_adopted(const torch::nn::Module& module, const ModuleBase& holder,
                   const InitContext& init);

}  // namespace detail

/// A module inside an adopted one: its parameters in slots, under libtorch's names. The module
/// around it calls libtorch's module directly, so that hooks of this one never run.
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
  std::shared_ptr<torch::nn::Module> module_;  ///< the slots are bound to its members
};

/// A module at several places in the adopted one has one entry.
class AdoptedModule::Maker {
 public:
  /// `classes`: those that are not libtorch's.
  explicit Maker(std::vector<detail::FindMembers> classes) : classes_(std::move(classes)) {}

  /// Makes slots of the parameters and buffers that `module` has itself, and parts of `holder` of
  /// the modules in it. Throws Error for a parameter that no member is known of, and for a buffer
  /// of such a class on the meta device. `fqn`: of the module, for messages.
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
