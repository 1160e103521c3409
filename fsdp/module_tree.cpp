#include "module_tree.h"

#include <algorithm>
#include <utility>

#include "unit.h"

namespace tessera::fsdp {

ModuleTree::ModuleTree(const nn::ModuleBase& root, bool skip_units) {
  std::vector<std::size_t> roots;
  // Units are made of the modules found here; reading the tree changes none.
  add(const_cast<nn::ModuleBase&>(root), "", skip_units, roots);
}

void ModuleTree::add(torch::nn::Module& module, const std::string& fqn, bool skip_units,
                     std::vector<std::size_t>& siblings) {
  auto* ours = dynamic_cast<nn::ModuleBase*>(&module);
  const bool is_unit = ours != nullptr && ours->attached<Unit>() != nullptr;
  if (ours != nullptr && ((skip_units && is_unit) || !index_.emplace(ours, 0).second)) {
    return;
  }
  std::vector<std::size_t> children;
  for (const auto& child : module.named_children()) {
    add(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key(), skip_units, children);
  }
  if (ours == nullptr) {
    siblings.insert(siblings.end(), children.begin(), children.end());
    return;
  }
  siblings.push_back(nodes_.size());
  index_[ours] = nodes_.size();
  nodes_.push_back({fqn, ours, std::move(children)});
}

const ModuleTree::Node* ModuleTree::find(const std::string& fqn) const {
  const auto found = std::ranges::find(nodes_, fqn, &Node::fqn);
  return found == nodes_.end() ? nullptr : &*found;
}

const std::string* ModuleTree::fqn_of(const nn::ModuleBase* module) const {
  const auto found = index_.find(module);
  return found == index_.end() ? nullptr : &nodes_[found->second].fqn;
}

bool holds(const std::string& outer, const std::string& inner) {
  return outer.empty() || inner == outer || inner.starts_with(outer + ".");
}

}  // namespace tessera::fsdp
