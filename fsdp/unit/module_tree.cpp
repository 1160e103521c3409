// The module tree as plans and labels need it: every module with all of its FQNs and its nearest
// children, read in one walk. A module may be registered at several places; the first FQN names it.

#include "unit/module_tree.h"

#include <algorithm>
#include <utility>

#include "tessera/nn/visit_modules.h"
#include "unit/unit.h"

namespace tessera::fsdp {
namespace {

/// Whether the module of FQN `outer` is on the way to that of `inner`, or is it. "" is the root.
bool leads_through(const std::string& outer, const std::string& inner) {
  return outer.empty() || inner == outer || inner.starts_with(outer + ".");
}

}  // namespace

bool ModuleTree::Node::holds(const std::vector<std::string>& inner) const {
  return std::ranges::all_of(inner, [this](const std::string& path) {
    return std::ranges::any_of(
        paths, [&path](const std::string& outer) { return leads_through(outer, path); });
  });
}

ModuleTree::ModuleTree(const nn::ModuleBase& root, bool skip_units, const Modules& kept) {
  const auto skip = [skip_units, &kept](const torch::nn::Module& module) {
    const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module);
    return skip_units && ours != nullptr && ours->attached<Unit>() != nullptr &&
           !kept.contains(ours);
  };
  // Units are made of the modules found here; reading the tree changes none.
  nn::visit_modules(const_cast<nn::ModuleBase&>(root),
                    [this](const std::string& fqn, nn::ModuleBase& module) { add(fqn, module); },
                    {.every_place = true, .children_first = true, .skip = skip});
  parentless_.clear();
}

void ModuleTree::add(const std::string& fqn, nn::ModuleBase& module) {
  // The nearest below, whatever stock modules are between: they are the last that came.
  // Children come first in the walk, so that all nodes below this one stand at the end.
  const auto first = std::ranges::find_if(
      parentless_, [&](std::size_t node) { return leads_through(fqn, nodes_[node].fqn); });
  std::vector<std::size_t> children(first, parentless_.end());
  parentless_.erase(first, parentless_.end());
  // A module that is registered twice is one node with two paths.
  const auto [known, is_new] = index_.emplace(&module, nodes_.size());
  if (!is_new) {
    nodes_[known->second].paths.push_back(fqn);
    return;
  }
  parentless_.push_back(nodes_.size());
  nodes_.push_back({fqn, &module, std::move(children), {fqn}});
}

const ModuleTree::Node* ModuleTree::find(const std::string& fqn) const {
  const auto found = std::ranges::find(nodes_, fqn, &Node::fqn);
  return found == nodes_.end() ? nullptr : &*found;
}

const ModuleTree::Node* ModuleTree::find(const nn::ModuleBase* module) const {
  const auto found = index_.find(module);
  return found == index_.end() ? nullptr : &nodes_[found->second];
}

}  // namespace tessera::fsdp
