
#include "testing/distributed.h"
#include "testing/models.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

using testing::LayersOfEachKind;
using testing::parameter_values;

std::shared_ptr<LayersOfEachKind> meta_model() {
  const MetaDevice meta;
  return std::make_shared<LayersOfEachKind>();
}

TEST(MetaDevice, ParametersAndFactoriesAreMeta) {
  const auto model = meta_model();
  for (const auto& [name, slot] : model->named_slots()) {
    EXPECT_TRUE(slot->get().is_meta()) << name;
  }
  const MetaDevice meta;
  EXPECT_TRUE(at::zeros({3}).is_meta());
  EXPECT_TRUE(MetaDevice::active());
}

TEST(MetaDevice, EndsWithItsScope) {
  { const MetaDevice meta; }
  EXPECT_FALSE(MetaDevice::active());
  EXPECT_TRUE(at::zeros({3}).is_cpu());
}

TEST(ToEmpty, GivesStorageToEverySlot) {
  const auto model = meta_model();
  to_empty(*model, c10::kCPU);
  for (const auto& [name, slot] : model->named_slots()) {
    EXPECT_TRUE(slot->get().is_cpu()) << name;
    EXPECT_TRUE(slot->get().requires_grad()) << name;
  }
  for (const auto& [name, slot] : model->named_buffer_slots()) {
    EXPECT_TRUE(slot->get().is_cpu());
  }
}

TEST(ToEmpty, LeavesWhatHasStorage) {
  Linear module(2, 2);
  const at::Tensor before = module.weight;
  to_empty(module, c10::kCPU);
  EXPECT_TRUE((*module.weight).is_same(before));
}

TEST(ToEmpty, RefusesMetaBuffersOfLibtorch) {
  const auto model = meta_model();
  {
    const MetaDevice meta;
    model->register_buffer("stray", at::ones({2}));
  }
  EXPECT_ERROR(to_empty(*model, c10::kCPU), "'stray'");
}

TEST(InitWeights, NeedsStorage) {
  const auto model = meta_model();
  EXPECT_ERROR(init_weights(*model, 1), "to_empty");
}

TEST(InitWeights, SaysWhoFillsWhatItHasNot) {
  struct Forgets : Module<Forgets> {
    Forgets() { scale = register_slot("scale", {3}); }
    Parameter scale;
  };
  Forgets module;
  for (const auto init : {&init_weights, &init_unfilled}) {
    const std::string message = testing::message_of([&] { init(module, 1); });
    EXPECT_CONTAINS(message, "'scale'", "fill them in reset_parameters of their class");
    EXPECT_FALSE(testing::Contains(message, {"nn::init_weights"}));
  }
  EXPECT_ERROR(check_initialized(module), "call nn::init_weights");
}

TEST(InitWeights, FillsByDefaultByTheParentAndByATable) {
  const auto model = meta_model();
  to_empty(*model, c10::kCPU);
  EXPECT_ERROR(check_initialized(*model), "parameters or buffers was never filled");
  init_weights(*model, 1);
  check_initialized(*model);
  EXPECT_EQUAL(model->norm->weight, at::ones({6}));
  EXPECT_EQUAL(model->table, at::arange(4, at::kFloat));
  EXPECT_EQUAL(model->out->weight, at::full({5, 6}, 0.25));
  for (const auto& layer : model->layers->items()) {
    EXPECT_EQUAL(layer->slot("bias")->get(), at::full({6}, 3.0));
    EXPECT_FALSE(layer->slot("weight")->get().equal(at::full({6, 6}, 3.0)));
  }
}

TEST(InitWeights, DependsOnTheSeedAndOnNothingElse) {
  const auto a = meta_model();
  const auto b = meta_model();
  const auto c = meta_model();
  for (const auto& model : {a, b, c}) {
    to_empty(*model, c10::kCPU);
  }
  init_weights(*a, 1);
  at::rand({17});
  init_weights(*b, 1);
  init_weights(*c, 2);
  EXPECT_EQUAL(parameter_values(*a), parameter_values(*b));
  EXPECT_FALSE(parameter_values(*a).equal(parameter_values(*c)));
}

TEST(InitWeights, FillsATiedParameterOnce) {
  auto a = std::make_shared<Linear>(3, 3, LinearOptions{.bias = false});
  auto b = std::make_shared<Linear>(3, 3, LinearOptions{.bias = false});
  Sequential tied(a, b);
  b->tie_slot("weight", a->slot("weight"));
  init_weights(tied, 5);
  const at::Tensor expected = at::empty({3, 3});
  const double bound = 1.0 / std::sqrt(3.0);
  uniform_(expected, -bound, bound, {5, stream_of("0.weight")});
  EXPECT_EQUAL(a->weight->detach(), expected);
}

TEST(InitBuffers, LeavesParametersAlone) {
  const auto model = meta_model();
  to_empty(*model, c10::kCPU);
  init_weights(*model, 1);
  model->out->weight->detach().fill_(9.0);
  model->table->fill_(7.0);
  init_buffers(*model);
  EXPECT_EQUAL(model->out->weight->detach(), at::full({5, 6}, 9.0));
  EXPECT_TRUE(model->table->equal(at::arange(4, at::kFloat)));
}

TEST(InitBuffers, LeavesPersistentBuffersThatWereLoaded) {
  class Counts : public Module<Counts> {
   public:
    Counts() { counts = register_buffer_slot("counts", {3}); }
    void reset_parameters(const InitContext& init) override {
      init.set_buffer(counts, at::zeros({3}));
    }
    Parameter counts;
  };
  Counts module;
  init_buffers(module);
  EXPECT_TRUE(module.counts->equal(at::zeros({3})));
  module.counts->fill_(7.0);
  init_buffers(module);
  EXPECT_TRUE(module.counts->equal(at::full({3}, 7.0)));
}

TEST(CheckInitialized, AcceptsSlotsThatAreMarked) {
  Linear module(2, 2);
  EXPECT_ERROR(check_initialized(module),
               "the storage of 2 parameters or buffers was never filled");
  for (const auto& [name, slot] : module.named_slots()) {
    slot->set_initialized(true);
  }
  check_initialized(module);
}

// The model's values on a mesh, gathered, are those of one rank: sizes 5, 6 and 7 over 2, 3, 4.
void expect_as_on_one_rank(int ranks, const std::vector<std::int64_t>& sizes,
                           const Placements& placements) {
  const auto single = meta_model();
  to_empty(*single, c10::kCPU);
  init_weights(*single, 11);
  const at::Tensor expected = parameter_values(*single);
  RunRanks(ranks, [&](Rank& rank) {
    std::vector<std::string> names{"dp", "tp"};
    names.resize(sizes.size());
    const DeviceMesh mesh = rank.mesh(sizes, names);
    const auto model = meta_model();
    for (const auto& [name, slot] : model->named_slots()) {
      slot->set(
          distribute_tensor(slot->get().detach(), mesh, placements).tensor().requires_grad_());
    }
    to_empty(*model, c10::kCPU);
    init_weights(*model, 11);
    EXPECT_EQUAL(parameter_values(*model), expected);
  });
}

TEST(InitWeights, IsBitEqualOnOneMeshDimension) {
  expect_as_on_one_rank(4, {4}, {Shard{0}});
  expect_as_on_one_rank(3, {3}, {Shard{0}});
  expect_as_on_one_rank(2, {2}, {Replicate{}});
}

TEST(InitWeights, IsBitEqualOnTwoMeshDimensions) {
  expect_as_on_one_rank(4, {2, 2}, {Shard{0}, Shard{0}});
  expect_as_on_one_rank(6, {2, 3}, {Shard{0}, Replicate{}});
}

}  // namespace
}  // namespace tessera::nn
