#include "tessera/dtensor/policy.h"

#include <torch/csrc/autograd/graph_task.h>

#include <cstdlib>
#include <string_view>

#include "implicit_count.h"

namespace tessera {
namespace {

bool strict_process() {
  const char* value = std::getenv("TESSERA_STRICT");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

bool& strict_here() {
  static const bool everywhere = strict_process();
  thread_local bool strict = everywhere;
  return strict;
}

thread_local bool replicate_here = false;
thread_local std::int64_t implicit_count = 0;

}  // namespace

StrictScope::StrictScope(bool strict) : outer_(strict_here()) {
  strict_here() = strict;
}
StrictScope::~StrictScope() {
  strict_here() = outer_;
}
bool is_strict() {
  return strict_here();
}

ReplicationScope::ReplicationScope(bool replicate) : outer_(replicate_here) {
  replicate_here = replicate;
}
ReplicationScope::~ReplicationScope() {
  replicate_here = outer_;
}

bool plain_tensors_are_replicated() {
  return replicate_here || torch::autograd::get_current_graph_task_id() != -1;
}

std::int64_t implicit_redistributions() {
  return implicit_count;
}
void detail::count_implicit_redistribution() {
  ++implicit_count;
}

}  // namespace tessera
