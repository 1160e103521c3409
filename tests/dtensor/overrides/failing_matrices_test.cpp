// Factorisations throw for what one matrix holds. Where the ranks share out a batch, all of them
// throw or none, and what follows works.

#include <limits>
#include <ostream>

#include "testing/distributed.h"

namespace tessera {
namespace {

struct Case {
  const char* name;
  std::function<void(const at::Tensor&)> run;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

/// Four matrices. The last is neither definite, invertible nor finite.
at::Tensor matrices(bool good) {
  auto batch = at::eye(3, at::kDouble).repeat({4, 1, 1});
  if (good) {
    return batch;
  }
  batch[3].fill_(0);
  return batch;
}

at::Tensor endless(at::Tensor batch) {
  batch[3].fill_(std::numeric_limits<double>::quiet_NaN());
  return batch;
}

/// What libtorch says of a failure, without the backtrace; empty if there is none.
std::string libtorch_message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

class FailingMatrices : public ::testing::TestWithParam<Case> {};

TEST_P(FailingMatrices, ThrowTheSameOnEveryRank) {
  const auto& run = GetParam().run;
  for (const auto& bad : {matrices(false), endless(matrices(true))}) {
    const auto expected = libtorch_message_of([&] { run(bad); });
    RunOnMesh({3}, {"x"}, [&](const DeviceMesh& mesh) {
      const at::Tensor split = distribute_tensor(bad, mesh, {Shard{0}});
      EXPECT_EQ(libtorch_message_of([&] { run(split); }), expected);
      const auto good = distribute_tensor(matrices(true), mesh, {Shard{0}});
      EXPECT_EQ(libtorch_message_of([&] { run(good.tensor()); }), "");
      EXPECT_TRUE(at::equal(good.full_tensor(), matrices(true)));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FailingMatrices,
    ::testing::Values(Case{"cholesky_ex", [](auto& a) { at::linalg_cholesky_ex(a, false, true); }},
                      Case{"inv_ex", [](auto& a) { at::linalg_inv_ex(a, true); }},
                      Case{"lu_factor_ex", [](auto& a) { at::linalg_lu_factor_ex(a, true, true); }},
                      Case{"ldl_factor_ex",
                           [](auto& a) { at::linalg_ldl_factor_ex(a, false, true); }},
                      Case{"solve_ex", [](auto& a) { at::linalg_solve_ex(a, a, true, true); }},
                      Case{"cholesky", [](auto& a) { at::linalg_cholesky(a); }},
                      Case{"inv", [](auto& a) { at::linalg_inv(a); }},
                      Case{"solve", [](auto& a) { at::linalg_solve(a, a); }},
                      Case{"cholesky_inverse", [](auto& a) { at::cholesky_inverse(a); }},
                      Case{"eigh", [](auto& a) { at::linalg_eigh(a); }},
                      Case{"eigvalsh", [](auto& a) { at::linalg_eigvalsh(a); }},
                      Case{"svd", [](auto& a) { at::linalg_svd(a); }},
                      Case{"eig", [](auto& a) { at::linalg_eig(a); }},
                      Case{"eigvals", [](auto& a) { at::linalg_eigvals(a); }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
