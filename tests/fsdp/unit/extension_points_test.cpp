// The examples in the headers of FSDP's extension points, as they are written there.

#include <any>
#include <optional>

#include "fsdp/training/training.h"
#include "tessera/fsdp/collectives.h"
#include "tessera/fsdp/forward_method.h"
#include "tessera/fsdp/wrap_policy.h"

namespace tessera {
namespace {

using testing::SmallModel;

/// The gradients are those of one process within `tolerance`, with these options, and after `act`
/// on the sharded model.
void expect_gradients(const fsdp::Options& options, const std::function<void(SmallModel&)>& act,
                      double tolerance = 1e-6) {
  const std::vector<at::Tensor> expected = testing::gradients_alone();
  RunRanks(2, [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh({2}, {"dp"}), options);
    act(model);
    testing::local_loss(model, rank).backward();
    std::size_t i = 0;
    for (const at::Tensor& gradient : testing::take_gradients(model)) {
      EXPECT_TRUE(gradient.allclose(expected[i], 1e-4, tolerance)) << i;
      ++i;
    }
  });
}

TEST(ExtensionPoints, AnAllGatherExtension) {
  fsdp::Options options;
  options.all_gather_extension = [](const std::string& name, const at::Tensor&) {
    return name.ends_with("weight")
               ? std::optional(fsdp::AllGatherExtension{
                     .pre_all_gather = [](const at::Tensor& shard) -> fsdp::EncodedShard {
                       return {.tensors = {shard.to(at::kBFloat16)}};
                     },
                     .post_all_gather = [](const std::vector<at::Tensor>& tensors,
                                           const std::any&) { return tensors[0]; }})
               : std::nullopt;
  };
  expect_gradients(options, [](SmallModel&) {}, /*tolerance=*/2e-2);
}

TEST(ExtensionPoints, CustomCollectives) {
  expect_gradients({}, [](SmallModel& module) {
    SmallModel* model = &module;
    fsdp::set_custom_all_gather(
        *model, [](comm::Communicator& group, const at::Tensor& output, const at::Tensor& input) {
          return group.all_gather(output, input);
        });
    fsdp::set_custom_reduce_scatter(
        *model, [](comm::Communicator& group, const at::Tensor& output, const at::Tensor& input) {
          return group.reduce_scatter(output, input, ReduceOp::kSum);
        });
  });
}

TEST(ExtensionPoints, AnAllocatorAndAHook) {
  expect_gradients({}, [](SmallModel& module) {
    SmallModel* model = &module;
    fsdp::set_custom_all_gather(
        *model, {}, [](comm::Communicator&, std::int64_t numel, const c10::TensorOptions& options) {
          return at::empty({numel}, options);
        });
    fsdp::set_all_reduce_hook(*model, [](const at::Tensor& gradients) { gradients.clamp_(-1, 1); });
  });
}

TEST(ExtensionPoints, APolicy) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    testing::Filled<SmallModel> plain(testing::kDim, testing::kHidden, testing::kClasses);
    SmallModel* model = &plain;

    const fsdp::Policy policy =
        [](const fsdp::Candidate& candidate) -> std::optional<fsdp::UnitOptions> {
      if (!candidate.fqn.starts_with("block") || candidate.numel < 100) {
        return std::nullopt;
      }
      return fsdp::UnitOptions{.reshard_after_forward = true};
    };
    fsdp::apply_plan(*model, mesh, fsdp::plan_units(*model, policy));

    EXPECT_TRUE(fsdp::is_fully_sharded(*model->blocks[0]));
    EXPECT_FALSE(fsdp::is_fully_sharded(*model->blocks[0]->up));
    testing::local_loss(*model, rank).backward();
    testing::expect_gradients(*model, testing::gradients_alone());
  });
}

TEST(ExtensionPoints, PlacementsAndMeshes) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    testing::Filled<SmallModel> plain(testing::kDim, testing::kHidden, testing::kClasses);
    SmallModel* model = &plain;

    fsdp::Options options;
    options.shard_placement = [](const std::string& name, const at::Tensor& parameter) {
      return name.ends_with("bias") ? std::optional<Placement>(Replicate{})
                                    : std::optional<Placement>(Shard{parameter.dim() - 1});
    };
    options.parameter_mesh = [mesh](const std::string& name, const at::Tensor&) {
      return name.starts_with("head") ? std::optional(mesh) : std::nullopt;
    };
    fsdp::fully_shard(*model, mesh, options);

    testing::local_loss(*model, rank).backward();
    testing::expect_gradients(*model, testing::gradients_alone());
  });
}

}  // namespace
}  // namespace tessera
