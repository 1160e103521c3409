#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A child module that is constructed and registered in its declaration:
///
///   struct Block : nn::Module<Block> {
///     at::Tensor forward(const at::Tensor& x) { return x + mlp(norm(x)); }
///     nn::Child<nn::RMSNorm> norm{*this, "norm", 512};
///     nn::Child<nn::GeluMlp> mlp{*this, "mlp", options};
///   };
///
/// Equivalent to `register_module(name, std::make_shared<M>(args...))` in the parent's constructor:
/// The FQNs equal those of register_module. Children are registered in the order of their
/// declarations.
template <class M>
class Child {
 public:
  /// Constructs the module from `args`. Throws c10::Error if the parent already has a child of the
  /// given name.
  template <class... Args>
  Child(ModuleBase& parent, const std::string& name, Args&&... args)
      : module_(parent.register_module(name, std::make_shared<M>(std::forward<Args>(args)...))) {}

  /// Calls the child module, including its hooks.
  template <class... Args>
  auto operator()(Args&&... args) const {
    return (*module_)(std::forward<Args>(args)...);
  }
  M* operator->() const { return module_.get(); }
  M& operator*() const { return *module_; }

 private:
  std::shared_ptr<M> module_;
};

}  // namespace tessera::nn
TESSERA_API_END
