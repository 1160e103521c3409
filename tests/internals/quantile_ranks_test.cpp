#include "tessera/internals/detail/quantile_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

// 0.3, as a float, is more than three tenths: three tenths of ten are then 3 as a float, and above 3
// as a double.
TEST(QuantileRanksCanary, AreOfTheTypeThatLibtorchTakes) {
  const auto found = at::quantile(at::arange(11, at::kFloat), 0.3, {}, false, "higher");
  const bool wide = detail::type_of_quantile_ranks(at::kFloat) == at::kDouble;
  EXPECT_EQ(found.item<float>(), wide ? 4 : 3);
}

}  // namespace
}  // namespace tessera
