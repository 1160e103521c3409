// Tests AdamW and SGD against libtorch, updates of adjacent shards, and moments in bf16.

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <tuple>

#include "optim/local_shards.h"
#include "optim/parameters.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"

namespace tessera::optim {
namespace {

const AdamWOptions kOptions{
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

using Place = std::function<nn::SlotPtr(const at::Tensor& tensor, std::size_t i)>;

template <class Ours, class Reference, class Options, class ReferenceOptions>
void expect_as_libtorch(const Place& place, bool is_complex, const Options& options,
                        const ReferenceOptions& reference_options) {
  const auto ours = [is_complex](const at::Tensor& pairs) {
    return is_complex ? at::view_as_complex(pairs) : pairs;
  };
  std::vector<at::Tensor> parameters;
  std::vector<nn::SlotPtr> slots;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    parameters.push_back(values_of(i, 0, is_complex).requires_grad_());
    slots.push_back(place(ours(values_of(i, 0, is_complex)), i));
  }
  Reference reference(parameters, reference_options);
  Ours optimizer(slots, options);
  for (std::uint64_t step = 0; step < 4; ++step) {
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      parameters[i].mutable_grad() = values_of(i, 100 * (step + 1), is_complex);
      set_grad(slots[i], ours(values_of(i, 100 * (step + 1), is_complex)));
    }
    reference.step();
    optimizer.step();
  }
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    const at::Tensor found = full_tensor(slots[i]->get());
    EXPECT_CLOSE(is_complex ? at::view_as_real(found) : found, parameters[i].detach(), 1e-5, 1e-6)
        << i;
  }
  for (const StateTensor& state : optimizer.state()) {
    if (state.name != "step") {
      EXPECT_EQ(state.tensor.sizes(), state.slot->persistent().sizes());
      EXPECT_EQ(state.tensor.is_complex(), is_complex);
    }
  }
}

/// Compares with libtorch: plain, replicated and sharded parameters (some with empty shards), and a
/// parameter on a mesh that lacks some ranks.
template <class Ours, class Reference, class Options, class ReferenceOptions>
void expect_as_libtorch(const Options& options, const ReferenceOptions& reference_options) {
  const auto expect = [&](const Place& place, bool is_complex) {
    expect_as_libtorch<Ours, Reference>(place, is_complex, options, reference_options);
  };
  for (const bool is_complex : {false, true}) {
    expect([](const at::Tensor& tensor, std::size_t) { return slot_of(tensor); }, is_complex);
    RunOnMesh({4}, {"dp"}, [&](const DeviceMesh& mesh) {
      expect(
          [&](const at::Tensor& tensor, std::size_t i) {
            return slot_of(tensor, mesh, {i == 3 ? Placement(Replicate{}) : Shard{0}});
          },
          is_complex);
    });
  }
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    const std::vector<Placements> placements{
        {Shard{0}, Shard{0}}, {Shard{0}, Replicate{}}, {Shard{0}, Shard{1}}};
    expect(
        [&](const at::Tensor& tensor, std::size_t i) {
          return i == 3 ? slot_of(tensor, mesh["tp"], {Shard{1}})
                        : slot_of(tensor, mesh, placements[i]);
        },
        /*is_complex=*/false);
  });
}

TEST(AdamW, AgreesWithLibtorch) {
  expect_as_libtorch<AdamW, torch::optim::AdamW>(kOptions,
                                                 torch::optim::AdamWOptions(kOptions.lr)
                                                     .betas({kOptions.beta1, kOptions.beta2})
                                                     .eps(kOptions.eps)
                                                     .weight_decay(kOptions.weight_decay));
}

TEST(Sgd, AgreesWithLibtorch) {
  const std::vector<SgdOptions> cases{
      {.lr = 0.1},
      {.lr = 0.1, .weight_decay = 0.2},
      {.lr = 0.1, .momentum = 0.9},
      {.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.2}};
  for (const SgdOptions& options : cases) {
    expect_as_libtorch<Sgd, torch::optim::SGD>(options, torch::optim::SGDOptions(options.lr)
                                                            .momentum(options.momentum)
                                                            .nesterov(options.nesterov)
                                                            .weight_decay(options.weight_decay));
  }
}

TEST_ON_MESH(AdamW, ReducesAPendingGradient, {2}, {"tp"}) {
  const nn::SlotPtr slot = slot_of(at::ones({3}), mesh, {Replicate{}});
  const nn::SlotPtr reference = slot_of(at::ones({3}));
  const at::Tensor term = at::arange(3, at::kFloat) * (rank.rank() + 1);
  slot->get().mutable_grad() =
      DistributedTensor::from_local(term, mesh, {Partial{}}).tensor().detach();
  set_grad(reference, at::arange(3, at::kFloat) * 3);
  AdamW({slot}, kOptions).step();
  AdamW({reference}, kOptions).step();
  EXPECT_CLOSE(local_tensor(slot->get()), reference->get());
}

TEST(AdamW, UpdatesTiedParametersOnceAndSkipsMissingGradients) {
  const nn::SlotPtr tied = slot_of(at::ones({2})), reference = slot_of(at::ones({2}));
  const nn::SlotPtr without = slot_of(at::ones({2}));
  set_grad(tied, at::ones({2}));
  set_grad(reference, at::ones({2}));
  AdamW({tied, without, tied}, kOptions).step();
  AdamW({reference}, kOptions).step();
  EXPECT_FALSE(tied->get().detach().equal(at::ones({2})));
  EXPECT_EQUAL(tied->get().detach(), reference->get().detach());
  EXPECT_EQUAL(without->get().detach(), at::ones({2}));
}

TEST_ON_MESH(AdamW, SupportsParametersShardedLater, {2}, {"dp"}) {
  const nn::SlotPtr slot = slot_of(values_of(0, 0));
  AdamW optimizer({slot}, kOptions);
  slot->set(slot_of(values_of(0, 0), mesh, {Shard{0}})->get());
  set_grad(slot, values_of(0, 100));
  optimizer.step();
  const nn::SlotPtr reference = slot_of(values_of(0, 0));
  set_grad(reference, values_of(0, 100));
  AdamW({reference}, kOptions).step();
  EXPECT_CLOSE(slot->get(), reference->get().detach());
}

TEST(AdamW, RefusesStateOfAnotherDtype) {
  for (const c10::ScalarType moments : {at::kFloat, at::kBFloat16}) {
    const nn::SlotPtr slot = slot_of(at::ones({4}));
    AdamW optimizer({slot}, {.moment_dtype = moments});
    set_grad(slot, at::ones({4}));
    optimizer.step();
    slot->set(at::ones({4}, at::kDouble).requires_grad_());
    set_grad(slot, at::ones({4}, at::kDouble));
    EXPECT_ERROR(optimizer.step(), "type Double is needed now", "before the first step");
    slot->set(at::ones({4}).requires_grad_());
    set_grad(slot, at::ones({4}));
    optimizer.options().moment_dtype = moments == at::kFloat ? at::kBFloat16 : at::kFloat;
    EXPECT_ERROR(optimizer.step(), "the optimizer's state of a parameter of sizes [4]");
  }
}

TEST(AdamW, HasLibtorchsDefaults) {
  const torch::optim::AdamWOptions theirs;
  const AdamWOptions ours;
  EXPECT_EQ(ours.lr, theirs.lr());
  EXPECT_EQ(std::make_tuple(ours.beta1, ours.beta2), theirs.betas());
  EXPECT_EQ(ours.eps, theirs.eps());
  EXPECT_EQ(ours.weight_decay, theirs.weight_decay());
}

TEST(AdamW, RefusesInvalidCalls) {
  const nn::SlotPtr slot = slot_of(at::ones({4}));
  AdamW optimizer({slot}, kOptions);
  set_grad(slot, at::ones({4}));
  optimizer.step();
  slot->set(at::ones({2}).requires_grad_());
  set_grad(slot, at::ones({2}));
  EXPECT_ERROR(optimizer.step(), "has sizes [2] on cpu but had [4]");
  {
    nn::Linear module(2, 2);
    AdamW optimizer(module, kOptions);
    set_grad(module.slot("weight"), at::ones({2, 2}));
    EXPECT_ERROR(optimizer.step(), "which was never filled");
  }
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{slot_of(at::ones({2}))}, {.beta1 = 1.0}),
               "betas 1 and");
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{slot_of(at::ones({2}))}, {.lr = -1.0}), "lr -1");
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{slot_of(at::ones({2}))}, {.moment_dtype = at::kHalf}),
               "moments in Half");
}

TEST(MergeAdjoining, JoinsAdjacentTensors) {
  const at::Tensor buffer = at::arange(12, at::kFloat);
  const at::Tensor first = buffer.narrow(0, 0, 4), matrix = buffer.narrow(0, 0, 6).view({2, 3});
  const std::vector<at::Tensor> runs =
      merge_adjoining({matrix, buffer.narrow(0, 6, 4), at::ones({2})});
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQUAL(runs[0], buffer.narrow(0, 0, 10));
  EXPECT_EQ(runs[0].const_data_ptr(), buffer.const_data_ptr());
  EXPECT_EQUAL(runs[1], at::ones({2}));
  EXPECT_EQ(merge_adjoining({first, buffer.narrow(0, 5, 4)}).size(), 2U);
  EXPECT_EQ(merge_adjoining({buffer.narrow(0, 4, 4), first}).size(), 2U);
  EXPECT_EQ(merge_adjoining({first, buffer.view(at::kInt).narrow(0, 4, 4)}).size(), 2U);
  EXPECT_EQ(merge_adjoining({matrix.t(), buffer.narrow(0, 6, 4)}).size(), 2U);
}

TEST(ZerosBeside, AreAlignedToSixteenBytes) {
  const std::vector<std::int64_t> sizes{171, 1, 0, 4096, 3, 16};
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    std::vector<at::Tensor> tensors;
    for (const std::int64_t size : sizes) {
      tensors.push_back(at::empty({size}));
    }
    const std::vector<at::Tensor> zeros =
        zeros_beside(tensors, std::vector<c10::ScalarType>(tensors.size(), dtype));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(zeros[i].const_data_ptr()) % 16, 0U) << sizes[i];
      EXPECT_EQUAL(zeros[i], at::zeros({sizes[i]}, dtype));
      EXPECT_TRUE(zeros[i].storage().is_alias_of(zeros[0].storage()));
    }
  }
  const std::vector<at::Tensor> multiples =
      zeros_beside({at::empty({32}), at::empty({5})}, {at::kFloat, at::kFloat});
  EXPECT_TRUE(adjoins(multiples[0], multiples[1]));
  const std::vector<at::Tensor> counters = counters_beside(multiples);
  EXPECT_TRUE(adjoins(counters[0], counters[1]));
}

std::vector<nn::SlotPtr> neighbours(const at::Tensor& buffer) {
  const auto slot = [](const at::Tensor& tensor) {
    return std::make_shared<nn::ParameterSlot>(tensor.detach().requires_grad_(), true);
  };
  return {slot(buffer.narrow(0, 0, 6).view({2, 3})), slot(buffer.narrow(0, 6, 4))};
}

// In step 1 only one parameter has a gradient; in step 2 the gradients are not adjacent in memory.
TEST(AdamW, UpdatesDoNotDependOnAdjacency) {
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor buffer = normal_values({10}, 0).to(dtype);
    const std::vector<nn::SlotPtr> reference{slot_of(buffer.narrow(0, 0, 6).view({2, 3})),
                                             slot_of(buffer.narrow(0, 6, 4))};
    const std::vector<nn::SlotPtr> slots = neighbours(buffer);
    AdamW optimizer(slots, {.lr = 0.1});
    AdamW expected(reference, {.lr = 0.1});
    for (int step = 0; step < 4; ++step) {
      const at::Tensor grads = normal_values({10}, step + 1).to(dtype);
      for (const auto* list : {&slots, &reference}) {
        const at::Tensor own = grads.clone();
        (*list)[0]->get().mutable_grad() = own.narrow(0, 0, 6).view({2, 3});
        (*list)[1]->get().mutable_grad() = own.narrow(0, 6, 4);
        if (step == 1) {
          (*list)[0]->get().mutable_grad().reset();
        }
        if (step == 2) {
          (*list)[1]->get().mutable_grad() = grads.narrow(0, 6, 4).clone();
        }
      }
      optimizer.step();
      expected.step();
    }
    EXPECT_EACH(tensors_of(slots), tensors_of(reference), 1e-6);
  }
}

// A step must increment the version of each parameter, so that autograd finds the change.
TEST(AdamW, ChangesTheVersionsOfAdjacentParameters) {
  const std::vector<nn::SlotPtr> slots = neighbours(normal_values({10}, 0));
  const at::Tensor loss = slots[1]->get().square().sum();
  const at::Tensor grads = normal_values({10}, 1);
  slots[0]->get().mutable_grad() = grads.narrow(0, 0, 6).view({2, 3});
  slots[1]->get().mutable_grad() = grads.narrow(0, 6, 4);
  AdamW(slots, {.lr = 0.1}).step();
  EXPECT_THROWN(std::exception, loss.backward(), "modified by an inplace operation");
}

const AdamWOptions kNarrow{.lr = 1e-2,
                           .beta1 = 0.9,
                           .beta2 = 0.95,
                           .weight_decay = 0.1,
                           .moment_dtype = at::kBFloat16,
                           .seed = 3};

std::vector<nn::SlotPtr> plain_slots() {
  std::vector<nn::SlotPtr> slots;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    slots.push_back(slot_of(values_of(i, 100)));
  }
  return slots;
}

void run(AdamW& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    for (std::size_t i = 0; i < optimizer.parameters().size(); ++i) {
      set_grad(optimizer.parameters()[i], values_of(i, 1000 * (step + 1)));
    }
    optimizer.step();
  }
}

std::vector<at::Tensor> results(const std::vector<nn::SlotPtr>& slots) {
  AdamW optimizer(slots, kNarrow);
  run(optimizer, 0, 4);
  return tensors_of(optimizer);
}

// Shards over 2 and over 4 ranks are uneven or empty. One parameter is replicated.
TEST(NarrowMoments, HaveTheSameBitsOnOneMeshDimension) {
  const std::vector<at::Tensor> expected = results(plain_slots());
  for (const int ranks : {2, 4}) {
    RunOnMesh({ranks}, {"dp"}, [&](const DeviceMesh& mesh) {
      EXPECT_EACH(results({slot_of(values_of(0, 100), mesh, {Shard{0}}),
                           slot_of(values_of(1, 100), mesh, {Shard{0}}),
                           slot_of(values_of(2, 100), mesh, {Shard{1}}),
                           slot_of(values_of(3, 100), mesh, {Replicate{}})}),
                  expected);
    });
  }
}

TEST_ON_MESH(NarrowMoments, HaveTheSameBitsOnTwoMeshDimensions, {2, 2}, {"dp", "tp"}) {
  const std::vector<at::Tensor> expected = results(plain_slots());
  EXPECT_EACH(results({slot_of(values_of(0, 100), mesh, {Shard{0}, Shard{1}}),
                       slot_of(values_of(1, 100), mesh, {Shard{0}, Replicate{}}),
                       slot_of(values_of(2, 100), mesh, {Shard{0}, Shard{1}}),
                       slot_of(values_of(3, 100), mesh["tp"], {Shard{1}})}),
              expected);
}

/// Two of three dimensions are sharded, so the rows of a shard are not evenly spaced in the whole
/// tensor.
TEST_ON_MESH(NarrowMoments, HaveTheSameBitsInAnyDimensions, {2, 2}, {"a", "b"}) {
  const at::Tensor values = normal_values({3, 5, 7}, 1);
  const at::Tensor grad = normal_values({3, 5, 7}, 2);
  const auto after = [&](const nn::SlotPtr& slot) {
    AdamW optimizer({slot}, kNarrow);
    set_grad(slot, grad);
    optimizer.step();
    return full_tensor(optimizer.state().front().tensor);
  };
  const at::Tensor expected = after(slot_of(values));
  EXPECT_EQUAL(after(slot_of(values, mesh, {Shard{1}, Shard{2}})), expected);
}

/// With stochastic rounding, the mean of many bf16 moments equals the fp32 moment. With rounding to
/// nearest, the second moment (decay 0.999) would never change.
TEST(NarrowMoments, AreUnbiased) {
  const auto mean_of = [](c10::ScalarType type, std::size_t which) {
    const nn::SlotPtr slot = slot_of(at::zeros({20000}));
    AdamW optimizer({slot}, {.lr = 1e-3, .moment_dtype = type});
    for (int step = 0; step < 50; ++step) {
      set_grad(slot, at::full({20000}, step < 10 ? 1.0 : 0.7));
      optimizer.step();
    }
    return optimizer.state()[which].tensor.to(at::kDouble).mean().item<double>();
  };
  for (const std::size_t which : {0, 1}) {
    const double wide = mean_of(at::kFloat, which);
    EXPECT_NEAR(mean_of(at::kBFloat16, which), wide, 5e-4 * wide) << which;
  }
}

TEST(NarrowMoments, ContinueExactlyFromSavedState) {
  const std::vector<nn::SlotPtr> slots = plain_slots();
  AdamW optimizer(slots, kNarrow);
  run(optimizer, 0, 2);

  std::vector<nn::SlotPtr> copies;
  for (const nn::SlotPtr& slot : slots) {
    copies.push_back(slot_of(slot->get().detach()));
  }
  AdamW resumed(copies, kNarrow);
  const std::vector<StateTensor> from = optimizer.state();
  const std::vector<StateTensor> to = resumed.state();
  for (std::size_t i = 0; i < from.size(); ++i) {
    at::Tensor(to[i].tensor).copy_(from[i].tensor);
  }
  run(optimizer, 2, 4);
  run(resumed, 2, 4);
  EXPECT_EACH(tensors_of(slots), tensors_of(copies));
}

TEST(NarrowMoments, SupportEveryParameterDtype) {
  const nn::SlotPtr narrow = slot_of(at::ones({9}, at::kBFloat16));
  const nn::SlotPtr single = slot_of(at::ones({9}));
  const nn::SlotPtr wide = slot_of(at::ones({9}, at::kDouble));
  const nn::SlotPtr complex = slot_of(at::ones({9}, at::kComplexFloat));
  AdamW optimizer({narrow, single, wide, complex}, kNarrow);
  for (const nn::SlotPtr& slot : optimizer.parameters()) {
    set_grad(slot, at::ones({9}, slot->get().options()));
  }
  optimizer.step();
  const std::vector<StateTensor> state = optimizer.state();
  EXPECT_EQ(state[0].tensor.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state[2].tensor.scalar_type(), at::kFloat);
  EXPECT_EQ(state[3].tensor.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state[6].tensor.scalar_type(), at::kDouble);
  EXPECT_EQ(state[9].tensor.scalar_type(), at::kComplexFloat);
  EXPECT_NEAR(narrow->get()[0].item<double>(), 0.989, 4e-3);
  EXPECT_NEAR(single->get()[0].item<double>(), 0.989, 1e-6);
  EXPECT_NEAR(at::real(complex->get()[0]).item<double>(), 0.989, 1e-6);
}

/// The random numbers for a parameter must not depend on the other parameters of the optimizer.
TEST(NarrowMoments, AreRoundedByParameterName) {
  nn::Linear module(64, 64);
  module.named_slots();
  const auto squares_of = [&](std::vector<nn::SlotPtr> slots, std::size_t which) {
    AdamW optimizer(std::move(slots), kNarrow);
    for (const nn::SlotPtr& slot : optimizer.parameters()) {
      slot->set(at::ones(slot->get().sizes()).requires_grad_());
      set_grad(slot, at::full(slot->get().sizes(), 1.1));
    }
    optimizer.step();
    return optimizer.state()[3 * which + 1].tensor.clone();
  };
  const nn::SlotPtr weight = module.slot("weight");
  const nn::SlotPtr bias = module.slot("bias");
  const at::Tensor first = squares_of({weight, bias}, 0);
  EXPECT_EQUAL(first, squares_of({bias, weight}, 1));
  EXPECT_FALSE(first[0].equal(squares_of({weight, bias}, 1)));
}

}  // namespace
}  // namespace tessera::optim
