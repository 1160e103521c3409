// Column-wise parallelism of fewer heads than ranks. Autograd and the dispatcher see a sharded
// weight with a copy of its head for each rank. Each shard is a slice of the replicated parameter,
// so the parameter's gradient is one term of a sum over the ranks. PendingGradients or FSDP sums
// these terms with those of the norms.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gathered_input.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/lora.h"
#include "tessera/tensor_parallel/style_helpers.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

/// Makes (ranks * rows of a head, ...) with Shard(0) from `parameter`, replicated, with the rows of
/// `heads` heads.
at::Tensor copy_for_each_rank(const at::Tensor& parameter, const DeviceMesh& mesh,
                              std::int64_t heads) {
  const DistributedTensor replicated(parameter);
  const std::int64_t rows = parameter.size(0) / heads;
  const std::int64_t head = mesh.local_rank() / (mesh.size() / heads);
  const at::Tensor own = replicated.to_local(Placements{Partial{}}).narrow(0, head * rows, rows);
  std::vector<std::int64_t> sizes = parameter.sizes().vec();
  sizes.front() = mesh.size() * rows;
  return DistributedTensor::from_local(own, mesh, {Shard{0}}, std::move(sizes)).tensor();
}

/// Each rank computes one head of a Linear, which other ranks may compute as well.
class ReplicatedHeads final : public ParallelStyle {
 public:
  explicit ReplicatedHeads(ReplicatedHeadsOptions options) : options_(options) {}

  std::string name() const override { return "replicated_heads_parallel"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    const auto* linear = dynamic_cast<const nn::Linear*>(&module);
    if (linear == nullptr || dynamic_cast<const nn::FusedLinear*>(&module) != nullptr) {
      fail_unfit(*this, module, "nn::Linear");
    }
    TESSERA_CHECK(options_.heads > 0 && linear->out_features() % options_.heads == 0, name(),
                  ": the ", linear->out_features(), " output features of an nn::Linear are not ",
                  options_.heads, " heads of equal size; pass the number of key-value heads");
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.slots()) {
      placements.emplace_back(slot, Replicate{});
    }
    place_adapter(module, Replicate{}, Replicate{}, placements);
    return placements;
  }

  void check(const nn::ModuleBase&, const DeviceMesh& mesh) const override {
    TESSERA_CHECK(mesh.size() % options_.heads == 0, name(), ": ", options_.heads,
                  " heads cannot be shared out to ", mesh.size(),
                  " ranks, one to each; take a tensor-parallel size that is a multiple of ",
                  options_.heads, ", or one that divides it with colwise_parallel()");
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    compute_one_head(dynamic_cast<nn::Linear&>(module), mesh);
    if (const auto lora = module.attached<nn::LoraBranch>()) {
      compute_one_head(*lora->b, mesh);
    }
    add_gathering_hook(module, mesh, options_.input_layouts, options_.regather);
    module.add_forward_hook([options = options_](auto&, nn::TensorList outputs) {
      *outputs[0] = prepare_output(*outputs[0], Shard{-1}, options.use_local_output);
    });
  }

 private:
  void compute_one_head(nn::Linear& linear, const DeviceMesh& mesh) const {
    linear.set_product([mesh, heads = options_.heads, product = regathered_product(linear)](
                           const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
      return product(x, copy_for_each_rank(weight, mesh, heads),
                     bias.defined() ? copy_for_each_rank(bias, mesh, heads) : at::Tensor());
    });
  }

  ReplicatedHeadsOptions options_;
};

}  // namespace

StylePtr replicated_heads_parallel(ReplicatedHeadsOptions options) {
  return std::make_shared<ReplicatedHeads>(options);
}

}  // namespace tessera::tensor_parallel
