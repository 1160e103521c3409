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
  /// Whether a module that is registered at several places is visited once for each of its FQNs;
  /// otherwise only once, with the first FQN.
  bool every_place = false;
  /// Whether children are visited before their parent.
  bool children_first = false;
  /// A function that is called for a module before the children of the module. If the function
  /// returns true, the module and all modules below it are skipped. An empty function skips no
  /// module.
  std::function<bool(const torch::nn::Module& module)> skip{};
};

namespace detail {

using ModuleVisitor = std::function<void(const std::string& fqn, torch::nn::Module& module)>;
void walk_modules(torch::nn::Module& root, const ModuleVisitor& visit, const ModuleWalk& walk);

}  // namespace detail

/// Calls visit(fqn, module) for `root` (FQN "") and for every module below it, depth first, in
/// order of registration. Visits each module once, and parents before children, unless `walk` says
/// otherwise.
///
///   nn::visit_modules(model, [](const std::string& fqn, nn::ModuleBase& module) { ... });
///   nn::visit_modules(model, [](const std::string& fqn, torch::nn::Module& module) { ... });
///
/// A visitor that takes a ModuleBase is not called for modules of libtorch, which have neither
/// slots nor hooks, but is called for the ModuleBase objects below them. The visitor must not
/// register modules. Not collective. Several threads may visit one tree. Throws the exceptions of
/// the visitor.
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

/// Like the other visit_modules(), for a const tree.
template <class Visit>
void visit_modules(const torch::nn::Module& root, const Visit& visit, const ModuleWalk& walk = {}) {
  // The cast is safe, because libtorch returns the children of a const module as mutable modules
  // anyway.
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
