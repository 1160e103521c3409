#include "module_tree.h"

#include <algorithm>
#include <utility>

#include "unit.h"

namespace tessera::fsdp {
namespace {

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
  const auto skip = [skip_units, &kept](const nn::ModuleBase& module) {
    return skip_units && module.attached<Unit>() != nullptr && !kept.contains(&module);
  };
  std::vector<std::size_t> roots;
  // Units are made of the modules found here; reading the tree changes none.
  add(const_cast<nn::ModuleBase&>(root), "", skip, roots);
}

void ModuleTree::add(torch::nn::Module& module, const std::string& fqn, const Skip& skip,
                     std::vector<std::size_t>& siblings) {
  auto* ours = dynamic_cast<nn::ModuleBase*>(&module);
  if (ours != nullptr && skip(*ours)) {
    return;
  }
  std::vector<std::size_t> children;
  for (const auto& child : module.named_children()) {
    add(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key(), skip, children);
  }
  if (ours == nullptr) {
    siblings.insert(siblings.end(), children.begin(), children.end());
    return;
  }
  const auto [known, is_new] = index_.emplace(ours, nodes_.size());
  if (!is_new) {
    nodes_[known->second].paths.push_back(fqn);
    return;
  }
  siblings.push_back(nodes_.size());
  nodes_.push_back({fqn, ours, std::move(children), {fqn}});
}

const ModuleTree::Node* ModuleTree::find(const std::string& fqn) const {
  const auto found = std::ranges::find(nodes_, fqn, &Node::fqn);
  return found == nodes_.end() ? nullptr : &*found;
}

const ModuleTree::Node* ModuleTree::find(const nn::ModuleBase* module) const {
  const auto found = index_.find(module);
  return found == index_.end() ? nullptr : &nodes_[found->second];
}

const std::string* ModuleTree::fqn_of(const nn::ModuleBase* module) const {
  const Node* node = find(module);
  return node == nullptr ? nullptr : &node->fqn;
}

}  // namespace tessera::fsdp
