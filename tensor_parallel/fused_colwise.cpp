// Column-wise parallelism of several weights in one. Contiguous shards of its rows would be pieces
// of single parts; here every rank has a shard of each part.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gathered_input.h"
#include "tessera/core/error.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/style_helpers.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

/// Shards each part's output features. Results are distributed like the rows of the weight.
class FusedColwise final : public ParallelStyle {
 public:
  explicit FusedColwise(FusedColwiseOptions options) : options_(options) {}

  std::string name() const override { return "fused_colwise_parallel"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    const Placement rows = placement_of(module, 0);
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.slots()) {
      placements.emplace_back(slot, rows);
    }
    place_adapter(module, Replicate{}, rows, placements);
    return placements;
  }

  void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    const auto* fused = dynamic_cast<const nn::FusedLinear*>(&module);
    TESSERA_CHECK(fused == nullptr || fused->groups() == 1 || fused->groups() % mesh.size() == 0,
                  name(), ": ", fused->groups(),
                  " groups of a FusedLinear cannot be shared out to ", mesh.size(),
                  " ranks; take a tensor-parallel size that divides them");
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    set_regathered_product(module, options_.regather);
    add_gathering_hook(module, mesh, options_.input_layouts, options_.regather);
    module.add_forward_hook([this_style = *this](nn::ModuleBase& self, nn::TensorList outputs) {
      const Placement columns = this_style.placement_of(self, outputs[0]->dim() - 1);
      *outputs[0] = prepare_output(*outputs[0], columns, this_style.options_.use_local_output);
    });
  }

 private:
  /// The placement on dimension `dim`, that of the output features. Groups are split contiguously.
  Placement placement_of(const nn::ModuleBase& module, std::int64_t dim) const {
    const std::int64_t parts = parts_of(module);
    return parts > 1 ? Placement(StridedShard{dim, parts}) : Shard{dim};
  }

  std::int64_t parts_of(const nn::ModuleBase& module) const {
    if (const auto* fused = dynamic_cast<const nn::FusedLinear*>(&module)) {
      return parts_of_fused(*fused);
    }
    const auto* linear = dynamic_cast<const nn::Linear*>(&module);
    if (linear == nullptr) {
      fail_unfit(*this, module, "nn::FusedLinear and nn::Linear");
    }
    TESSERA_CHECK(options_.parts > 0 && linear->out_features() % options_.parts == 0, name(),
                  ": the ", linear->out_features(), " output features of an nn::Linear are not ",
                  options_.parts,
                  " equal parts; pass parts = 3 for a query, key and value of equal "
                  "sizes, 2 for gate and up, or use an nn::FusedLinear, which knows its parts");
    return options_.parts;
  }

  std::int64_t parts_of_fused(const nn::FusedLinear& fused) const {
    TESSERA_CHECK(options_.parts == 0, name(), ": an nn::FusedLinear knows its parts; leave out ",
                  "parts = ", options_.parts);
    if (fused.groups() > 1) {
      return 1;
    }
    for (const nn::FusedPart& part : fused.parts()) {
      TESSERA_CHECK(part.out_features == fused.parts().front().out_features, name(), ": parts '",
                    fused.parts().front().name, "' and '", part.name, "' of a FusedLinear have ",
                    fused.parts().front().out_features, " and ", part.out_features,
                    " features; pass groups = the number of key and value heads");
    }
    return static_cast<std::int64_t>(fused.parts().size());
  }

  FusedColwiseOptions options_;
};

}  // namespace

StylePtr fused_colwise_parallel(FusedColwiseOptions options) {
  return std::make_shared<FusedColwise>(options);
}

}  // namespace tessera::tensor_parallel
