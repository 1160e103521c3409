// Numbers that Python wraps in tensors (x + 1e-6) don't widen the result, and pending sums meet
// infinite ones as their values do.

#include <ATen/ScalarOps.h>

#include <limits>
#include <ostream>

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const std::vector<Placement> kReductions{Partial{}, Partial{ReduceOp::kAvg},
                                         Partial{ReduceOp::kMax}, Partial{ReduceOp::kMin},
                                         Partial{ReduceOp::kProduct}};

at::Tensor gathered(const at::Tensor& tensor) {
  return DistributedTensor(tensor).full_tensor();
}

struct WithNumber {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& number)> run;
};
std::ostream& operator<<(std::ostream& out, const WithNumber& c) {
  return out << c.name;
}

class WrappedNumber : public ::testing::TestWithParam<WithNumber> {};

/// Every type of `x` with every type of number; both of 0 and of 2 dimensions.
void expect_types_of_libtorch(const DeviceMesh& mesh, const WithNumber& c, const at::Tensor& x,
                              const at::Scalar& number) {
  const auto expected = c.run(x.clone(), at::native::wrapped_scalar_tensor(number));
  std::vector<Placement> placements = kReductions;
  placements.push_back(Replicate{});
  if (x.dim() > 0) {
    placements.push_back(Shard{0});
  }
  for (const auto& placement : placements) {
    if (!x.is_floating_point() && placement == Placement(Partial{ReduceOp::kAvg})) {
      continue;
    }
    const auto spread = distribute_tensor(x.clone(), mesh, {placement}).tensor().detach();
    const auto found = c.run(spread, at::native::wrapped_scalar_tensor(number));
    EXPECT_EQ(found.scalar_type(), expected.scalar_type())
        << x.scalar_type() << " " << to_string(placement) << " " << number;
    EXPECT_EQ(local_tensor(found).scalar_type(), expected.scalar_type());
    EXPECT_TRUE(at::allclose(gathered(found), expected)) << to_string(placement);
  }
}

TEST_P(WrappedNumber, GivesTheTypeThatLibtorchGives) {
  RunOnMesh({3}, {"x"}, [](const DeviceMesh& mesh) {
    for (const auto type : {at::kInt, at::kLong, at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{}, {5, 2}}) {
        const auto x = at::full(sizes, 3, type);
        for (const at::Scalar& number : {at::Scalar(2), at::Scalar(1.5)}) {
          expect_types_of_libtorch(mesh, GetParam(), x, number);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, WrappedNumber,
    ::testing::Values(
        WithNumber{"add", [](auto& x, auto& n) { return at::add(x, n); }},
        WithNumber{"add_with_alpha", [](auto& x, auto& n) { return at::add(x, n, 2); }},
        WithNumber{"sub", [](auto& x, auto& n) { return at::sub(x, n); }},
        WithNumber{"subtracted", [](auto& x, auto& n) { return at::sub(n, x); }},
        WithNumber{"rsub", [](auto& x, auto& n) { return at::rsub(x, n); }},
        WithNumber{"mul", [](auto& x, auto& n) { return at::mul(x, n); }},
        WithNumber{"div", [](auto& x, auto& n) { return at::div(x, n); }},
        WithNumber{"divided", [](auto& x, auto& n) { return at::div(n, x); }},
        WithNumber{"pow", [](auto& x, auto& n) { return at::pow(x, n); }},
        WithNumber{"maximum", [](auto& x, auto& n) { return at::maximum(x, n); }},
        WithNumber{"minimum", [](auto& x, auto& n) { return at::minimum(n, x); }},
        WithNumber{"where", [](auto& x, auto& n) { return at::where(x.gt(0), x, n); }},
        WithNumber{"remainder", [](auto& x, auto& n) { return at::remainder(x, n); }},
        WithNumber{"gt", [](auto& x, auto& n) { return at::gt(x, n); }},
        WithNumber{"add_in_place",
                   [](auto& x, auto& n) { return x.is_floating_point() ? x.add_(n) : x.add(n); }},
        WithNumber{"of_a_list",
                   [](auto& x, auto& n) {
                     return at::stack(at::_foreach_add({x, x}, at::Scalar(n.item())));
                   }}),
    [](const auto& param_info) { return param_info.param.name; });

TEST(WrappedNumbers, ComplexOnesGiveLibtorchsType) {
  RunOnMesh({3}, {"x"}, [](const DeviceMesh& mesh) {
    const auto number = at::native::wrapped_scalar_tensor(c10::complex<double>(0, 1));
    for (const Placement& placement : {Placement(Partial{}), Placement(Replicate{})}) {
      const at::Tensor x = distribute_tensor(at::ones({}), mesh, {placement});
      EXPECT_EQ(at::add(x, number).scalar_type(), at::kComplexFloat);
      EXPECT_EQ(at::mul(x, number).scalar_type(), at::kComplexFloat);
    }
  });
}

struct Scaled {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> run;
};
std::ostream& operator<<(std::ostream& out, const Scaled& c) {
  return out << c.name;
}

class PendingSum : public ::testing::TestWithParam<Scaled> {};

/// Terms of both signs, whose sum is of one.
TEST_P(PendingSum, CombinesWithInfinityAsItsValueDoes) {
  const auto value = at::tensor({1.0, -2.0, 3.0});
  const auto expected = GetParam().run(value.clone());
  RunOnMesh({3}, {"x"}, [&](Rank& rank, const DeviceMesh& mesh) {
    const auto term = value * (rank.rank() == 0 ? -3.0 : 2.0);
    const auto spread = [&](ReduceOp op, double scale) {
      return DistributedTensor::from_local(term * scale, mesh, {Partial{op}}).tensor().detach();
    };
    for (const auto& x : {spread(ReduceOp::kSum, 1), spread(ReduceOp::kAvg, 3)}) {
      GetParam().run(x.clone().mul_(2.0));
      EXPECT_TRUE(at::equal(gathered(GetParam().run(x.clone())), expected))
          << gathered(GetParam().run(x.clone()));
    }
  });
}

at::Tensor wrapped(double number) {
  return at::native::wrapped_scalar_tensor(number);
}

INSTANTIATE_TEST_SUITE_P(
    All, PendingSum,
    ::testing::Values(
        Scaled{"mul", [](const at::Tensor& x) { return at::mul(x, kInfinity); }},
        Scaled{"mul_in_place", [](at::Tensor x) { return x.mul_(-kInfinity); }},
        Scaled{"mul_wrapped", [](const at::Tensor& x) { return at::mul(x, wrapped(kInfinity)); }},
        Scaled{"mul_wrapped_in_place", [](at::Tensor x) { return x.mul_(wrapped(kInfinity)); }},
        Scaled{"div", [](const at::Tensor& x) { return at::div(x, 0.0); }},
        Scaled{"div_integer", [](const at::Tensor& x) { return at::div(x, 0); }},
        Scaled{"div_in_place", [](at::Tensor x) { return x.div_(0.0); }},
        Scaled{"div_wrapped", [](const at::Tensor& x) { return at::div(x, wrapped(0.0)); }},
        Scaled{"add_with_alpha",
               [](const at::Tensor& x) { return at::add(at::zeros_like(x), x, kInfinity); }},
        Scaled{"list", [](const at::Tensor& x) { return at::_foreach_mul({x}, kInfinity)[0]; }},
        Scaled{"list_div", [](const at::Tensor& x) { return at::_foreach_div({x}, 0.0)[0]; }},
        Scaled{"list_of_numbers",
               [](const at::Tensor& x) {
                 at::_foreach_mul_({x}, at::ArrayRef<at::Scalar>({kInfinity}));
                 return x;
               }}),
    [](const auto& param_info) { return param_info.param.name; });

TEST(PendingSums, StayPendingWhereTheNumberIsFinite) {
  RunOnMesh({3}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({5}), mesh, {Partial{}});
    const StrictScope strict;
    for (const double factor : {2.0, 0.0, -1e300}) {
      EXPECT_EQ(DistributedTensor(at::mul(x, factor)).placements(), Placements{Partial{}});
    }
    EXPECT_EQ(DistributedTensor(at::div(x, 3.0)).placements(), Placements{Partial{}});
  });
}

}  // namespace
}  // namespace tessera
