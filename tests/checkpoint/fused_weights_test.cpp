// A fused parameter and the tensors that files have in its place.

#include "known_model.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/linear.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::full_tensor;
using testing::TemporaryFolder;

/// An attention's projections in one.
class FusedNet : public nn::Module<FusedNet> {
 public:
  explicit FusedNet(std::int64_t groups, bool bias = true) {
    qkv = register_module("qkv", std::make_shared<nn::FusedLinear>(
                                     3, std::vector<nn::FusedPart>{{"q", 8}, {"k", 4}, {"v", 4}},
                                     nn::FusedLinearOptions{.bias = bias, .groups = groups}));
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

/// The projections apart, without biases.
class Apart : public nn::Module<Apart> {
 public:
  Apart() {
    for (const auto& [name, rows] : {std::pair{"q", 8}, {"k", 4}, {"v", 4}}) {
      register_module(name, std::make_shared<nn::Linear>(3, rows, nn::LinearOptions{false}));
    }
  }
};

TEST(FusedCheckpoint, StoresParametersByTheirParts) {
  const TemporaryFolder dir;
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor rows = at::arange(48, at::kFloat).view({16, 3});
    const auto make = [&](const at::Tensor& values) {
      auto net = std::make_unique<FusedNet>(2, /*bias=*/false);
      net->qkv->slot("weight")->set(distribute_tensor(values, mesh, {Shard{0}}));
      return net;
    };
    const auto saved = make(rows);
    const at::Tensor& weight = saved->qkv->slot("weight")->persistent();
    const NamedTensors optimizer = {{"qkv.weight.exp_avg", weight.detach()},
                                    {"qkv.weight.step", at::full({}, 3.0F)}};
    save(*rank.world(), dir.path(), 1, {*saved, optimizer});
    const auto loaded = make(at::zeros_like(rows));
    const NamedTensors into = {
        {"qkv.weight.exp_avg",
         make(at::zeros_like(rows))->qkv->slot("weight")->persistent().detach()},
        {"qkv.weight.step", at::zeros({})}};
    load(*rank.world(), dir.path(), {*loaded, into});
    for (const at::Tensor& tensor : {loaded->qkv->slot("weight")->persistent(), into[0].second}) {
      EXPECT_TRUE(at::equal(full_tensor(tensor), rows));
    }
    EXPECT_EQ(into[1].second.item<float>(), 3.0F);
    Apart apart;
    load(*rank.world(), dir.path(), {apart}, {.exclude = {"optimizer.**"}});
    EXPECT_TRUE(at::equal(LocalValues(apart).at("k.weight"),
                          at::cat({rows.narrow(0, 4, 2), rows.narrow(0, 12, 2)})));
  });
}

TEST(FusedCheckpoint, CountsAParameterAsFilledOnceAllPartsAre) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    FusedNet saved(2, /*bias=*/false);
    saved.qkv->slot("weight")->set(at::ones({16, 3}));
    save(*rank.world(), dir.path(), 1, {saved});
    FusedNet loaded(2, /*bias=*/false);
    load(*rank.world(), dir.path(), {loaded}, {.exclude = {"k.**"}, .partial = true});
    EXPECT_FALSE(loaded.qkv->slot("weight")->initialized());
    load(*rank.world(), dir.path(), {loaded});
    EXPECT_TRUE(loaded.qkv->slot("weight")->initialized());
    load(*rank.world(), dir.path(), {loaded}, {.exclude = {"k.**"}, .partial = true});
    EXPECT_TRUE(loaded.qkv->slot("weight")->initialized());
  });
}

}  // namespace
}  // namespace tessera::checkpoint
