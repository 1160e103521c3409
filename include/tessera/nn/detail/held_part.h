#pragma once

#include <memory>
#include <unordered_map>

#include "tessera/export.h"
#include "tessera/internals/detail/tensor_identity.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A module inside of one that nn::Hooked holds: its parameters in slots, under libtorch's names.
/// What holds it calls the module itself, so that hooks of this one never run. Not called, and not
/// copied.
class HeldPart final : public ModuleBase {
 public:
  class Maker;
  HeldPart(std::shared_ptr<torch::nn::Module> module, Maker& maker);

 private:
  std::shared_ptr<torch::nn::Module> module_;  ///< the slots are bound to its members
};

/// What is at several places in a held module is there once.
class HeldPart::Maker {
 public:
  /// Makes slots of the parameters that libtorch's `module` has itself, and parts of `holder` of
  /// the modules in it. Parameters of classes that are not libtorch's are left out.
  void fill(ModuleBase& holder, torch::nn::Module& module);

 private:
  std::shared_ptr<ModuleBase> part_of(const std::shared_ptr<torch::nn::Module>& module);

  std::unordered_map<const torch::nn::Module*, std::shared_ptr<ModuleBase>> parts_;
  std::unordered_map<tessera::detail::TensorIdentity, SlotPtr> slots_;
};

}  // namespace tessera::nn
TESSERA_API_END
