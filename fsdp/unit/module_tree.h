#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// The modules below a root that are in no unit yet (or all of them), by FQN.
class ModuleTree {
 public:
  using Modules = std::unordered_set<const nn::ModuleBase*>;
  struct Node {
    std::string fqn;  ///< the first that leads to the module
    nn::ModuleBase* module;
    std::vector<std::size_t> children;  ///< the nearest ModuleBases below that were not met before
    std::vector<std::string> paths;     ///< all its FQNs: one for each place it is registered at

    /// Whether each of `inner`, FQNs, is below this module or is it.
    bool holds(const std::vector<std::string>& inner) const;
  };

  /// `skip_units`: leaves out modules that are units, with what is below them, save for those in
  /// `kept`.
  ModuleTree(const nn::ModuleBase& root, bool skip_units, const Modules& kept = {});

  /// Children before their parents; the root is the last.
  const std::vector<Node>& nodes() const { return nodes_; }
  /// nullptr if there is none.
  const Node* find(const std::string& fqn) const;
  /// nullptr if it is not in this tree.
  const Node* find(const nn::ModuleBase* module) const;

 private:
  void add(const std::string& fqn, nn::ModuleBase& module);

  std::vector<Node> nodes_;
  std::unordered_map<const nn::ModuleBase*, std::size_t> index_;
  std::vector<std::size_t> parentless_;  ///< while it is made: nodes whose parent is still to come
};

}  // namespace tessera::fsdp
