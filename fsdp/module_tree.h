#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// The modules below a root that are in no unit yet (or all of them), by FQN.
class ModuleTree {
 public:
  struct Node {
    std::string fqn;
    nn::ModuleBase* module;
    std::vector<std::size_t> children;  ///< the nearest ModuleBases below
  };

  /// `skip_units`: leaves out modules that are units, with what is below them.
  ModuleTree(const nn::ModuleBase& root, bool skip_units);

  /// Children before their parents; the root is the last.
  const std::vector<Node>& nodes() const { return nodes_; }
  /// nullptr if there is none.
  const Node* find(const std::string& fqn) const;
  /// The FQN of a module, or nullptr if it is not in this tree.
  const std::string* fqn_of(const nn::ModuleBase* module) const;

 private:
  void add(torch::nn::Module& module, const std::string& fqn, bool skip_units,
           std::vector<std::size_t>& siblings);

  std::vector<Node> nodes_;
  std::unordered_map<const nn::ModuleBase*, std::size_t> index_;
};

/// Whether the module called `outer` is the one called `inner`, or holds it.
bool holds(const std::string& outer, const std::string& inner);

}  // namespace tessera::fsdp
