// In a model with only some modules sharded, each rank has its own gradients of the others, and the
// ranks would drift apart.
#include "norm/plain_gradients.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/module.h"

namespace tessera::optim {
namespace {

/// Attached to modules whose gradients were compared.
struct Compared {};

bool is_new(const nn::ParameterSlot& slot) {
  return slot.owners().empty() || slot.owners().front().module->attached<Compared>() == nullptr;
}

void note_compared(const nn::ParameterSlot& slot) {
  if (is_new(slot) && !slot.owners().empty()) {
    slot.owners().front().module->attach(std::make_shared<Compared>());
  }
}

bool is_plain(const nn::ParameterSlot& slot) {
  const at::Tensor& parameter = slot.persistent();
  return !tessera::is_distributed(parameter) && parameter.requires_grad() && !parameter.is_meta() &&
         !slot.distinct_along();
}

}  // namespace

/// All ranks have the same plain parameters, with gradients or without.
void check_plain_gradients(const std::vector<nn::SlotPtr>& parameters, const DeviceMesh& joint,
                           const at::Tensor& norm) {
  if (!joint || joint.size() == 1) {
    return;
  }
  std::vector<nn::SlotPtr> plain;
  std::ranges::copy_if(parameters, std::back_inserter(plain),
                       [](const nn::SlotPtr& slot) { return is_plain(*slot) && is_new(*slot); });
  if (plain.empty() || !std::isfinite(norm.item<double>())) {
    return;
  }
  std::vector<detail::Replica> gradients;
  for (const nn::SlotPtr& slot : plain) {
    gradients.push_back(
        {detail::concat("the gradient of ", nn::describe(*slot)), slot->persistent().grad()});
  }
  detail::check_replicas(
      detail::peers_of(joint), gradients, detail::Equality::kRounded,
      detail::concat("a norm of gradients on ", to_string(joint)),
      "it is plain, and nobody sums it over the ranks: give its module to fsdp::fully_shard, "
      "fsdp::replicate or parallelize_module, sum it by hand before, or, where each rank has "
      "another (experts), say so with ParameterSlot::set_distinct_along()");
  for (const nn::SlotPtr& slot : plain) {
    note_compared(*slot);
  }
}

}  // namespace tessera::optim
