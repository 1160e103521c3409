#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options that determine how visit_modules() walks a tree of modules.
struct ModuleWalk {
  /// Visits a module that is registered at several places at each of them, under each of its FQNs,
  /// instead of only at the first.
  bool every_place = false;
  /// Visits children before their parent instead of after it.
  bool children_first = false;
  /// Skips the modules for which this returns true, and all modules below them. Called for a module
  /// before its children. Empty: skips nothing.
  std::function<bool(const torch::nn::Module& module)> skip{};
};

namespace detail {

using ModuleVisitor = std::function<void(const std::string& fqn, torch::nn::Module& module)>;
void walk_modules(torch::nn::Module& root, const ModuleVisitor& visit, const ModuleWalk& walk);

}  // namespace detail

/// The FQN of a child `name` of the module `parent`: "layers.0" and "mlp" make "layers.0.mlp".
std::string join_fqn(const std::string& parent, const std::string& name);

/// Calls visit(fqn, module) for `root` (FQN "") and for every module below it, depth first, in
/// order of registration, each once and parents first unless `walk` says otherwise.
///
///   nn::visit_modules(model, [](const std::string& fqn, nn::ModuleBase& module) { ... });
///   nn::visit_modules(model, [](const std::string& fqn, torch::nn::Module& module) { ... });
///
/// A visitor that takes a ModuleBase is not called for stock torch::nn modules, which have neither
/// slots nor hooks, but is called for the ModuleBase objects below them. The visitor must not
/// register modules. Not collective. Thread safety: as for reading the tree. Exceptions of the
/// visitor pass through.
template <class Visit>
void visit_modules(torch::nn::Module& root, const Visit& visit, const ModuleWalk& walk = {}) {
  if constexpr (std::is_invocable_v<const Visit&, const std::string&, torch::nn::Module&>) {
    detail::walk_modules(root, visit, walk);
  } else {
    const auto visit_base = [&visit](const std::string& fqn, torch::nn::Module& module) {
      if (auto* base = dynamic_cast<ModuleBase*>(&module)) {
        visit(fqn, *base);
      }
    };
    detail::walk_modules(root, visit_base, walk);
  }
}

/// visit_modules() for a const tree.
template <class Visit>
void visit_modules(const torch::nn::Module& root, const Visit& visit, const ModuleWalk& walk = {}) {
  // libtorch returns the children of a const module as mutable modules.
  auto& mutable_root = const_cast<torch::nn::Module&>(root);
  if constexpr (std::is_invocable_v<const Visit&, const std::string&, const torch::nn::Module&>) {
    visit_modules(
        mutable_root,
        [&visit](const std::string& fqn, torch::nn::Module& module) {
          visit(fqn, std::as_const(module));
        },
        walk);
  } else {
    visit_modules(
        mutable_root,
        [&visit](const std::string& fqn, ModuleBase& module) { visit(fqn, std::as_const(module)); },
        walk);
  }
}

}  // namespace tessera::nn
TESSERA_API_END
