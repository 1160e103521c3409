// A fused parameter and the tensors that files have in its place.

#include "known_model.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/nn/fused_linear.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::full_tensor;
using testing::TemporaryFolder;

/// An attention's projections in one.
class FusedNet : public nn::Module<FusedNet> {
 public:
  explicit FusedNet(std::int64_t groups) {
    qkv = register_module("qkv", std::make_shared<nn::FusedLinear>(
                                     3, std::vector<nn::FusedPart>{{"q", 8}, {"k", 4}, {"v", 4}},
                                     nn::FusedLinearOptions{.groups = groups}));
  }
  std::shared_ptr<nn::FusedLinear> qkv;
};

/// Another number for each element.
Tensors separate_values() {
  return {{"q.weight", at::arange(0, 24, at::kFloat).view({8, 3})},
          {"k.weight", at::arange(100, 112, at::kFloat).view({4, 3})},
          {"v.weight", at::arange(200, 212, at::kFloat).view({4, 3})},
          {"q.bias", at::arange(300, 308, at::kFloat)},
          {"k.bias", at::arange(400, 404, at::kFloat)},
          {"v.bias", at::arange(500, 504, at::kFloat)}};
}

/// The rows of the parts in turn, one group after another.
at::Tensor fused_value(const std::string& leaf, std::int64_t groups) {
  const Tensors values = separate_values();
  std::vector<at::Tensor> rows;
  for (std::int64_t group = 0; group < groups; ++group) {
    for (const char* part : {"q.", "k.", "v."}) {
      rows.push_back(values.at(part + leaf).chunk(groups)[static_cast<std::size_t>(group)]);
    }
  }
  return at::cat(rows);
}

/// Layouts of the weight and the bias on 2 × 2: rows as they lie, and of two digits.
std::vector<LayoutPtr> row_layouts() {
  return {Layout::intern({2, 2}, {{Digit{0, {0, 1}}}}), Layout::intern({2, 2}, {{Digit{0, {1}}}}),
          Layout::intern({2, 2}, {{Digit{2, {}}, Digit{8, {1, 0}}}})};
}

void distribute(FusedNet& net, const DeviceMesh& mesh, LayoutPtr rows) {
  for (const auto& [name, slot] : net.named_slots()) {
    Layout::Dims dims = rows->dims();
    dims.resize(static_cast<std::size_t>(slot->get().dim()));
    const at::Tensor whole =
        distribute_tensor(slot->get().detach(), mesh, {Replicate{}, Replicate{}});
    slot->set(DistributedTensor(whole)
                  .redistribute(Layout::intern({2, 2}, std::move(dims)))
                  .tensor()
                  .detach());
    slot->set_initialized(true);
  }
}

TEST(FusedWeights, AreLoadedFromTheirParts) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", separate_values());
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    for (const std::int64_t groups : {1, 2, 4}) {
      for (const LayoutPtr& rows : row_layouts()) {
        FusedNet net(groups);
        distribute(net, mesh, rows);
        load_hugging_face(net, folder.path());
        EXPECT_TRUE(at::equal(full_tensor(*net.qkv->weight), fused_value("weight", groups)));
        EXPECT_TRUE(at::equal(full_tensor(*net.qkv->bias), fused_value("bias", groups)));
      }
    }
  });
}

TEST(FusedWeights, AreSavedAsTheirParts) {
  for (const std::int64_t groups : {1, 2, 4}) {
    for (const LayoutPtr& rows : row_layouts()) {
      TemporaryFolder folder;
      RunRanks(4, [&](Rank& rank) {
        FusedNet net(groups);
        {
          const c10::NoGradGuard no_grad;
          net.qkv->weight->copy_(fused_value("weight", groups));
          net.qkv->bias->copy_(fused_value("bias", groups));
        }
        distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), rows);
        save_hugging_face(net, *rank.world(), folder.path(), "{}");
      });
      ExpectEqual(ReadModel(folder / "model.safetensors"), separate_values());
    }
  }
}

TEST(FusedWeights, AreRefusedWhereAPartIsMissingOrOfAnotherSize) {
  TemporaryFolder folder;
  Tensors values = separate_values();
  values.erase("k.weight");
  values["v.bias"] = at::zeros({5});
  WriteModel(folder / "model.safetensors", values);
  FusedNet net(2);
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "missing: k.weight",
               "different: v.bias (file [5], model [4])");
}

}  // namespace
}  // namespace tessera::checkpoint
