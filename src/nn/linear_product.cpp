// The product of a Linear, with a node in autograd's graph instead of libtorch's two. Forward and
// gradients call the operators that libtorch's do, so that they have the same bits, and on
// distributed tensors the same layouts and collectives.

#include "tessera/nn/detail/linear_product.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtensor/detail/kept_tensor.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/alias_tensor.h"
#include "tessera/internals/detail/autocast_state.h"
#include "tessera/internals/detail/graph_node.h"
#include "tessera/internals/detail/leaf_node.h"

namespace tessera::nn::detail {
namespace {

using tessera::detail::KeptTensor;
using tessera::detail::SavedVariable;
using tessera::detail::variable_list;

at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.flatten(0, -2);
}

/// Whether the local part of `sum` takes the product of those of rows^T and x, and no other part.
bool is_local_sum(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& x) {
  const ShardingSpec& of_sum = sharding_spec(sum);
  const ShardingSpec& of_rows = sharding_spec(rows);
  const ShardingSpec& of_x = sharding_spec(x);
  const auto whole_rows = [](const Layout& layout) {
    return layout.digits(0).empty() && !layout.is_partial();
  };
  return of_sum.mesh == of_rows.mesh && of_sum.mesh == of_x.mesh && whole_rows(*of_rows.layout) &&
         whole_rows(*of_x.layout) && !of_sum.layout->is_partial() &&
         of_sum.layout->digits(0) == of_rows.layout->digits(1) &&
         of_sum.layout->digits(1) == of_x.layout->digits(1);
}

bool can_add(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& x) {
  if (!sum.defined() || sum.layout() != c10::kStrided || sum.scalar_type() != rows.scalar_type() ||
      sum.scalar_type() != x.scalar_type() ||
      sum.sizes() != at::IntArrayRef{rows.size(1), x.size(1)} ||
      !local_tensor(sum).is_contiguous()) {
    return false;
  }
  const bool distributed = tessera::is_distributed(sum);
  return tessera::is_distributed(rows) == distributed &&
         tessera::is_distributed(x) == distributed && (!distributed || is_local_sum(sum, rows, x));
}

struct LinearNode final : tessera::detail::Node {
  LinearNode(const at::Tensor& x, const at::Tensor& weight) {
    if (weight.requires_grad()) {
      x_.emplace(x);
    }
    if (x.requires_grad()) {
      weight_.emplace(weight, /*is_output=*/false);
    }
  }

  variable_list apply(variable_list&& gradients) override {
    variable_list results(num_outputs());
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) {
      return results;
    }
    const std::lock_guard lock(mutex_);
    const at::Tensor rows = as_matrix(gradient);
    // First: what x_ computes again is freed before more memory is needed.
    if (task_should_compute_output(1)) {
      results[1] = gradient_of_weight(*this, 1, rows, as_matrix(x_->unpack()));
    }
    if (task_should_compute_output(0)) {
      std::vector<std::int64_t> sizes = gradient.sizes().vec();
      const at::Tensor weight = weight_->unpack();
      sizes.back() = weight.size(1);
      results[0] = at::mm(rows, weight).reshape(sizes);
    }
    if (task_should_compute_output(2)) {
      results[2] = rows;  // the engine sums it to the bias's sizes
    }
    return results;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    if (x_) {
      x_->release();
    }
    if (weight_) {
      weight_->reset_data();
    }
  }

  std::string name() const override { return "LinearBackward"; }

  std::optional<KeptTensor> x_;
  std::optional<SavedVariable> weight_;
};

/// What the node's formulas are for; libtorch has them for the rest: vectors, autocast, a plain
/// tensor beside a distributed one.
bool takes_node(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!tessera::detail::is_recorded(x, weight, bias) || x.dim() < 2 || weight.dim() != 2 ||
      x.layout() != c10::kStrided || weight.layout() != c10::kStrided ||
      tessera::detail::autocasts(x.device().type())) {
    return false;
  }
  const bool distributed = tessera::is_distributed(x);
  return tessera::is_distributed(weight) == distributed &&
         (!bias.defined() || tessera::is_distributed(bias) == distributed);
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
}

}  // namespace

at::Tensor gradient_of_weight(tessera::detail::Node& node, std::size_t output,
                              const at::Tensor& rows, const at::Tensor& x) {
  const tessera::detail::OpenGradient open(node, node.next_edge(output));
  if (!can_add(open.tensor(), rows, x)) {
    return at::mm(rows.t(), x);
  }
  const at::Tensor sum = local_tensor(open.tensor());
  sum.addmm_(local_tensor(rows).t(), local_tensor(x));
  return {};
}

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!takes_node(x, weight, bias)) {
    return product(x, weight, bias);
  }
  // Before the product: a recomputation ends with the last tensor that is kept.
  const auto node = tessera::detail::make_node<LinearNode>(x, weight);
  tessera::detail::set_inputs(*node, x, weight, bias);
  at::Tensor y;
  {
    const c10::NoGradGuard no_grad;
    y = product(x, weight, bias);
  }
  // A view that was made without gradients may not be written to with them.
  if (y.is_view()) {
    y = tessera::detail::alias_tensor(y);
  }
  tessera::detail::set_node(y, node);
  return y;
}

}  // namespace tessera::nn::detail
