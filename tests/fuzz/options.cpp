// What the options of a case are to the library.

#include "fuzz/options.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::fuzz {
namespace {

/// Shards the stacked weights of experts, and has no hooks: the operators know the rest.
class ExpertsParallel final : public tensor_parallel::ParallelStyle {
 public:
  explicit ExpertsParallel(bool whole_experts) : whole_experts_(whole_experts) {}

  std::string name() const override { return "experts_parallel"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    // (experts, in, out): what is between the two is split.
    return {{module.slot("up"), Shard{whole_experts_ ? 0 : 2}},
            {module.slot("down"), Shard{whole_experts_ ? 0 : 1}}};
  }
  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}

 private:
  bool whole_experts_;
};

}  // namespace

tensor_parallel::StylePtr make_style(const StyleSpec& s) {
  using namespace tensor_parallel;
  switch (s.kind) {
    case StyleKind::kColwise:
      return colwise_parallel({.output_layouts = s.output, .use_local_output = s.local});
    case StyleKind::kRowwise:
      return rowwise_parallel(
          {.input_layouts = s.takes_part ? std::optional<Placement>(Shard{-1}) : std::nullopt,
           .output_layouts = s.output,
           .use_local_output = s.local});
    case StyleKind::kSequence:
      return sequence_parallel({.sequence_dim = s.dim, .use_local_output = s.local});
    case StyleKind::kReplicate:
      return replicate_parallel({.use_local_output = s.local});
    case StyleKind::kPrepareInput:
      return prepare_module_input({.input_layouts = {Replicate{}},
                                   .desired_input_layouts = {s.output},
                                   .use_local_output = s.local});
    case StyleKind::kPrepareOutput:
      return prepare_module_output({.output_layouts = {Replicate{}},
                                    .desired_output_layouts = {s.output},
                                    .use_local_output = s.local});
    case StyleKind::kFusedColwise:
      return fused_colwise_parallel({.parts = s.parts, .use_local_output = s.local});
    case StyleKind::kExperts:
      return std::make_shared<ExpertsParallel>(s.dim == 0);
  }
  return nullptr;
}

DeviceMesh make_mesh(const MeshSpec& spec, const testing::Rank& rank) {
  std::vector<std::int64_t> sizes{spec.data};
  std::vector<std::string> names{"dp"};
  if (spec.replicas > 1) {
    sizes.insert(sizes.begin(), spec.replicas);
    names.insert(names.begin(), "replicas");
  }
  sizes.insert(spec.tensor_first ? sizes.begin() : sizes.end(), spec.tensor);
  names.insert(spec.tensor_first ? names.begin() : names.end(), "tp");
  return rank.mesh(sizes, names);
}

DeviceMesh data_mesh(const MeshSpec& spec, const DeviceMesh& mesh) {
  return spec.replicas > 1 ? mesh[{"replicas", "dp"}] : mesh["dp"];
}

fsdp::Options fsdp_options(const FsdpSpec& spec) {
  fsdp::Options options;
  if (spec.reshard != Reshard::kDefault) {
    options.reshard_after_forward = spec.reshard == Reshard::kAlways;
  }
  if (spec.offload) {
    options.offload_policy = fsdp::OffloadPolicy{};
  }
  options.post_forward_mesh_size = spec.post_forward;
  options.may_be_unused = spec.may_be_unused;
  if (spec.placement == ShardPlacement::kLast) {
    options.shard_placement = [](const std::string&, const at::Tensor& parameter) {
      return std::optional<Placement>(Shard{parameter.dim() - 1});
    };
  } else if (spec.placement == ShardPlacement::kReplicateVectors) {
    options.shard_placement = [](const std::string&, const at::Tensor& parameter) {
      return parameter.dim() == 1 ? std::optional<Placement>(Replicate{}) : std::nullopt;
    };
  }
  return options;
}

}  // namespace tessera::fuzz
