// The one walk over module trees. Everything that looks for parameters, units or patterns goes
// through it, so that shared modules and the order of visits mean the same everywhere: collectives
// that are made for each module rely on that order.

#include "tessera/nn/visit_modules.h"

#include <unordered_set>

namespace tessera::nn {
namespace {

/// One walk. Recursive: module trees are some ten levels deep.
class Walker {
 public:
  Walker(const detail::ModuleVisitor& visit, const ModuleWalk& walk) : visit_(visit), walk_(walk) {}

  void enter(torch::nn::Module& module, const std::string& fqn) {
    // With all below it.
    if (walk_.skip && walk_.skip(module)) {
      return;
    }
    // A shared module once, by the first FQN that leads to it.
    if (!walk_.every_place && !seen_.insert(&module).second) {
      return;
    }
    if (!walk_.children_first) {
      visit_(fqn, module);
    }
    for (const auto& child : module.named_children()) {
      enter(*child.value(), join_fqn(fqn, child.key()));
    }
    if (walk_.children_first) {
      visit_(fqn, module);
    }
  }

 private:
  // Both belong to the caller of walk_modules(), which outlives the walk.
  const detail::ModuleVisitor& visit_;
  const ModuleWalk& walk_;
  std::unordered_set<const torch::nn::Module*> seen_;
};

}  // namespace

void detail::walk_modules(torch::nn::Module& root, const ModuleVisitor& visit,
                          const ModuleWalk& walk) {
  Walker(visit, walk).enter(root, "");
}

std::string join_fqn(const std::string& parent, const std::string& name) {
  // The root's FQN is empty, and its children's have no dot in front.
  return parent.empty() ? name : parent + "." + name;
}

}  // namespace tessera::nn
