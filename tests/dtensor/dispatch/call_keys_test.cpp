#include <ATen/core/dispatch/Dispatcher.h>

#include <limits>

#include "dtensor/listing_mode.h"
#include "operators/operator_info.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "testing/distributed.h"

namespace tessera {

// Calls that run differently must have different keys in the dispatch cache.

namespace {

using testing::values;

TEST_ON_MESH(CallKey, DependsOnTheStridesOfPlainTensors, {2}, {"x"}) {
  const at::Tensor d = distribute_tensor(values({4, 1}), mesh, {Replicate{}});
  const ReplicationScope scope;
  const auto plain = values({8, 4}).t();
  at::add(d, plain.contiguous());
  const auto y = at::add(d, plain);
  EXPECT_EQ(y.strides(), local_tensor(y).strides());
  EXPECT_EQ(y.strides(), at::add(values({4, 1}), plain).strides());
  EXPECT_EQUAL(y, values({4, 1}).add(plain));
}

// A StrictScope allows equal() for CPU tensors, but not for meta tensors, which have no values.
TEST_ON_MESH(CallKey, DistinguishesMetaTensors, {2}, {"x"}) {
  const auto on = [&](c10::DeviceType device) {
    return distribute_tensor(values({4, 2}).to(device), mesh, {Shard{0}}).tensor();
  };
  const auto x = on(at::kCPU), meta = on(at::kMeta);
  EXPECT_THROWN(c10::Error, at::equal(meta, meta.clone()), "aten::equal", "Meta tensors");
  const StrictScope strict;
  EXPECT_TRUE(at::equal(x, x.clone()));
}

// A view along a sharded dimension copies data, so calls with such a view need another cache key.
TEST_ON_MESH(CallKey, DistinguishesViewsThatCopyData, {2}, {"x"}) {
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

TEST_ON_MESH(CallKey, IsAbsentIfTheRuleReadsAComplexNumber, {4}, {"x"}) {
  const auto plain = at::complex(values({5, 3}), values({5, 3}, 1));
  for (const Placement& placement : {Placement(Shard{0}), Placement(Partial{})}) {
    const at::Tensor x = distribute_tensor(plain, mesh, {placement});
    for (const c10::complex<double> value : {c10::complex<double>(0, 1), {2, 0}, {0, 0}}) {
      const auto found = at::constant_pad_nd(x, {1, 1}, value);
      EXPECT_CLOSE(found, at::constant_pad_nd(plain, {1, 1}, value));
    }
  }
}

TEST(DispatchCache, ReleasesMeshesWhenCleared) {
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

// Operators get unboxed arguments, or arguments on a stack in an operator mode. Both forms of a
// call must have the same key in the dispatch cache.

using Arguments = std::vector<c10::IValue>;

struct UnboxedCalls {
  const char* name;
  std::vector<Arguments> calls;
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

/// Returns, for each argument type, calls whose argument values differ: their keys must differ.
std::vector<UnboxedCalls> all_calls() {
  const auto x = spread(values({4, 4}).abs()), y = spread(values({4, 4}, 1).abs(), Replicate{});
  const auto q = spread(values({2, 2, 4, 8})), flat = spread(values({4, 1, 6}));
  const auto weight = spread(values({4}), Replicate{});
  const auto index = spread(at::arange(4), Replicate{});
  const double infinity = std::numeric_limits<double>::infinity();
  const c10::complex<double> i(0, 1);
  const c10::IValue none;
  using Sizes = std::vector<std::int64_t>;
  const c10::List<at::Tensor> list({x, x});
  return {
      {"add.Tensor", {{x, y}, {x, y, 2}, {x, y, 0.5}, {x, wrapped(1)}}},
      {"div.Tensor", {{x, y}, {x, wrapped(2.5)}, {x, wrapped(0)}, {x, wrapped(infinity)}}},
      {"mul.Scalar", {{x, 2}, {x, 0}, {x, 2.5}, {x, infinity}, {x, true}, {x, i}}},
      {"embedding", {{x, index}, {x, index, 2}, {x, index, -1, true}}},
      {"_scaled_dot_product_flash_attention_for_cpu",
       {{q, q, q}, {q, q, q, 0.0, true}, {q, q, q, 0.0, false, none, 0.25}}},
      {"sum.dim_IntList",
       {{x, Sizes{0}}, {x, Sizes{}}, {x, none}, {x, Sizes{1}, false, at::kFloat}}},
      {"tessera::dropout", {{x, 0.5, 1, 2}, {x, 0.0, 0, 2, 5}, {x, 0.5, 1, 2, 0, Sizes{4, 4}}}},
      {"tessera::rms_norm", {{x, weight, 1e-5}, {x, none, 1e-6}}},
      {"view", {{x, Sizes{16}}, {x, Sizes{4, 2, -1}}}},
      {"expand", {{flat, Sizes{4, 3, 6}}, {flat, Sizes{2, 4, -1, 6}, true}}},
      {"slice.Tensor", {{x}, {x, 1, 2, 4}, {x, 1, none, 3, 2}}},
      {"cat", {{list, 0}, {list, -1}}},
      {"clone", {{x}, {x, at::MemoryFormat::Contiguous}, {x, at::MemoryFormat::Preserve}}},
  };
}

void run(const c10::OperatorHandle& op, Arguments arguments) {
  const auto& parameters = op.schema().arguments();
  while (arguments.size() < parameters.size()) {
    arguments.push_back(parameters[arguments.size()].default_value().value_or(c10::IValue()));
  }
  op.callBoxed(arguments);
}

TEST(UnboxedKey, EqualsTheKeyOfTheBoxedCall) {
  const at::NoGradGuard no_grad;
  const ReplicationScope plain_ones_are_equal;
  ListingMode mode;
  for (const UnboxedCalls& calls : all_calls()) {
    SCOPED_TRACE(calls.name);
    const std::string name = calls.name;
    const auto op =
        detail::find_operator(name.find("::") == std::string::npos ? "aten::" + name : name);
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

}  // namespace
}  // namespace tessera
