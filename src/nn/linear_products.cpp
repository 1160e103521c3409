#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/nn/linear.h"

namespace tessera::nn {
namespace {

using Linears = std::vector<std::reference_wrapper<Linear>>;

/// What makes the products of all; nullptr: there is nothing that does.
detail::MakeLinearProducts products_of_all(const Linears& linears) {
  const detail::MakeLinearProducts first =
      linears.empty() ? nullptr : linears.front().get().products_together();
  const auto is_like_first = [&](const Linear& linear) {
    return linear.products_together() == first;
  };
  return std::ranges::all_of(linears, is_like_first) ? first : nullptr;
}

}  // namespace

std::vector<at::Tensor> linear_products(const at::Tensor& x, const Linears& linears) {
  std::vector<at::Tensor> results;
  const detail::MakeLinearProducts make = products_of_all(linears);
  if (make == nullptr) {
    for (Linear& linear : linears) {
      results.push_back(linear(x));
    }
    return results;
  }
  const std::unique_ptr<detail::LinearProducts> products = make();
  const LinearProduct product = [&](const at::Tensor& own, const at::Tensor& weight,
                                    const at::Tensor& bias) {
    return products->add(own, weight, bias);
  };
  for (Linear& linear : linears) {
    results.push_back(linear(x, product));
  }
  return results;
}

}  // namespace tessera::nn
