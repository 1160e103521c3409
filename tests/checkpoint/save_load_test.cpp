// Tests save() and load() on any mesh: values, buffers, counts of dropout calls, and errors.

#include <fmt/format.h>

#include "checkpoint/known_model.h"
#include "checkpoint/manifest.h"
#include "fsdp/training/random_model.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"
#include "testing/module_values.h"

namespace tessera::checkpoint {
namespace {

TEST(ShardedCheckpoint, LoadsOnAnyMesh) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 100, 3);
  const std::vector<std::vector<std::int64_t>> meshes = {{1, 1}, {2, 2}, {4, 1},
                                                         {1, 4}, {3, 1}, {5, 2}};
  for (const auto& sizes : meshes) {
    RunRanks(testing::ranks_of(sizes), [&](Rank& rank) {
      SavedState loaded(rank, sizes, -5000);
      const SavedState expected(rank, sizes, 3);
      const LoadReport report = load(*rank.world(), dir.path(), loaded.dict());
      ExpectEqual(loaded.local(), expected.local());
      EXPECT_EQ(report.step, 100);
      EXPECT_EQ(report.entries, (nlohmann::json{{"samples", 640}}));
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
    });
  }
}

TEST(ShardedCheckpoint, NamesFilesByRankAndWritesNoEmptyFiles) {
  const TemporaryFolder dir;
  SaveStep(dir / "four", 1);
  RunRanks(4, [&](Rank& rank) {
    // Shards of a weight with six rows on four ranks have 2, 2, 2 and 0 rows.
    nn::Linear net(2, 6, nn::LinearOptions{false});
    net.slot("weight")->set(
        distribute_tensor(at::ones({6, 2}), rank.mesh({4}, {"dp"}), {Shard{0}}));
    save(*rank.world(), dir / "empty", 1, {net});
  });
  const auto expect_files = [&](const char* run, int ranks, int files) {
    Names names{"manifest.json"};
    for (int rank = 0; rank < ranks; ++rank) {
      for (int file = 1; file <= files; ++file) {
        names.push_back(
            fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", rank, file, files));
      }
    }
    EXPECT_EQ(FilesIn(dir / run / "step-00000001"), names);
  };
  expect_files("four", 4, 2);
  expect_files("empty", 3, 1);
}

TEST(ShardedCheckpoint, FillsAModelOnTheMetaDevice) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  RunRanks(1, [&](Rank& rank) {
    const auto net = testing::made_on_meta<Net>();
    const LoadOptions model_only{.exclude = {"optimizer.**"}};
    EXPECT_ERROR(load(*rank.world(), dir.path(), {*net}, model_only), "nn::to_empty()");
    nn::to_empty(*net, at::kCPU);
    load(*rank.world(), dir.path(), {*net}, model_only);
    nn::check_initialized(*net);
    ExpectEqual(LocalValues(*net), Values());
  });
}

TEST(ShardedCheckpoint, StoresTiedParametersOnce) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    SavedState tied(rank, {2, 1}, 0, /*tied=*/true);
    save(*rank.world(), dir.path(), 1, tied.dict());
    SavedState loaded(rank, {2, 1}, -1, /*tied=*/true);
    load(*rank.world(), dir.path(), loaded.dict());
    ExpectEqual(loaded.local(), tied.local());
    // A checkpoint of two tied parameters is loaded into two untied parameters.
    Net apart;
    Distribute(apart, rank.mesh({2, 1}, {"dp", "tp"}), Zeros());
    load(*rank.world(), dir.path(), {apart}, {.exclude = {"optimizer.**"}});
    for (const auto& linear : {apart.embed->slot("weight"), apart.head->slot("weight")}) {
      EXPECT_TRUE(at::equal(full_tensor(linear->persistent()),
                            full_tensor(tied.net.embed->slot("weight")->persistent())));
    }
  });
  const Manifest manifest = read_manifest(dir / "step-00000001");
  EXPECT_EQ(manifest.tensors.at("embed.weight").tied, Names{"head.weight"});
  EXPECT_FALSE(manifest.tensors.contains("head.weight"));
}

TEST(ShardedCheckpoint, RefusesDifferentValuesOfATiedParameter) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 3);
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    SavedState tied(rank, {2, 1}, -5000, /*tied=*/true);
    ExpectUnchangedByError(tied, [&] { load(*rank.world(), dir.path(), tied.dict()); });
  });
  EXPECT_CONTAINS(errors, "'embed.weight'", "'head.weight'", "exclude 'head.weight'");
  RunRanks(1, [&](Rank& rank) {
    SavedState tied(rank, {1, 1}, -5000, /*tied=*/true);
    const SavedState expected(rank, {1, 1}, 3, /*tied=*/true);
    load(*rank.world(), dir.path(), tied.dict(),
         {.exclude = {"head.weight", "optimizer.state.head.weight.*"}});
    ExpectEqual(tied.local(), expected.local());
    // PyTorch saves a tied parameter under two names, with equal values.
    Net twice, once(/*tied=*/true);
    Tensors values = Values();
    values["head.weight"] = values["embed.weight"];
    const auto mesh = rank.mesh({1, 1}, {"dp", "tp"});
    Distribute(twice, mesh, values);
    Distribute(once, mesh, Zeros());
    save(*rank.world(), dir.path(), 2, {twice});
    load(*rank.world(), dir.path(), {once});
    EXPECT_TRUE(at::equal(LocalValues(once).at("embed.weight"), values["embed.weight"]));
  });
}

TEST(ShardedCheckpoint, RefusesInvalidOptionsAndEntries) {
  const TemporaryFolder dir;
  nlohmann::json deep = nlohmann::json::object();
  for (int i = 0; i < 31; ++i) {
    deep = {{"a", deep}};
  }
  RunRanks(1, [&](Rank& rank) {
    SavedState state(rank, {1, 1});
    const auto save_entries = [&](const nlohmann::json& entries) {
      save(*rank.world(), dir.path(), 1, {state.net, {}, entries});
    };
    testing::expect_refusals(
        {{"NaN", [&] { save_entries({{"losses", {1.0, std::nan("")}}}); }, {"'/losses/1'"}},
         {"depth", [&] { save_entries(deep); }, {"levels"}},
         {"line end", [&] { SaveStep(dir.path(), 1, 0, {.run_id = "a\nb"}); }, {"ASCII"}},
         {"long run_id",
          [&] { SaveStep(dir.path(), 1, 0, {.run_id = std::string(201, 'a')}); },
          {"201 bytes"}}});
    EXPECT_TRUE(dir.files().empty());
    save(*rank.world(), dir.path(), 1, {state.net});
    EXPECT_ERROR(load(*rank.world(), dir.path(), {state.net}, {.exclude = {"heads.**"}}), "exclude",
                 "'heads.**'", "4 names");
    // "optimizer.**" is accepted even if the checkpoint has no optimizer state.
    load(*rank.world(), dir.path(), {state.net}, {.exclude = {"optimizer.**", "head.**"}});
  });
}

TEST(ShardedCheckpoint, WritesASecondBlockToAnotherFile) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    const auto layout = Layout::intern({2, 1}, {{Digit{2, {}}, Digit{6, {0}}}, {}});
    const auto on = [&](const at::Tensor& values) {
      const auto mesh = rank.mesh({2, 1}, {"dp", "tp"});
      return distribute_tensor(values, mesh, {Replicate{}, Replicate{}}).redistribute(layout);
    };
    nn::Linear net(3, 12, nn::LinearOptions{false});
    const at::Tensor rows = at::arange(36, at::kFloat).view({12, 3});
    net.slot("weight")->set(on(rows));
    save(*rank.world(), dir.path(), 1, {net});
    net.slot("weight")->set(on(at::zeros_like(rows)));
    load(*rank.world(), dir.path(), {net});
    EXPECT_TRUE(at::equal(full_tensor(net.slot("weight")->persistent()), rows));
  });
  EXPECT_TRUE(
      std::filesystem::exists(dir / "step-00000001/shard-00000-model-00003-of-00003.safetensors"));
}

class EightTensors : public nn::Module<EightTensors> {
 public:
  EightTensors() {
    for (int i = 0; i < 8; ++i) {
      register_slot("tensor" + std::to_string(i), at::ones({64, 64 + i}));
    }
  }
};

TEST(ShardedCheckpoint, WritesReplicatedTensorsOnceSpreadOverTheRanks) {
  const TemporaryFolder dir;
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    EightTensors model;
    for (const auto& [name, slot] : model.named_slots()) {
      slot->set(distribute_tensor(slot->get().detach(), mesh, {Replicate{}, Shard{0}}));
    }
    save(*rank.world(), dir.path(), 1, {model});
  });
  const Manifest manifest = read_manifest(dir / "step-00000001");
  std::uint64_t all = 0, most = 0;
  for (const FileRecord& file : manifest.files) {
    all += file.bytes;
    most = std::max(most, file.bytes);
  }
  ASSERT_EQ(manifest.files.size(), 4u);
  EXPECT_LT(all, 8u * 64 * 68 * 4 + 10'000);
  EXPECT_LT(most, all / 4 + all / 40);
}

TEST(ShardedCheckpoint, ReportsTensorsThatAPartialLoadOmits) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  RunRanks(1, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({1, 1}, {"dp", "tp"}), Values());
    const StateDict model = {net};
    EXPECT_ERROR(load(*rank.world(), dir.path(), model), "unexpected: optimizer.state.embed.weight",
                 "exclude names");
    EXPECT_TRUE(
        load(*rank.world(), dir.path(), model, {.exclude = {"optimizer.**"}}).unexpected.empty());
    EXPECT_EQ(load(*rank.world(), dir.path(), model, {.partial = {"**"}}).unexpected.size(), 8u);
    nn::Linear other(5, 7);
    EXPECT_ERROR(load(*rank.world(), dir.path(), {other}), "missing: weight, bias");
  });
}

// The checkpoint has optimizer state of embed.weight, which the loading run has frozen.
TEST(ShardedCheckpoint, PartialAcceptsUnexpectedTensors) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 3);
  const Names of_frozen{"optimizer.state.embed.weight.exp_avg",
                        "optimizer.state.embed.weight.step"};
  RunRanks(2, [&](Rank& rank) {
    SavedState rest(rank, {1, 2}, -5000);
    SavedState expected(rank, {1, 2}, 3);
    for (SavedState* each : {&rest, &expected}) {
      std::erase_if(each->optimizer,
                    [](const auto& state) { return state.first.starts_with("embed."); });
    }
    EXPECT_ERROR(load(*rank.world(), dir.path(), rest.dict()), "unexpected: " + of_frozen[0],
                 "LoadOptions::partial");
    EXPECT_ERROR(load(*rank.world(), dir.path(), rest.dict(), {.partial = {"embed.**"}}),
                 "unexpected: " + of_frozen[0]);
    const LoadReport report =
        load(*rank.world(), dir.path(), rest.dict(), {.partial = {"optimizer.state.embed.**"}});
    EXPECT_EQ(report.unexpected, of_frozen);
    ExpectEqual(rest.local(), expected.local());
    nn::Linear other(5, 7);
    EXPECT_ERROR(load(*rank.world(), dir.path(), {other},
                      {.exclude = {"optimizer.**", "embed.**", "middle.**", "head.**"},
                       .partial = {"weight"}}),
                 "missing: bias");
  });
}

class Wide : public nn::Module<Wide> {
 public:
  explicit Wide(std::int64_t rows) {
    middle = register_module("middle", std::make_shared<nn::Linear>(5, rows));
  }
  std::shared_ptr<nn::Linear> middle;
};

TEST(ShardedCheckpoint, ConvertsFloatsAndReportsReshapedTensors) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    Wide saved(7);
    saved.middle->slot("weight")->set(at::ones({7, 5}));
    saved.middle->slot("bias")->set(at::ones({7}, at::kBFloat16));
    save(*rank.world(), dir.path(), 1, {saved});
    Wide loaded(7);
    load(*rank.world(), dir.path(), {loaded});
    EXPECT_TRUE(at::equal(*loaded.middle->bias, at::ones({7})));
    Wide wide(8);
    EXPECT_ERROR(load(*rank.world(), dir.path(), {wide}),
                 "middle.weight (checkpoint [7, 5], here [8, 5])");
    EXPECT_EQ(load(*rank.world(), dir.path(), {wide}, {.partial = {"**"}}).reshaped,
              (Names{"middle.weight", "middle.bias"}));
  });
}

TEST(ShardedCheckpoint, RefusesLoadsThatDifferBetweenRanks) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  SaveStep(dir.path(), 2, 2);
  const std::vector<std::pair<std::filesystem::path, LoadOptions>> of_rank_1 = {
      {dir / "step-00000001", {}},
      {dir.path(), {.exclude = {"head.**"}}},
      {dir.path(), {.partial = {"head.**"}}}};
  for (const auto& other : of_rank_1) {
    const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
      SavedState state(rank, {2, 1}, -5000);
      const auto call = rank.rank() == 0 ? std::pair(dir.path(), LoadOptions{}) : other;
      ExpectUnchangedByError(state,
                             [&] { load(*rank.world(), call.first, state.dict(), call.second); });
    });
    EXPECT_CONTAINS(errors, "ranks 1", "folder", "exclude", "partial");
  }
}

TEST(ShardedCheckpoint, RefusesSavesThatDifferBetweenRanks) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  struct Call {
    std::filesystem::path folder;
    std::int64_t step = 2;
    SaveOptions options{.run_id = "run", .keep = 2};
  };
  const auto save_as = [&](const Call& of_rank_1) {
    return ErrorsOfRanks(2, [&](Rank& rank) {
      SavedState state(rank, {2, 1}, 9);
      const Call call = rank.rank() == 0 ? Call{dir.path()} : of_rank_1;
      save(*rank.world(), call.folder, call.step, state.dict(), call.options);
    });
  };
  for (const Call& other : {Call{dir.path(), 1}, Call{dir / "step-00000001"},
                            Call{dir.path(), 2, {.run_id = "other", .keep = 2}},
                            Call{dir.path(), 2, {.run_id = "run", .keep = 3}}}) {
    EXPECT_CONTAINS(save_as(other), "ranks 1", "step", "folder", "run_id", "keep");
  }
  EXPECT_CONTAINS(ErrorsOfRanks(2,
                                [&](Rank& rank) {
                                  Wide net(rank.rank() == 0 ? 7 : 8);
                                  for (const auto& [name, slot] : net.named_slots()) {
                                    slot->set(at::ones_like(slot->get()));
                                  }
                                  save(*rank.world(), dir.path(), 2, {net});
                                }),
                  "ranks 1 differ from rank 0");
  EXPECT_EQ(dir.files(), Names{"step-00000001"});
  EXPECT_EQ(ExpectLoads(dir.path(), 1), 1);
  save_as({dir / "."});
  EXPECT_EQ(ExpectLoads(dir.path(), 9), 2);
}

/// A libtorch module with the buffer "mean", as batch norm has.
class Stock : public torch::nn::Module {
 public:
  Stock() { mean = register_buffer("mean", at::zeros({3})); }
  at::Tensor mean;
};

struct WithBuffers : nn::Module<WithBuffers> {
  WithBuffers() {
    counts = register_buffer_slot("counts", {5});
    table = register_buffer_slot("table", {4}, /*persistent=*/false);
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.set_buffer(counts, at::zeros({5}));
    init.set_buffer(table, at::arange(4, at::kFloat));
  }
  at::Tensor forward(const at::Tensor& x) { return (*linear)(x); }
  nn::Child<nn::Linear> linear{*this, "linear", 2, 3};
  nn::Child<Stock> stock{*this, "stock"};
  nn::Parameter counts, table;
};

void count(WithBuffers& model) {
  const at::NoGradGuard no_grad;
  local_tensor(model.counts).add_(7);
  local_tensor(model.table).add_(7);
  model.stock->mean.fill_(0.5);
}

void expect_counted(const WithBuffers& model) {
  EXPECT_TRUE(at::equal(model.counts, at::full({5}, 7.0)));
  EXPECT_TRUE(at::equal(model.table, at::arange(4, at::kFloat)));
  EXPECT_TRUE(at::equal(model.stock->mean, at::full({3}, 0.5)));
}

TEST(Buffers, AreSavedAndLoadedWhenPersistent) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    WithBuffers model, unfilled;
    nn::init_weights(model, 1);
    fsdp::fully_shard(model, rank.mesh({2}, {"dp"}));
    count(model);
    // Buffers can differ between ranks, like the statistics of batch norm. save() writes the
    // buffers of rank 0.
    model.counts.slot()->set(at::full({5}, 7.0 + rank.rank()));
    model.stock->mean.fill_(0.5 + rank.rank());
    save(*rank.world(), dir.path(), 1, {model});
    nn::init_weights(*unfilled.linear, 1);
    EXPECT_ERROR(save(*rank.world(), dir.path(), 2, {unfilled}), "buffer 'counts'");
  });
  const Manifest manifest = read_manifest(dir / "step-00000001");
  EXPECT_TRUE(manifest.tensors.contains("counts") && manifest.tensors.contains("stock.mean"));
  EXPECT_FALSE(manifest.tensors.contains("table"));
  RunRanks(3, [&](Rank& rank) {
    WithBuffers model;
    load(*rank.world(), dir.path(), {model});
    nn::init_buffers(model);  // initializes the buffer "table", which save() leaves out
    expect_counted(model);
    nn::check_initialized(model);
  });
}

TEST(Buffers, RoundTripThroughHuggingFaceFiles) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    WithBuffers model;
    nn::init_weights(model, 1);
    fsdp::fully_shard(model, rank.mesh({2}, {"dp"}));
    count(model);
    save_hugging_face(model, *rank.world(), dir / "saved", "{}");
  });
  RunRanks(3, [&](Rank& rank) {
    WithBuffers model;
    nn::init_buffers(model);
    load_hugging_face(model, *rank.world(), dir / "saved");
    expect_counted(model);
  });
  // A buffer that the loaded folder lacks keeps its value. Older programs save no buffers.
  WriteModel(dir / "model.safetensors",
             {{"linear.weight", at::ones({3, 2})}, {"linear.bias", at::ones({3})}});
  WithBuffers model;
  nn::init_buffers(model);
  load_hugging_face(model, dir.path());
  EXPECT_TRUE(at::equal(model.counts, at::zeros({5})));
  nn::check_initialized(model);
}

TEST_ON_RANKS(Buffers, AreInStateDictsThatOmitFrozenParameters, 2) {
  WithBuffers model;
  nn::init_weights(model, 1);
  count(model);
  model.linear->slot("bias")->get().requires_grad_(false);
  const StateDictOptions options{.full_state_dict = true, .ignore_frozen_params = true};
  const TensorDict state = get_model_state_dict(*rank.world(), model, options);
  EXPECT_EQ(state.size(), 3U);
  WithBuffers other;
  nn::init_weights(other, 2);
  set_model_state_dict(*rank.world(), other, state, {.full_state_dict = true, .strict = false});
  EXPECT_TRUE(at::equal(other.counts, model.counts));
  EXPECT_TRUE(at::equal(other.stock->mean, model.stock->mean));
}

using fsdp::drawing::DrawingModel;

struct DroppingRun {
  explicit DroppingRun(const DeviceMesh& over) : mesh(over) {
    tensor_parallel::parallelize_module(model, mesh["tp"], fsdp::drawing::plan());
    for (const auto& block : model.blocks) {
      fsdp::fully_shard(*block, mesh["dp"]);
    }
    fsdp::fully_shard(model, mesh["dp"]);
    nn::init_weights(model, 5);
    optimizer.emplace(model, optim::AdamWOptions{.lr = 1e-2});
  }
  StateDict dict() { return {model, optim::named_state(*optimizer, model)}; }
  void train(int begin, int end) {
    for (int step = begin; step < end; ++step) {
      const at::Tensor rows = fsdp::drawing::token_ids(4, step).chunk(
          mesh.size("dp"))[static_cast<std::size_t>(mesh.local_rank("dp"))];
      model(rows).square().mean().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }

  DeviceMesh mesh;
  DrawingModel model{fsdp::drawing::kModules};
  std::optional<optim::AdamW> optimizer;
};

TEST(DropoutCalls, ContinueFromACheckpoint) {
  for (const auto& sizes : {std::vector<std::int64_t>{1, 1}, {2, 2}}) {
    const TemporaryFolder dir;
    RunOnMesh(sizes, {"dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      DroppingRun whole(mesh);
      whole.train(0, 2);
      save(*rank.world(), dir.path(), 2, whole.dict());
      whole.train(2, 4);
      DroppingRun resumed(mesh);
      load(*rank.world(), dir.path(), resumed.dict());
      EXPECT_EQ(resumed.model.blocks[1]->drop_residual->calls(), 4U);
      resumed.train(2, 4);
      ExpectEqual(LocalValues(resumed.model), LocalValues(whole.model));
    });
  }
}

TEST(DropoutCalls, AreKeptIfExcludedOrNotSaved) {
  const TemporaryFolder dir;
  const auto step = dir / "step-00000001";
  RunRanks(1, [&](Rank& rank) {
    DroppingRun run(rank.mesh({1, 1}, {"dp", "tp"}));
    nn::Dropout& dropout = *run.model.blocks[0]->drop_scores;
    const auto calls_after_load = [&](const LoadOptions& options) {
      dropout.set_calls(7);
      load(*rank.world(), dir.path(), {run.model}, options);
      return dropout.calls();
    };
    dropout.set_calls(3);
    save(*rank.world(), dir.path(), 1, {run.model});
    EXPECT_EQ(read_manifest(step).dropout_calls.at("block0.drop_scores"), 3);
    EXPECT_EQ(calls_after_load({.exclude = {"**.drop_scores"}}), 7U);
    EXPECT_EQ(calls_after_load({}), 3U);
    Manifest older = read_manifest(step);
    older.dropout_calls.clear();
    WriteFile(step / "manifest.json", to_text(older));
    EXPECT_EQ(calls_after_load({}), 7U);
  });
}

}  // namespace
}  // namespace tessera::checkpoint
