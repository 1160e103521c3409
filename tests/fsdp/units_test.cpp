// Tests units: their shards, missing and repeated calls, calls that bypass the hooks, methods other
// than forward(), and arguments that a unit changes in place.

#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/nn/initialization.h"

namespace tessera::fsdp::units {

/// Expects that `model` and `alone` have equal gradients. An undefined gradient counts as zeros.
void expect_as_alone(const nn::ModuleBase& model, const nn::ModuleBase& alone) {
  const std::vector<at::Tensor> expected = gradients_of(alone);
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor& gradient = slot->persistent().grad();
    const at::Tensor& wanted = expected[i++];
    if (wanted.defined()) {
      ASSERT_TRUE(gradient.defined()) << name;
      EXPECT_TRUE(full_tensor(gradient).allclose(wanted, 1e-4, 1e-6)) << name;
    } else if (gradient.defined()) {
      EXPECT_EQ(full_tensor(gradient).abs().max().item<float>(), 0) << name;
    }
  }
}

// A block may be called before its root, or without its root. PyTorch's FSDP2 refuses both.
TEST(UnitCalls, AllowABlockWithoutItsRoot) {
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  (*alone.blocks[1])(batch(kDim, 0)).square().mean().backward();
  RunSharded(3, [&](Rank& rank, ShardedModel& model) {
    for (const bool root_ran : {false, true}) {
      (*model.blocks[1])(rows_of_rank(rank)).square().mean().backward();
      for (const auto& [name, slot] : model.named_slots()) {
        EXPECT_EQ(slot->persistent().grad().defined(), name.starts_with("block1.")) << name;
      }
      expect_as_alone(model, alone);
      expect_all_sharded(model);
      drop_gradients(model);
      if (!root_ran) {
        local_loss(model, rank).backward();
        expect_gradients(model, gradients_alone());
        drop_gradients(model);
      }
    }
  });
}

/// Makes block 1 throw once. `of_root`: whether the root is called; if not, only block 1 is called.
void fail_in_block(ShardedModel& model, const Rank& rank, bool in_backward, bool of_root) {
  auto fails = std::make_shared<bool>(true);
  model.blocks[1]->add_forward_pre_hook([=](auto&, nn::TensorList inputs) {
    if (!*fails) {
      return;
    }
    TESSERA_CHECK(in_backward, "planned");
    inputs.front()->register_hook([](const at::Tensor&) -> at::Tensor { fail("planned"); });
  });
  const at::Tensor x = rows_of_rank(rank).requires_grad_();
  EXPECT_ERROR((of_root ? model(x) : (*model.blocks[1])(x)).sum().backward(), "planned");
  *fails = false;
  drop_gradients(model);
}

TEST(UnitCalls, AllowABlockWithoutItsRootAfterAFailure) {
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  const auto add_to = [](const nn::ModuleBase& model) {
    for (const at::Tensor& parameter : parameters_of(model)) {
      parameter.detach().add_(0.25);
    }
  };
  add_to(alone);
  for (const auto& block : alone.blocks) {
    (*block)(batch(kDim, 0)).square().mean().backward();
  }
  for (int kind = 0; kind < 8; ++kind) {
    RunSharded(2, {.reshard_after_forward = (kind & 1) != 0}, [&](Rank& rank, ShardedModel& model) {
      fail_in_block(model, rank, (kind & 2) != 0, (kind & 4) != 0);
      add_to(model);
      for (const auto& block : model.blocks) {
        (*block)(rows_of_rank(rank)).square().mean().backward();
      }
      expect_as_alone(model, alone);
    });
  }
}

struct Headless : nn::Module<Headless> {
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(x)); }
  nn::Child<Block> first{*this, "first", kDim, kHidden};
  nn::Child<Block> second{*this, "second", kDim, kHidden};
  nn::Child<nn::Linear> head{*this, "head", kDim, kClasses};
};

/// Splits the hidden states into two chunks, as a chunked loss does. The chunks' backwards run
/// first, then the model's backward.
void chunked_backward(Headless& model, const at::Tensor& x) {
  const at::Tensor hidden = model(x);
  const at::Tensor leaf = hidden.detach().requires_grad_();
  for (const at::Tensor& chunk : leaf.chunk(2)) {
    ((*model.head)(chunk).square().sum() / x.size(0)).backward();
  }
  hidden.backward(leaf.grad());
}

TEST(UnitCalls, AllowSeveralBackwardsOfAHead) {
  Filled<Headless> alone;
  chunked_backward(alone, batch(kDim, 0));
  RunRanks(2, [&](Rank& rank) {
    for (const bool reshard : {true, false}) {
      Filled<Headless> model;
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      for (nn::ModuleBase* unit : std::initializer_list<nn::ModuleBase*>{
               &*model.first, &*model.second, &*model.head, &model}) {
        fully_shard(*unit, mesh, {.reshard_after_forward = reshard});
      }
      chunked_backward(model, rows_of_rank(rank));
      expect_as_alone(model, alone);
    }
  });
}

/// A unit with four results: two tensors with gradients, a tensor without a gradient, and a number.
struct Several : nn::Module<Several> {
  std::tuple<at::Tensor, at::Tensor, at::Tensor, int> forward(const at::Tensor& x) {
    const at::Tensor y = (*a)(x);
    return {y, (*b)(y), y.argmax(1), 3};
  }
  nn::Child<nn::Linear> a{*this, "a", kDim, kDim}, b{*this, "b", kDim, kDim};
};

at::Tensor loss_of_several(Several& first, Several& last, const at::Tensor& x, bool second) {
  const auto [y, z, best, three] = first(x);
  const auto [u, v, ignored, three_again] = last(second ? z : y);
  return u.square().mean() * (three + three_again);
}

TEST(UnitCalls, AllowUnusedResults) {
  for (const bool second : {false, true}) {
    Filled<Several> alone[2];
    loss_of_several(alone[0], alone[1], batch(kDim, 0), second).backward();
    RunRanks(3, [&](Rank& rank) {
      Filled<Several> models[2];
      for (Several& model : models) {
        fully_shard(model, rank.mesh({3}, {"dp"}));
      }
      loss_of_several(models[0], models[1], rows_of_rank(rank), second).backward();
      expect_as_alone(models[0], alone[0]);
      expect_as_alone(models[1], alone[1]);
    });
  }
}

TEST_ON_MESH(ListUnit, WarnsOnceAboutAModuleThatNeverRuns, {2}, {"dp"}) {
  Filled<OptionalLayer> model;
  fully_shard({&*model.base, &*model.extra}, mesh);
  fully_shard(model, mesh);
  const Warnings warnings("did not run");
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = model(uniform_values({4, 3}, 9), false).sum();
    EXPECT_FALSE(model.base->attached<Unit>()->unsharded());
    loss.backward();
    EXPECT_TRUE(model.base->slot("weight")->persistent().grad().defined());
  }
  EXPECT_EQ(warnings.messages().size(), 1u);
}

TEST_ON_MESH(ListUnit, DoesNotWarnIfAModuleRunsTwice, {2}, {"dp"}) {
  struct Model : nn::Module<Model> {
    at::Tensor forward(const at::Tensor& x) { return (*extra)((*extra)((*base)(x))); }
    nn::Child<nn::Linear> base{*this, "base", 3, 3}, extra{*this, "extra", 3, 3};
  };
  Filled<Model> model;
  fully_shard({&*model.base, &*model.extra}, mesh);
  fully_shard(model, mesh);
  const Warnings warnings("did not run");
  model(uniform_values({4, 3}, 9)).sum().backward();
  EXPECT_TRUE(warnings.messages().empty());
}

TEST_ON_MESH(ListUnit, MayBeginWithAModuleOutsideOfTheRoot, {2}, {"dp"}) {
  Filled<OptionalLayer> model;
  Filled<nn::Linear> outside(3, 3);
  fully_shard({&outside, &*model.base}, mesh);
  fully_shard(model, mesh);
  model(uniform_values({4, 3}, 9), false).sum().backward();
  EXPECT_EQ(model.base->attached<Unit>()->label(), "unit 'base'");
  EXPECT_TRUE(model.base->slot("weight")->persistent().grad().defined());
}

struct Coder : nn::Module<Coder> {
  at::Tensor forward(const at::Tensor& x) { return (*out)(encode(x)); }
  at::Tensor encode(const at::Tensor& x) { return (*in)(x).relu(); }
  void look() { seen = in->weight->sizes().vec(); }
  nn::Child<nn::Linear> in{*this, "in", 3, 5}, out{*this, "out", 5, 3};
  std::vector<std::int64_t> seen;
};

TEST(ForwardMethod, GathersAndReducesLikeForward) {
  const at::Tensor x = uniform_values({6, 3}, 1);
  Filled<Coder> alone;
  const at::Tensor expected = register_forward_method(alone, &Coder::encode)(x);
  expected.sum().backward();
  for (const int ranks : {1, 2, 4}) {
    RunOnMesh({ranks}, {"dp"}, [&](const DeviceMesh& mesh) {
      Filled<Coder> model;
      fully_shard(model, mesh);
      register_forward_method(model, &Coder::look)();
      EXPECT_EQ(model.seen, (std::vector<std::int64_t>{5, 3}));
      EXPECT_TRUE(tessera::is_distributed(model.in->weight));
      const at::Tensor code = register_forward_method(model, &Coder::encode)(x);
      EXPECT_TRUE(code.allclose(expected));
      code.sum().backward();
      EXPECT_TRUE(full_grad(*model.in).allclose(alone.in->weight->grad()));
      EXPECT_TRUE(tessera::is_distributed(model.in->weight));
    });
  }
  at::Tensor (Coder::*missing)(const at::Tensor&) = nullptr;
  EXPECT_ERROR(register_forward_method(alone, missing), "null");
}

TEST_ON_RANKS(Unshard, GathersOnceIfRepeated, 2) {
  Filled<nn::Linear> linear(3, 5);
  const at::Tensor before = linear.weight->detach().clone();
  fully_shard(linear, rank.mesh({2}, {"dp"}));
  const Sent sent(rank);
  UnshardHandle handle = start_unshard(linear);
  start_unshard(linear);
  handle.wait();
  handle.wait();
  unshard(linear);
  EXPECT_EQ(total(sent.table()).calls, 1);
  EXPECT_TRUE(linear.weight->detach().equal(before));
  reshard(linear);
  reshard(linear);
  EXPECT_TRUE(tessera::is_distributed(linear.weight));
}

TEST_ON_RANKS(UnshardHandle, OutlivesItsModule, 2) {
  auto linear = std::make_shared<nn::Linear>(3, 5);
  testing::fill(*linear);
  fully_shard(*linear, rank.mesh({2}, {"dp"}));
  UnshardHandle handle = start_unshard(*linear);
  reshard(*linear);
  linear.reset();
  EXPECT_NO_THROW(handle.wait());
}

struct OwnLayer : nn::Module<OwnLayer> {
  explicit OwnLayer(std::int64_t size) {
    weight = register_slot("weight", at::ones({size, size}));
    bias = register_slot("bias", at::ones({size}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, *weight, *bias); }
  nn::Parameter weight, bias;
};

struct OwnModel : nn::Module<OwnModel> {
  OwnModel() { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& ids) { return (*layer)((*table)(ids)); }
  nn::Child<nn::Embedding> table{*this, "table", 7, 4};
  nn::Child<OwnLayer> layer{*this, "layer", 4};
};

TEST(DirectForward, IsRefused) {
  const char* kAdvice = "(*m)(x) and not as m->forward(x)";
  const at::Tensor x = at::ones({3, 4}), ids = at::arange(6, at::kLong);
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      OwnLayer layer(4);
      fully_shard(layer, rank.mesh({ranks}, {"dp"}));
      EXPECT_ERROR(layer.forward(x), "argument 1", "argument 2, 'weight', [4, 4]", kAdvice);
      const at::Tensor out = layer(x);
      EXPECT_ERROR(layer.forward(x), kAdvice);
      out.sum().backward();
      EXPECT_TRUE(full_grad(layer, "bias").equal(at::ones({4}).mul(3)));
      EXPECT_ERROR(layer.forward(x), kAdvice);
    });
  }
  RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
    OwnLayer copy(4);
    replicate(copy, mesh);
    copy(x);
    EXPECT_ERROR(copy.forward(x), kAdvice);
    OwnModel stays_gathered;
    fully_shard(*stays_gathered.layer, mesh, {.reshard_after_forward = false});
    fully_shard(stays_gathered, mesh);
    stays_gathered(ids);
    EXPECT_ERROR(stays_gathered.layer->forward(x), kAdvice);
    OwnModel embedding_first;
    fully_shard(embedding_first, mesh);
    for (int i = 0; i < 2; ++i) {
      EXPECT_ERROR(embedding_first.forward(ids), "argument 0, 'table.weight', [7, 4]", "(dp=2)",
                   "(*m)(x)");
      embedding_first(ids);
    }
  });
}

TEST_ON_RANKS(Slots, ShowGatheredTensorsInForwardAndOnRequest, 2) {
  OwnLayer layer(4);
  fully_shard(layer, rank.mesh({2}, {"dp"}));
  const auto shown = [&] { return !tessera::is_distributed(layer.weight); };
  const at::Tensor out = layer(at::ones({3, 4}));
  EXPECT_FALSE(shown());
  const Sent sent(rank);
  {
    const UnshardScope outer(layer);
    { const UnshardScope inner(layer); }
    EXPECT_TRUE(shown());
  }
  EXPECT_FALSE(shown());
  EXPECT_TRUE(layer.slot("weight")->role.gathered);
  EXPECT_ERROR(layer.to(at::kBFloat16), "'weight'");
  out.sum().backward();
  EXPECT_FALSE(layer.slot("weight")->role.gathered);
  EXPECT_EQ(sent.calls("dp", "all_gather"), 0);
  unshard(layer);
  EXPECT_TRUE(shown());
  reshard(layer);
  EXPECT_FALSE(shown());
}

TEST_ON_RANKS(UninitializedParameters, AreRefusedBeforeAnyGather, 2) {
  const auto model = testing::made_on_meta<nn::Linear>(4, 4);
  const at::Tensor x = at::ones({3, 4});
  fully_shard(*model, rank.mesh({2}, {"dp"}));
  EXPECT_ERROR((*model)(x), "'weight', 'bias'", "nn::to_empty");
  EXPECT_ERROR(unshard(*model), "'weight'", "nn::to_empty");
  nn::to_empty(*model, at::kCPU);
  EXPECT_ERROR((*model)(x), "'weight', 'bias'", "nn::init_weights");
  EXPECT_TRUE(rank.world()->traffic().table().empty());
  nn::init_weights(*model, 0);
  EXPECT_NO_THROW((*model)(x).sum().backward());
}

// The following units change an argument in place. Autograd must throw, because the caller's tensor
// would have new values with the old autograd history.

using Act = at::Tensor (*)(at::Tensor& x);

struct Changing : nn::Module<Changing> {
  explicit Changing(Act act) : act_(act) { bias = register_slot("bias", at::ones({kDim})); }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = act_(x);
    return tessera::is_distributed(y) ? y : y + bias.slot()->get();
  }
  nn::Parameter bias;

 private:
  Act act_;
};

/// Computes h + unit(h) for h = first(x). `act_later` changes h and unit(h) in place before the
/// sum.
struct Net : nn::Module<Net> {
  explicit Net(Act act, bool act_later = false) : unit(*this, "unit", act), act_later_(act_later) {
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = (*first)(x), y = (*unit)(h);
    if (act_later_) {
      h.mul_(3);
      y.mul_(2);
    }
    return y + h;
  }
  nn::Child<nn::Linear> first{*this, "first", kDim, kDim};
  nn::Child<Changing> unit;

 private:
  bool act_later_;
};

TEST(ChangedInputs, AreRefusedIfChangedInPlace) {
  const auto error_of = [](Act act) {
    return ErrorsOfRanks(2, [&](Rank& rank) {
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      Net net(act);
      shard_units({&*net.unit, &net}, mesh);
      net(batch(kDim, 0)).sum().backward();
    });
  };
  EXPECT_CONTAINS(error_of([](at::Tensor& x) { return x.relu_(); }), "in place");
  EXPECT_CONTAINS(error_of([](at::Tensor& x) { return x.view(-1).relu_().view(x.sizes()); }),
                  "modified inplace");
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Changing unit([](at::Tensor& x) { return x.relu_(); });
    fully_shard(unit, mesh["dp"]);
    const at::Tensor leaf = distribute_tensor(batch(kDim, 0), mesh["tp"], {Shard{0}});
    const at::Tensor x = leaf.detach().requires_grad_();
    EXPECT_THROWN(c10::Error, unit(x.mul(1)), "must not change its arguments");
  });
}

TEST(ChangedInputs, AreAllowedIfCopiedOrChangedLater) {
  for (const bool later : {false, true}) {
    const Act act = [](at::Tensor& x) { return x.clone().relu_(); };
    Net alone(act, later);
    alone(batch(kDim, 0)).square().sum().backward();
    RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
      Net net(act, later);
      shard_units({&*net.unit, &net}, mesh);
      net(batch(kDim, 0)).square().sum().backward();
      expect_gradients(net, gradients_of(alone), 1, 1e-4, 1e-5);
    });
  }
}

}  // namespace tessera::fsdp::units
