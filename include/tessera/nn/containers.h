#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A list of modules with FQNs "0", "1", ... It has no forward. Like torch.nn.ModuleList.
class ModuleList : public ModuleBase {
 public:
  ModuleList() = default;
  template <class M>
  std::shared_ptr<M> push_back(std::shared_ptr<M> module) {
    modules_.push_back(module);
    return register_module(std::to_string(modules_.size() - 1), std::move(module));
  }
  std::size_t size() const { return modules_.size(); }
  const std::vector<std::shared_ptr<ModuleBase>>& items() const { return modules_; }
  /// The module at `index`, cast to M. Throws Error if the index is out of range or the module is
  /// not an M.
  template <class M>
  std::shared_ptr<M> at(std::size_t index) const {
    TESSERA_CHECK(index < size(), "module ", index, " of a ModuleList of ", size(),
                  " was asked for");
    auto module = std::dynamic_pointer_cast<M>(modules_[index]);
    TESSERA_CHECK(module, "module ", index, " of a ModuleList is a ", modules_[index]->name(),
                  ", not of the type asked for");
    return module;
  }

 private:
  std::vector<std::shared_ptr<ModuleBase>> modules_;
};

/// Runs modules one after another. Each module maps a tensor to a tensor. The FQNs are "0", "1",
/// ...
class Sequential : public Module<Sequential> {
 public:
  Sequential() = default;
  template <class... Modules>
  explicit Sequential(std::shared_ptr<Modules>... modules) {
    (push_back(std::move(modules)), ...);
  }
  template <class M>
  std::shared_ptr<M> push_back(std::shared_ptr<M> module) {
    steps_.push_back([m = module.get()](const at::Tensor& x) -> at::Tensor { return (*m)(x); });
    return register_module(std::to_string(steps_.size() - 1), std::move(module));
  }
  at::Tensor forward(at::Tensor x) {
    check_called();
    for (const auto& step : steps_) {
      x = step(x);
    }
    return x;
  }

 private:
  std::vector<std::function<at::Tensor(const at::Tensor&)>> steps_;
};

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
