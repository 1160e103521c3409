// The shards of a group in memory. Before the first forward, and after a conversion or a load, they
// are moved into one flat buffer, which the all-gather sends without a copy. The tensors that
// optimizers hold stay the same objects: only the memory under them changes.

#include "parameter_group/parameter_group_shards.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::fsdp {
namespace {

FlatBufferLayout layout_of(const std::vector<ShardedParameter>& parameters, const DataMesh& mesh,
                           const MixedPrecisionPolicy& policy) {
  std::vector<ShardShape> shapes;
  for (const ShardedParameter& parameter : parameters) {
    shapes.push_back(parameter.shape());
  }
  // One type and one home for all: unit_spec.cpp groups parameters so.
  const ShardedParameter& first = parameters.front();
  return {shapes, first.dtype(), policy, first.home(), mesh.device()};
}

}  // namespace

ParameterGroupShards::ParameterGroupShards(std::vector<ShardedParameter> parameters,
                                           const DataMesh& mesh, const MixedPrecisionPolicy& policy)
    : parameters_(std::move(parameters)),
      mesh_(mesh),
      policy_(policy),
      layout_(layout_of(parameters_, mesh_, policy_)) {}

bool ParameterGroupShards::adopt() {
  bool changed = false;
  for (ShardedParameter& parameter : parameters_) {
    changed |= parameter.adopt();
  }
  return changed;
}

/// By addresses: model.to(dtype), a load or an optimizer may have replaced memory under a tensor.
bool ParameterGroupShards::laid_out() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& unsharded = parameters_[i].unsharded();
    // Never laid out.
    if (!unsharded.defined()) {
      return false;
    }
    const at::Tensor& shard = parameters_[i].shard();
    const at::Tensor place = layout_.shares_memory() ? local_tensor(unsharded)
                             : layout_.has_flat()
                                 ? shard_of(flat_, layout_.segments()[i], mesh_.shard.local_rank())
                                 : shard;
    // An empty shard has no address to compare.
    if (shard.numel() > 0 && shard.const_data_ptr() != place.const_data_ptr()) {
      return false;
    }
  }
  return true;
}

void ParameterGroupShards::lay_out() {
  check_devices();
  check_types();
  layout_ = layout_of(parameters_, mesh_, policy_);
  if (!layout_.has_flat()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  // Zeros: padding is sent, and must be the same on every run.
  flat_ = at::zeros({flat_numel(layout_.segments())},
                    parameters_.front().shard().options().pinned_memory(layout_.home().pinned));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor place = shard_of(flat_, layout_.segments()[i], mesh_.shard.local_rank());
    // The old memory is freed with its last user: the model needs one group's shards twice, for a
    // moment.
    place.copy_(parameters_[i].shard());
    tessera::detail::move_onto(parameters_[i].shard(), place.storage(), place.storage_offset());
  }
}

std::uint64_t ParameterGroupShards::versions() const {
  std::uint64_t sum = 0;
  for (const ShardedParameter& parameter : parameters_) {
    // Counters only grow, so that equal sums mean that none has moved.
    sum += parameter.version();
  }
  return sum;
}

void ParameterGroupShards::begin_use() {
  std::ranges::for_each(parameters_, &ShardedParameter::begin_use);
}

std::string ParameterGroupShards::lost_write() const {
  // There the unsharded tensors are the shards themselves.
  if (layout_.shares_memory()) {
    return "";
  }
  const auto written = std::ranges::find_if(parameters_, &ShardedParameter::written_in_use);
  return written == parameters_.end() ? "" : written->name();
}

bool ParameterGroupShards::any_replaced() const {
  return std::ranges::any_of(parameters_, &ShardedParameter::is_replaced);
}

void ParameterGroupShards::check_devices() const {
  // Lists all of them: usually more than one is not filled.
  std::string meta;
  for (const ShardedParameter& parameter : parameters_) {
    // On a mesh of shapes alone (comm::meta_world) nothing needs values.
    if (parameter.device().is_meta() && !layout_.home().device.is_meta()) {
      meta += (meta.empty() ? "'" : ", '") + parameter.name() + "'";
    }
  }
  TESSERA_CHECK(meta.empty(), "forward of a sharded module, but its parameters ", meta,
                " are still on the meta device; call nn::to_empty and fill them first");
  const ShardHome& home = layout_.home();
  for (const ShardedParameter& parameter : parameters_) {
    TESSERA_CHECK(parameter.device() == home.device,
                  "forward of a sharded module, but the shard of parameter '", parameter.name(),
                  "' is on ", parameter.device(), " instead of ", home.device,
                  "; create it there, for example by nn::to_empty, or change the offload_policy");
  }
}

void ParameterGroupShards::check_types() const {
  const ShardedParameter& first = parameters_.front();
  for (const ShardedParameter& parameter : parameters_) {
    TESSERA_CHECK(parameter.dtype() == first.dtype(),
                  "forward of a sharded module, but parameter '", parameter.name(), "' is ",
                  parameter.dtype(), " and '", first.name(), "' ", first.dtype(),
                  ", which were of one type when they were sharded; convert both, or before "
                  "fully_shard");
  }
}

}  // namespace tessera::fsdp
