#include <ATen/core/dispatch/Dispatcher.h>

#include <limits>
#include <set>

#include "dtensor/listing_mode.h"
#include "operators/operator_info.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "testing/distributed.h"

namespace tessera {

// What the outcome of a call depends on tells calls apart.

namespace {

using testing::values;

TEST_ON_MESH(CallKey, TellsPlainTensorsOfOtherStridesApart, {2}, {"x"}) {
  const at::Tensor d = distribute_tensor(values({4, 1}), mesh, {Replicate{}});
  const ReplicationScope scope;
  const auto plain = values({8, 4}).t();
  at::add(d, plain.contiguous());
  const auto y = at::add(d, plain);
  EXPECT_EQ(y.strides(), local_tensor(y).strides());
  EXPECT_EQ(y.strides(), at::add(values({4, 1}), plain).strides());
  EXPECT_EQUAL(y, values({4, 1}).add(plain));
}

// equal() compares the parts, which a strict scope allows, where there are any; those of meta
// tensors it cannot.
TEST_ON_MESH(CallKey, TellsMetaTensorsApart, {2}, {"x"}) {
  const auto on = [&](c10::DeviceType device) {
    return distribute_tensor(values({4, 2}).to(device), mesh, {Shard{0}}).tensor();
  };
  const auto x = on(at::kCPU), meta = on(at::kMeta);
  EXPECT_THROWN(c10::Error, at::equal(meta, meta.clone()), "aten::equal", "Meta tensors");
  const StrictScope strict;
  EXPECT_TRUE(at::equal(x, x.clone()));
}

// A plan that was made for a tensor which is its own must not serve a copy that may be out of date.
TEST_ON_MESH(CallKey, TellsViewsThatHoldACopyApart, {2}, {"x"}) {
  const at::Tensor x = distribute_tensor(values({4, 2}), mesh, {Shard{0}});
  const auto view = x.slice(0, 1, 3);
  const at::Tensor own = distribute_tensor(values({2, 2}), mesh, {Replicate{}});
  ASSERT_EQ(DistributedTensor(view).placements(), DistributedTensor(own).placements());
  for (int i = 0; i < 2; ++i) {
    own.neg();
  }
  EXPECT_EQUAL(view.neg(), values({4, 2}).slice(0, 1, 3).neg());
  x.zero_();
  EXPECT_ERROR(view.neg(), "aten::neg");
}

TEST_ON_MESH(CallKey, AComplexNumberThatARuleWouldReadLeavesTheCallWithoutOne, {4}, {"x"}) {
  const auto plain = at::complex(values({5, 3}), values({5, 3}, 1));
  for (const Placement& placement : {Placement(Shard{0}), Placement(Partial{})}) {
    const at::Tensor x = distribute_tensor(plain, mesh, {placement});
    for (const c10::complex<double> value : {c10::complex<double>(0, 1), {2, 0}, {0, 0}}) {
      const auto found = at::constant_pad_nd(x, {1, 1}, value);
      EXPECT_CLOSE(found, at::constant_pad_nd(plain, {1, 1}, value));
    }
  }
}

TEST(CallKey, ClearingTheCacheReleasesTheMeshesOfRedistributions) {
  std::weak_ptr<comm::World> world;
  {
    const auto made = comm::fake_world(0, 2);
    world = made;
    const auto mesh = init_device_mesh(made, {2}, {"x"});
    distribute_tensor(values({4}), mesh, {Shard{0}}).redistribute({Partial{}});
  }
  EXPECT_FALSE(world.expired());
  clear_dispatch_cache();
  EXPECT_TRUE(world.expired());
}

// A call has one key, whether its arguments come unboxed, as to the kernels that a training step
// calls most, or on a stack, as they do inside an operator mode.

using Arguments = std::vector<c10::IValue>;

struct UnboxedCalls {
  const char* name;
  std::vector<Arguments> calls;  ///< arguments that are left out take their defaults
};

at::Tensor spread(const at::Tensor& tensor, const Placement& placement = Shard{0}) {
  static const auto mesh = init_device_mesh(comm::fake_world(0, 1), {1}, {"x"});
  return distribute_tensor(tensor, mesh, {placement}).tensor().detach();
}

at::Tensor wrapped(const at::Scalar& number) {
  const at::Tensor tensor = at::scalar_tensor(number, at::kDouble);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

std::vector<UnboxedCalls> elementwise_calls() {
  const auto x = spread(values({4, 4}).abs()), y = spread(values({4, 4}, 1).abs(), Replicate{});
  const double infinity = std::numeric_limits<double>::infinity();
  const c10::complex<double> i(0, 1);
  const std::vector<Arguments> pairs{{x, y}, {x, wrapped(2.5)}, {x, wrapped(0)}, {y, x}};
  const std::vector<Arguments> scalars{{x, 2}, {x, 0}, {x, 2.5}, {x, infinity}, {x, true}, {x, i}};
  return {
      {"add.Tensor", {{x, y}, {x, y, 2}, {x, y, 0.5}, {x, wrapped(1)}}},
      {"add_.Tensor", {{x, y}, {x, wrapped(infinity)}}},
      {"add.Scalar", {{x, 2}, {x, 2.5, 3}, {x, true}, {x, i}}},
      {"sub.Tensor", {{x, y}, {x, y, 2}}},
      {"mul.Tensor", pairs},
      {"mul_.Tensor", pairs},
      {"mul.Scalar", scalars},
      {"div.Tensor", pairs},
      {"div_.Tensor", pairs},
      {"div.Scalar", scalars},
      {"neg", {{x}, {y}}},
      {"silu", {{x}}},
      {"silu_backward", {{x, y}}},
      {"rsqrt", {{x}}},
      {"pow.Tensor_Scalar", {{x, 2}, {x, 0.5}, {x, 0}}},
  };
}

std::vector<UnboxedCalls> network_calls() {
  const auto x = spread(values({4, 4})), batch = spread(values({2, 4, 4}));
  const auto q = spread(values({2, 2, 4, 8})), lse = spread(values({2, 2, 4}));
  const auto index = spread(at::arange(4), Replicate{});
  using Dims = std::vector<std::int64_t>;
  const c10::IValue none;
  const std::vector<Arguments> reductions{
      {x, Dims{0}}, {x, Dims{-1}, true}, {x, Dims{}}, {x, none}, {x, Dims{1}, false, at::kFloat}};
  return {
      {"mm", {{x, x}}},
      {"bmm", {{batch, batch}}},
      {"addmm", {{x, x, x}, {x, x, x, 0, 0.5}, {x, x, x, 1.0, 2}}},
      {"embedding", {{x, index}, {x, index, 2}, {x, index, -1, true}}},
      {"_scaled_dot_product_flash_attention_for_cpu",
       {{q, q, q}, {q, q, q, 0.0, true}, {q, q, q, 0.0, false, none, 0.25}}},
      {"_scaled_dot_product_flash_attention_for_cpu_backward",
       {{q, q, q, q, q, lse, 0.0, false}, {q, q, q, q, q, lse, 0.0, true, none, 0.25}}},
      {"sum.dim_IntList", reductions},
      {"mean.dim", reductions},
      {"_softmax", {{x, 1, false}, {x, -1, false}}},
      {"_log_softmax", {{x, 1, false}, {x, -1, false}}},
      {"_log_softmax_backward_data", {{x, x, 1, at::kDouble}}},
  };
}

std::vector<UnboxedCalls> fused_calls() {
  const auto x = spread(values({4, 6})), weight = spread(values({6}), Replicate{});
  const auto rows = spread(values({4, 1}).abs()), whole = spread(values({4, 6}), Replicate{});
  const auto index = spread(at::arange(4), Replicate{}), x_index = spread(at::arange(4));
  const auto sums = spread(values({4}).abs());
  const auto heads = spread(values({2, 3, 2, 4})), table = spread(values({3, 4}), Replicate{});
  const auto lse = spread(values({2, 3, 2}));
  using Sizes = std::vector<std::int64_t>;
  const c10::IValue none;
  return {
      {"tessera::dropout",
       {{x, 0.5, 1, 2}, {x, 0.0, 0, 2, 5}, {x, 0.5, 1, 2, 0, std::vector<std::int64_t>{4, 6}}}},
      {"tessera::embedding", {{x, index}, {whole, index}}},
      {"tessera::embedding_backward", {{x, x_index, whole}}},
      {"tessera::cross_entropy", {{x, index}, {x, index, 1, 0.1, 0.2}, {whole, index}}},
      {"tessera::cross_entropy_backward",
       {{sums, x, index, sums}, {sums, x, index, sums, 1, 0.1, 0.2}}},
      {"tessera::fp8_linear", {{x, whole}}},
      {"tessera::fp8_linear_input_grad", {{x, spread(values({6, 3}), Replicate{})}}},
      {"tessera::fp8_linear_weight_grad", {{x, x}}},
      {"tessera::silu_mul", {{x, x}}},
      {"tessera::silu_mul_backward", {{x, x, x}}},
      {"tessera::silu_mul_with_gradients", {{x, x, x}}},
      {"tessera::rms_norm", {{x, weight, 1e-5}, {x, none, 1e-6}}},
      {"tessera::add_rms_norm", {{x, x, weight, 1e-5}, {x, x, none, 1e-6}}},
      {"tessera::rms_norm_backward",
       {{x, x, weight, rows}, {x, x, none, rows}, {x, x, weight, rows, x}}},
      {"tessera::rotary_embedding", {{heads, table, table}, {heads, table, table, true}}},
      {"tessera::rotary_embedding_qk",
       {{heads, heads, table, table}, {heads, heads, table, table, true}}},
      {"tessera::chunked_attention",
       {{heads, heads, heads, Sizes{0}},
        {heads, heads, heads, Sizes{0}, 1},
        {heads, heads, heads, Sizes{0}, 0, Sizes{0, 1, 2, 4}}}},
      {"tessera::chunked_attention_backward",
       {{heads, heads, heads, heads, heads, lse, Sizes{0}},
        {heads, heads, heads, heads, heads, lse, Sizes{0}, 1},
        {heads, heads, heads, heads, heads, lse, Sizes{0}, 0, Sizes{0, 1, 2, 4}}}},
  };
}

std::vector<UnboxedCalls> view_calls() {
  const auto x = spread(values({4, 6})), flat = spread(values({4, 1, 6}));
  using Sizes = std::vector<std::int64_t>;
  const c10::IValue none;
  const c10::List<at::Tensor> list({x, x});
  return {
      {"view", {{x, Sizes{24}}, {x, Sizes{4, 2, -1}}}},
      {"_unsafe_view", {{x, Sizes{24}}}},
      {"t", {{x}}},
      {"transpose.int", {{x, 0, 1}, {x, -1, 0}}},
      {"permute", {{x, Sizes{1, 0}}}},
      {"expand", {{flat, Sizes{4, 3, 6}}, {flat, Sizes{2, 4, -1, 6}, true}}},
      {"unsqueeze", {{x, 0}, {x, -1}}},
      {"squeeze.dim", {{flat, 1}, {flat, 0}}},
      {"select.int", {{x, 1, 2}, {x, 1, -1}}},
      {"slice.Tensor", {{x}, {x, 1, 2, 5}, {x, 1, none, 3, 2}}},
      {"split.Tensor", {{x, 3, 1}, {x, 2, -1}}},
      {"cat", {{list, 0}, {list, -1}}},
      {"stack", {{list, 0}, {list, -1}}},
      {"clone", {{x}, {x, at::MemoryFormat::Contiguous}, {x, at::MemoryFormat::Preserve}}},
  };
}

std::vector<UnboxedCalls> list_calls() {
  const auto list = [](int seed) {
    return c10::List<at::Tensor>(
        {spread(values({4}, seed).abs()), spread(values({2, 3}, seed).abs(), Replicate{})});
  };
  const auto x = list(0), y = list(1), z = list(2);
  return {
      {"_foreach_add_.List", {{x, y}, {x, y, 0.5}, {x, y, 2}}},
      {"_foreach_add_.Scalar", {{x, 1}, {x, 1.5}, {x, 0}}},
      {"_foreach_mul_.List", {{x, y}}},
      {"_foreach_mul_.Scalar", {{x, 2}, {x, 2.5}}},
      {"_foreach_mul_.Tensor", {{x, wrapped(2)}, {x, spread(at::scalar_tensor(2.0), Replicate{})}}},
      {"_foreach_div_.List", {{x, y}}},
      {"_foreach_sqrt_", {{x}, {y}}},
      {"_foreach_lerp_.Scalar", {{x, y, 0.25}}},
      {"_foreach_addcmul_.Scalar", {{x, y, z}, {x, y, z, 0.5}}},
      {"_foreach_addcdiv_.Scalar", {{x, y, z}, {x, y, z, 2}}},
  };
}

std::vector<UnboxedCalls> all_calls() {
  std::vector<UnboxedCalls> all;
  for (auto& calls :
       {elementwise_calls(), network_calls(), fused_calls(), view_calls(), list_calls()}) {
    all.insert(all.end(), calls.begin(), calls.end());
  }
  return all;
}

c10::OperatorHandle find(const std::string& name) {
  const auto dot = std::min(name.find('.'), name.size());
  const std::string library = name.find("::") == std::string::npos ? "aten::" : "";
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      (library + name.substr(0, dot)).c_str(),
      dot < name.size() ? name.substr(dot + 1).c_str() : "");
}

void run(const c10::OperatorHandle& op, Arguments arguments) {
  const auto& parameters = op.schema().arguments();
  while (arguments.size() < parameters.size()) {
    arguments.push_back(parameters[arguments.size()].default_value().value_or(c10::IValue()));
  }
  op.callBoxed(arguments);
}

TEST(UnboxedKey, IsThatOfTheBoxedCall) {
  const at::NoGradGuard no_grad;
  const ReplicationScope plain_ones_are_equal;
  ListingMode mode;  // lets every operator run, and so takes its arguments from a stack
  for (const UnboxedCalls& calls : all_calls()) {
    SCOPED_TRACE(calls.name);
    const auto op = find(calls.name);
    for (std::size_t i = 0; i < calls.calls.size(); ++i) {
      const auto before = detail::dispatch_cache_statistics();
      clear_dispatch_cache();
      run(op, calls.calls[i]);
      const auto unboxed = detail::dispatch_cache_statistics();
      EXPECT_GT(unboxed.misses, before.misses) << i;
      {
        const OperatorModeScope scope(mode);
        run(op, calls.calls[i]);
      }
      const auto boxed = detail::dispatch_cache_statistics();
      EXPECT_EQ(boxed.misses, unboxed.misses) << i;
      EXPECT_EQ(boxed.hits, unboxed.hits + 1) << i;
    }
  }
}

/// The operators with a rule whose kernel on our key is none of those that stand instead of a plan.
std::set<std::string> unboxed_operators() {
  std::set<std::string> names;
  for (const auto name : ruled_operators()) {
    const bool libtorchs = name.starts_with("aten::");
    const std::string short_name(name.substr(libtorchs ? std::string_view("aten::").size() : 0));
    const bool own = detail::OperatorTraits(name).has(detail::Trait::kOwnKernel);
    if (!own && find(short_name).hasKernelForDispatchKey(c10::DispatchKey::Fake)) {
      names.insert(short_name);
    }
  }
  return names;
}

TEST(UnboxedKey, IsTestedForEveryUnboxedKernel) {
  std::set<std::string> tried;
  for (const UnboxedCalls& calls : all_calls()) {
    tried.insert(calls.name);
  }
  EXPECT_EQ(tried, unboxed_operators());
}

}  // namespace
}  // namespace tessera
