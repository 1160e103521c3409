#include "plan_matching.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include "tessera/core/error.h"

namespace tessera::tensor_parallel {
namespace {

struct Candidate {
  std::string fqn;
  torch::nn::Module* module = nullptr;
};

std::vector<std::string> split_at_dots(const std::string& pattern) {
  std::vector<std::string> components;
  for (std::size_t begin = 0; begin <= pattern.size();) {
    const std::size_t end = std::min(pattern.find('.', begin), pattern.size());
    components.push_back(pattern.substr(begin, end - begin));
    begin = end + 1;
  }
  return components;
}

std::string child_fqn(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : parent + "." + name;
}

std::vector<Candidate> matching_children(const std::vector<Candidate>& parents,
                                         const std::string& component) {
  std::vector<Candidate> matches;
  for (const Candidate& parent : parents) {
    for (const auto& child : parent.module->named_children()) {
      if (fnmatch(component.c_str(), child.key().c_str(), 0) == 0) {
        matches.push_back({child_fqn(parent.fqn, child.key()), child.value().get()});
      }
    }
  }
  return matches;
}

[[noreturn]] void fail_unmatched(const std::string& pattern, const std::string& component,
                                 const std::vector<Candidate>& parents) {
  const Candidate& parent = parents.front();
  fail("parallelize_module: the pattern '", pattern, "' matches no module: '", component,
       "' is none of the children of ",
       parent.fqn.empty() ? std::string("the root") : "'" + parent.fqn + "'", ", which are [",
       fmt::format("{}", fmt::join(parent.module->named_children().keys(), ", ")),
       "]; correct or remove this entry of the plan");
}

NamedModule with_hooks(const Candidate& candidate) {
  auto* module = dynamic_cast<nn::ModuleBase*>(candidate.module);
  TESSERA_CHECK(module != nullptr, "parallelize_module: '", candidate.fqn, "' is a ",
                candidate.module->name(),
                ", which runs no hooks; use the module of tessera::nn or hold it in nn::Hooked");
  return {candidate.fqn, module};
}

}  // namespace

std::vector<NamedModule> match_modules(nn::ModuleBase& root, const std::string& pattern) {
  if (pattern.empty()) {
    return {{"", &root}};
  }
  std::vector<Candidate> level{{"", &root}};
  for (const std::string& component : split_at_dots(pattern)) {
    std::vector<Candidate> next = matching_children(level, component);
    if (next.empty()) {
      fail_unmatched(pattern, component, level);
    }
    level = std::move(next);
  }
  std::vector<NamedModule> matches;
  for (const Candidate& candidate : level) {
    matches.push_back(with_hooks(candidate));
  }
  return matches;
}

}  // namespace tessera::tensor_parallel
