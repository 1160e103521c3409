// Copies of a model's shards: a second model for evaluation, an average of weights. Shard by shard,
// so that nothing is communicated; both modules must therefore be sharded alike.

#include "tessera/fsdp/parameter_copy.h"

#include <c10/core/GradMode.h>

#include <unordered_map>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "unit/attached_units.h"
#include "unit/unit.h"

namespace tessera::fsdp {
namespace {

bool laid_out_alike(const at::Tensor& a, const at::Tensor& b) {
  if (tessera::is_distributed(a) != tessera::is_distributed(b) || a.sizes() != b.sizes()) {
    return false;
  }
  return !tessera::is_distributed(a) ||
         // Layouts are interned, so that equal ones are one object. The ranks are compared instead
         // of the meshes: two meshes of the same ranks hold the same shards.
         (sharding_spec(a).layout == sharding_spec(b).layout &&
          sharding_spec(a).mesh.ranks() == sharding_spec(b).mesh.ranks());
}

struct Pair {
  nn::SlotPtr from;
  nn::SlotPtr to;
};

/// Parameter by parameter, checked.
std::vector<Pair> pairs(const nn::ModuleBase& from, const nn::ModuleBase& to, const char* asked) {
  std::unordered_map<std::string, nn::SlotPtr> sources;
  for (const auto& [name, slot] : from.named_slots()) {
    sources.emplace(name, slot);
  }
  std::vector<Pair> result;
  for (const auto& [name, slot] : to.named_slots()) {
    const auto source = sources.find(name);
    TESSERA_CHECK(source != sources.end(), asked, ": there is no parameter '", name,
                  "' to copy from; pass two modules of one class");
    // The shards, also while something is gathered.
    const at::Tensor& tensor = source->second->persistent();
    TESSERA_CHECK(laid_out_alike(tensor, slot->persistent()), asked, ": parameter '", name,
                  "' of sizes ", tensor.sizes(), " is not laid out as the one of sizes ",
                  slot->persistent().sizes(),
                  " that it is copied to; apply TP and FSDP to both modules in the same way");
    result.push_back({source->second, slot});
  }
  return result;
}

/// Calls `write(to, from)` with the local shards.
template <class Write>
void write_pairs(const std::vector<Pair>& pairs, Write&& write) {
  const c10::AutoGradMode no_grad(false);
  for (const Pair& pair : pairs) {
    write(local_tensor(pair.to->persistent()), local_tensor(pair.from->persistent()));
    // A copy of nothing is not initialised either.
    pair.to->set_initialized(pair.from->initialized());
  }
}

void reshard_all(const nn::ModuleBase& module) {
  for (const std::shared_ptr<Unit>& unit : units_of(module, true)) {
    unit->reshard();
  }
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> clone_parameters(const nn::ModuleBase& module) {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::pair<std::string, at::Tensor>> copies;
  for (const auto& [name, slot] : module.named_slots()) {
    const at::Tensor& tensor = slot->persistent();
    // A copy in separate memory: a shard is a view of its group's flat buffer.
    const at::Tensor local = local_tensor(tensor).clone(at::MemoryFormat::Contiguous);
    copies.emplace_back(name,
                        tessera::is_distributed(tensor)
                            ? make_distributed(local, sharding_spec(tensor), tensor.sizes().vec())
                            : local);
  }
  return copies;
}

void copy_parameters(const nn::ModuleBase& from, nn::ModuleBase& to) {
  write_pairs(pairs(from, to, "copy_parameters"),
              [](const at::Tensor& target, const at::Tensor& source) { target.copy_(source); });
  // What is gathered has the old values.
  reshard_all(to);
}

void average_parameters(nn::ModuleBase& average, const nn::ModuleBase& module, double decay) {
  TESSERA_CHECK(decay >= 0 && decay <= 1, "average_parameters: a decay of ", decay,
                " is outside [0, 1]");
  write_pairs(pairs(module, average, "average_parameters"),
              [&](const at::Tensor& target, const at::Tensor& source) {
                if (target.is_floating_point()) {
                  // In the average's type, which may be wider than the model's.
                  target.lerp_(source.to(target.options()), 1 - decay);
                } else {
                  target.copy_(source);
                }
              });
  reshard_all(average);
}

}  // namespace tessera::fsdp
