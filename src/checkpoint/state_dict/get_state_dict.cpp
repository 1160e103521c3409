// State dicts of a model or an optimizer: shards, or whole tensors, on all ranks or gathered on
// rank 0 block by block.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <functional>
#include <span>

#include "all_ranks.h"
#include "blocks/blocks.h"
#include "blocks/gather_blocks.h"
#include "parameters/parameters.h"
#include "state_dict/state_items.h"
#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

using Items = std::function<std::vector<StateItem>()>;

/// On rank 0; an undefined tensor on the others.
at::Tensor gather_on_rank0(const at::Tensor& tensor, comm::World& world) {
  at::Tensor whole;
  if (world.rank() == 0) {
    whole = at::empty(tensor.sizes(), at::device(at::kCPU).dtype(tensor.scalar_type()));
  }
  gather_blocks(tensor, tensor.scalar_type(), *all_ranks(world),
                c10::Device(world.options().device).type(),
                [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
                  block_at(whole, offset, block.sizes()).copy_(block);
                });
  return whole;
}

at::Tensor value_of(const at::Tensor& tensor, comm::World& world, const StateDictOptions& options) {
  const bool distributed = tessera::is_distributed(tensor);
  if (options.full_state_dict && options.cpu_offload) {
    return gather_on_rank0(tensor, world);
  }
  if (options.full_state_dict) {
    return distributed ? DistributedTensor(tensor).full_tensor() : tensor;
  }
  if (!options.cpu_offload) {
    return tensor;
  }
  const at::Tensor host = local_tensor(tensor).detach().to(at::kCPU, /*non_blocking=*/false,
                                                           /*copy=*/true);
  return distributed ? make_distributed(host, sharding_spec(tensor), tensor.sizes().vec()) : host;
}

TensorDict get_state_dict(comm::World& world, const StateDictOptions& options,
                          const Items& items_of) {
  const at::NoGradGuard no_grad;
  std::vector<StateItem> items;
  run_or_fail_on_all(world, [&] {
    TESSERA_CHECK(!options.broadcast_from_rank0,
                  "broadcast_from_rank0 says how a state dict is set: leave it out to get one");
    items = items_of();
    std::erase_if(items, [](const StateItem& item) { return item.is_left_out; });
    for (const StateItem& item : items) {
      check_one_value(*item.slot, item.names.front());
      TESSERA_CHECK(item.slot->initialized() || !(options.full_state_dict || options.cpu_offload),
                    "parameter '", item.names.front(),
                    "' was never filled: call nn::init_weights() or load before its values are "
                    "asked for");
    }
  });
  TensorDict dict;
  try {
    for (const StateItem& item : items) {
      const at::Tensor value = value_of(item.tensor, world, options);
      for (const std::string& name : item.names) {
        if (value.defined()) {
          dict.emplace(name, value);
        }
      }
    }
  } catch (...) {
    world.abort();  // the others wait for this rank's blocks
    throw;
  }
  return dict;
}

}  // namespace

TensorDict get_model_state_dict(comm::World& world, const nn::ModuleBase& model,
                                const StateDictOptions& options) {
  const comm::CallerScope caller("get_model_state_dict");
  return get_state_dict(world, options, [&] { return model_items(model, options); });
}

TensorDict get_optimizer_state_dict(comm::World& world, const nn::ModuleBase& model,
                                    const NamedTensors& named_state,
                                    const StateDictOptions& options) {
  const comm::CallerScope caller("get_optimizer_state_dict");
  return get_state_dict(world, options,
                        [&] { return optimizer_items(model, named_state, options); });
}

}  // namespace tessera::checkpoint
