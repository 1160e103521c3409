// Tests models with experts (Mixtral, Qwen 3 MoE, OLMoE) under parallelize(): training, initial
// weights and checkpoints must be the same as on one rank.

#include "tessera/nn/experts.h"

#include <map>

#include "models/llama_run.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/models/parallelize.h"
#include "tessera/tessera.hpp"
#include "testing/distributed.h"
#include "testing/files.h"
#include "testing/module_values.h"

namespace tessera::models {
namespace {

/// A model type and settings of config.json. `saving`: sizes of the mesh that saves checkpoints.
struct Kind {
  const char *type, *settings;
  std::vector<std::int64_t> saving;
};
// 6 experts are uneven on 4 ranks, and 8 experts are uneven on 3 ranks.
const Kind kKinds[] = {
    {"mixtral",
     R"("num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2)",
     {2, 2, 1}},
    {"qwen3_moe",
     R"("num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 4, "head_dim": 6,
        "moe_intermediate_size": 13, "decoder_sparse_step": 2, "mlp_only_layers": [1])",
     {1, 2, 2}},
    {"olmoe", R"("num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 2)", {1, 2, 1}}};
constexpr Shape kShape{"", 24, 8};

std::string config_of(const Kind& kind) {
  return std::string(R"({"vocab_size": 61, "hidden_size": 24, "intermediate_size": 14,
      "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
      "model_type": ")") +
         kind.type + "\", " + kind.settings + "}";
}

std::shared_ptr<Llama> make_model(const Kind& kind) {
  const std::string config = config_of(kind);
  auto model = make_llama({config.c_str(), kShape.batch, kShape.sequence});
  model->to(c10::kDouble);
  return model;
}

const std::vector<std::string> kReplicated{"dp_replicate", "dp", "ep", "tp"},
    kContext{"dp", "ep", "cp", "tp"}, kDense{"dp", "tp"}, kUsual{"dp", "ep", "tp"};

struct Mesh {
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names = kUsual;
  bool sequence_parallel = true;
  ActivationMemory activations = ActivationMemory::kAll;
};
std::ostream& operator<<(std::ostream& out, const Mesh& mesh) {
  return out << ::testing::PrintToString(mesh.names) << ::testing::PrintToString(mesh.sizes);
}

/// Runs forward and backward of this rank's rows, with the load-balancing loss. Returns the mean of
/// all ranks' losses.
double backward(Llama& model, const DeviceMesh& mesh, std::int64_t step) {
  const DeviceMesh batches = mesh ? batch_mesh(mesh).flatten() : DeviceMesh();
  const DeviceMesh data = mesh ? data_mesh(mesh).flatten() : DeviceMesh();
  const std::int64_t rows = kShape.batch / (mesh ? batches.size() : 1);
  const std::int64_t first = mesh ? batches.local_rank() * rows : 0;
  const at::Tensor tokens = tokens_of(kShape, model.config().vocab_size, step, first, first + rows);
  at::Tensor inputs = tokens.slice(1, 0, -1), targets = tokens.slice(1, 1);
  if (const auto& split = model.context_parallel()) {
    inputs = split->shard(inputs, 1);
    targets = split->shard(targets, 1);
  }
  at::Tensor loss = tensor_parallel::cross_entropy(model(inputs), targets.flatten());
  loss = loss + 0.1 * nn::take_router_losses(model, data).load_balancing;
  loss.backward();
  at::Tensor mean = loss.detach().reshape({1}).clone();
  if (data && data.size() > 1) {
    data.group().all_reduce(mean, ReduceOp::kAvg)->wait();
  }
  return mean.item<double>();
}

using Tensors = std::map<std::string, at::Tensor>;

struct Training {
  Training(const Kind& kind, const DeviceMesh& over, const ParallelOptions& options = {})
      : model(make_model(kind)), mesh(over) {
    if (mesh) {
      parallelize(*model, mesh, options);
    }
    // If eps were small, AdamW's first update would depend only on the signs of gradients.
    const optim::AdamWOptions adamw{.lr = 0.01, .eps = 1e-3};
    optimizer = std::make_unique<optim::AdamW>(*model, adamw);
  }
  Tensors train(int steps) {
    std::vector<double> numbers;
    for (int step = 0; step < steps; ++step) {
      numbers.push_back(backward(*model, mesh, step));
      numbers.push_back(optim::clip_grad_norm_(optimizer->parameters(), 0.5).item<double>());
      optimizer->step();
      optimizer->zero_grad();
    }
    Tensors result = whole();
    result["losses and norms"] = at::tensor(numbers, c10::kDouble);
    return result;
  }
  auto state() const { return optim::named_state(*optimizer, *model); }
  /// Returns the unsharded weights and the unsharded optimizer state. Collective.
  Tensors whole() const {
    Tensors tensors;
    for (const auto& [name, slot] : model->named_slots()) {
      tensors[name] = full_tensor(slot->persistent()).clone();
    }
    for (const auto& [name, tensor] : state()) {
      tensors["optimizer." + name] = full_tensor(tensor).clone();
    }
    return tensors;
  }

  std::shared_ptr<Llama> model;
  DeviceMesh mesh;
  std::unique_ptr<optim::AdamW> optimizer;
};

void expect_close(const Tensors& found, const Tensors& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    EXPECT_CLOSE(found.at(name), tensor, tolerance, tolerance) << name;
  }
}

class ModelsWithExperts : public ::testing::TestWithParam<Mesh> {};

TEST_P(ModelsWithExperts, TrainLikeOneRank) {
  const Mesh& c = GetParam();
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.type);
    const Tensors expected = Training(kind, {}).train(3);
    RunOnMesh(c.sizes, c.names, [&](Rank&, const DeviceMesh& mesh) {
      Training run(kind, mesh,
                   {.sequence_parallel = c.sequence_parallel, .activations = c.activations});
      expect_close(run.train(3), expected, 1e-9);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, ModelsWithExperts,
    ::testing::Values(Mesh{{1, 1, 1}}, Mesh{{1, 2, 1}}, Mesh{{4, 1, 1}}, Mesh{{2, 2, 1}},
                      Mesh{{1, 4, 1}, kUsual, true, ActivationMemory::kInputs}, Mesh{{1, 2, 2}},
                      Mesh{{1, 2, 2}, kUsual, false}, Mesh{{2, 1, 2}},
                      Mesh{{2, 1, 2}, kUsual, false},
                      Mesh{{3, 2, 1}, kUsual, true, ActivationMemory::kMatmuls},
                      Mesh{{1, 3, 2}, kUsual, true, ActivationMemory::kInputs},
                      Mesh{{2, 2, 2}, kUsual, true, ActivationMemory::kMatmuls},
                      Mesh{{1, 2, 2, 1}, kContext}, Mesh{{1, 2, 2, 2}, kContext},
                      Mesh{{2, 1, 2, 1}, kContext}, Mesh{{1, 2, 2, 1}, kReplicated},
                      Mesh{{2, 1, 2, 1}, kReplicated}, Mesh{{2, 2, 2, 1}, kReplicated},
                      Mesh{{2, 1, 1, 2}, kReplicated}, Mesh{{2, 2}, kDense}));

TEST_ON_MESH(ModelWithExperts, HasTheInitialWeightsOfOneRank, {2, 3, 1}, {"dp", "ep", "tp"}) {
  for (const Kind& kind : kKinds) {
    const auto alone = make_model(kind);
    const auto model = testing::made_on_meta<Llama>(alone->config(), kShape.sequence);
    parallelize(*model, mesh, {});
    nn::to_empty(*model, c10::kCPU);
    nn::init_weights(*model, 7);
    model->to(c10::kDouble);
    const at::Tensor expected = testing::parameter_values(*alone);
    EXPECT_EQUAL(testing::parameter_values(*model), expected) << kind.type;
    EXPECT_EQ(expected.numel(), count_parameters(alone->config()).total) << kind.type;
  }
}

/// Sizes of the meshes that load the checkpoint; {}: a single rank without a mesh.
const std::vector<std::vector<std::int64_t>> kLoading{{},        {1, 1, 1}, {2, 1, 1}, {1, 4, 1},
                                                      {1, 3, 1}, {2, 3, 1}, {3, 1, 2}, {1, 2, 2}};

void on_each_mesh(const std::function<void(Rank&, const DeviceMesh&)>& body) {
  for (const auto& sizes : kLoading) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    RunRanks(testing::ranks_of(sizes), [&](Rank& rank) {
      body(rank, sizes.empty() ? DeviceMesh() : rank.mesh(sizes, kUsual));
    });
  }
}

TEST(ModelWithExperts, ContinuesFromACheckpointOfAnyMesh) {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.type);
    const testing::TemporaryFolder folder;
    Tensors saved, later;
    RunOnMesh(kind.saving, kUsual, [&](Rank& rank, const DeviceMesh& mesh) {
      Training run(kind, mesh);
      run.train(1);
      checkpoint::save(*rank.world(), folder.path(), 1, {*run.model, run.state()});
      const Tensors whole = run.whole(), after = run.train(1);
      if (rank.rank() == 0) {
        saved = whole, later = after;
      }
    });
    on_each_mesh([&](Rank& rank, const DeviceMesh& mesh) {
      Training run(kind, mesh);
      checkpoint::load(*rank.world(), folder.path(), {*run.model, run.state()});
      expect_close(run.whole(), saved, 0);
      expect_close(run.train(1), later, 1e-9);
    });
  }
}

TEST(ModelWithExperts, IsSavedForHuggingFaceAndLoadedOnAnyMesh) {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.type);
    const testing::TemporaryFolder folder;
    const auto model = make_model(kind);
    RunOnMesh({2, 2, 1}, kUsual, [&](Rank& rank, const DeviceMesh& mesh) {
      const Training run(kind, mesh);
      checkpoint::save_hugging_face(*run.model, *rank.world(), folder.path(), config_of(kind));
    });
    const checkpoint::SafetensorsFile file(folder / "model.safetensors");
    int stacks = 0;
    for (const auto& [name, slot] : model->named_slots()) {
      if (const std::size_t at = name.find(".experts."); at != std::string::npos) {
        ++stacks;
        EXPECT_EQUAL(file.read(std::string(name).insert(at + 9, "5.")), slot->get().detach()[5]);
      }
    }
    EXPECT_GE(stacks, 3);
    on_each_mesh([&](Rank& rank, const DeviceMesh& mesh) {
      const Training run(kind, mesh);
      for (const auto& [name, slot] : run.model->named_slots()) {
        const c10::NoGradGuard no_grad;
        local_tensor(slot->persistent()).zero_();
      }
      checkpoint::load_hugging_face(*run.model, *rank.world(), folder.path());
      EXPECT_EQUAL(testing::parameter_values(*run.model), testing::parameter_values(*model));
    });
  }
}

}  // namespace
}  // namespace tessera::models
