// The product of a Linear, with a node in autograd's graph instead of libtorch's two. Forward and
// gradients call the operators that libtorch's do, so that they have the same bits, and on
// distributed tensors the same layouts and collectives. Products that share x have a node for its
// gradient, which adds their terms as it computes them.

#include "tessera/nn/detail/linear_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtensor/detail/kept_tensor.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/internals/detail/graph.h"

namespace tessera::nn::detail {
namespace {

using tessera::detail::KeptTensor;
using tessera::detail::SavedVariable;
using tessera::detail::variable_list;

at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.flatten(0, -2);
}

/// The reduction over `mesh_dims` alone, by sums.
bool sums_over(const Layout& layout, std::vector<int> mesh_dims) {
  std::ranges::sort(mesh_dims);
  return std::ranges::equal(layout.partial(), mesh_dims, [](const PartialDim& partial, int dim) {
    return partial == PartialDim{dim, ReduceOp::kSum};
  });
}

/// Two matrices that are multiplied, and the dimension of each that is summed over.
struct Factors {
  const at::Tensor& a;
  int summed_of_a;
  const at::Tensor& b;
  int summed_of_b;

  int kept_of_a() const { return 1 - summed_of_a; }
  int kept_of_b() const { return 1 - summed_of_b; }
};

/// Whether the local part of `sum` takes the product of those of a and b, and no other part.
bool is_local_sum(const at::Tensor& sum, const Factors& factors) {
  const ShardingSpec& of_sum = sharding_spec(sum);
  const ShardingSpec& of_a = sharding_spec(factors.a);
  const ShardingSpec& of_b = sharding_spec(factors.b);
  return of_sum.mesh == of_a.mesh && of_sum.mesh == of_b.mesh && !of_a.layout->is_partial() &&
         !of_b.layout->is_partial() &&
         of_a.layout->digits(factors.summed_of_a) == of_b.layout->digits(factors.summed_of_b) &&
         of_sum.layout->digits(0) == of_a.layout->digits(factors.kept_of_a()) &&
         of_sum.layout->digits(1) == of_b.layout->digits(factors.kept_of_b()) &&
         sums_over(*of_sum.layout, of_a.layout->mesh_dims_of(factors.summed_of_a));
}

/// Whether a product is computed in the type of `sum`. On CUDA one of 16-bit matrices may be fp32.
bool has_type_of_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() &&
         (sum.scalar_type() == a.scalar_type() ||
          (sum.is_cuda() && sum.scalar_type() == at::kFloat && a.element_size() == 2));
}

/// sum += a b, as it is computed.
void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (sum.scalar_type() == a.scalar_type()) {
    sum.addmm_(a, b);
  } else {
    at::Tensor out = sum;
    at::addmm_out(out, out, a, b, sum.scalar_type());
  }
}

/// Whether the product may be added to `sum` as it is computed.
bool can_add(const at::Tensor& sum, const Factors& factors) {
  const auto& [a, summed_of_a, b, summed_of_b] = factors;
  if (!sum.defined() || sum.layout() != c10::kStrided || !has_type_of_product(sum, a, b) ||
      sum.sizes() != at::IntArrayRef{a.size(factors.kept_of_a()), b.size(factors.kept_of_b())} ||
      !local_tensor(sum).is_contiguous()) {
    return false;
  }
  const bool distributed = tessera::is_distributed(sum);
  return tessera::is_distributed(a) == distributed && tessera::is_distributed(b) == distributed &&
         (!distributed || is_local_sum(sum, factors));
}

struct LinearNode final : tessera::detail::Node {
  /// Before its product. `of_input`: computes the gradient of x, from that of the result; nullptr:
  /// this node does.
  LinearNode(const at::Tensor& x, const at::Tensor& weight, SharedInputNode* of_input) {
    if (weight.requires_grad()) {
      x_.emplace(x);
    }
    if (of_input != nullptr) {
      of_input->keep(weight);
    } else if (x.requires_grad()) {
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
    const bool of_x = task_should_compute_output(0), of_weight = task_should_compute_output(1);
    // Before x_ is computed again only where that spares a pass over what x is made of: else that
    // memory is freed before more is needed.
    if (of_x && of_weight && weight_ && x_->takes_gradient()) {
      results[0] = gradient_of_input(gradient, rows);
    }
    if (of_weight) {
      results[1] = gradient_of_weight(*this, 1, rows, as_matrix(x_->unpack(results[0])));
    }
    if (of_x && !results[0].defined()) {
      results[0] = weight_ ? gradient_of_input(gradient, rows) : gradient;
    }
    if (task_should_compute_output(2)) {
      // The engine sums it to the bias's sizes; of one row without a copy, which a gradient that is
      // read later must not be.
      results[2] = results[0].is_same(gradient) ? rows.sum(0) : rows;
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

 private:
  at::Tensor gradient_of_input(const at::Tensor& gradient, const at::Tensor& rows) const {
    std::vector<std::int64_t> sizes = gradient.sizes().vec();
    const at::Tensor weight = weight_->unpack();
    sizes.back() = weight.size(1);
    return at::mm(rows, weight).reshape(sizes);
  }

  std::optional<KeptTensor> x_;          ///< for the gradient of the weight
  std::optional<SavedVariable> weight_;  ///< for that of x, where this node computes it
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

/// A product that takes a node. `of_input`: as of LinearNode.
at::Tensor recorded_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            SharedInputNode* of_input) {
  // Before the product: a recomputation ends with the last tensor that is kept.
  const auto node = tessera::detail::make_node<LinearNode>(x, weight, of_input);
  tessera::detail::set_inputs(*node, x, weight, bias);
  at::Tensor y;
  {
    const c10::NoGradGuard no_grad;
    y = product(x, weight, bias);
  }
  if (of_input != nullptr) {
    node->set_next_edge(0, of_input->edge_of(y));
  }
  // A view that was made without gradients may not be written to with them.
  if (y.is_view()) {
    y = tessera::detail::alias_tensor(y);
  }
  tessera::detail::set_node(y, node);
  return y;
}

class PlainProducts final : public LinearProducts {
 public:
  at::Tensor add(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) override {
    if (!x.requires_grad() || !takes_node(x, weight, bias)) {
      return linear_product(x, weight, bias);
    }
    if (of_input_ == nullptr || !of_input_->takes(x)) {
      of_input_ = tessera::detail::make_node<SharedInputNode>(x, with_product);
    }
    return recorded_product(x, weight, bias, of_input_.get());
  }

 private:
  tessera::detail::NodePtr<SharedInputNode> of_input_;  ///< of the last one
};

}  // namespace

SharedInputNode::SharedInputNode(const at::Tensor& x, AddTerm add_term) : add_term_(add_term) {
  tessera::detail::set_inputs(*this, x);
}

variable_list SharedInputNode::apply(variable_list&& gradients) {
  const std::lock_guard lock(mutex_);
  at::Tensor sum;
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) {
      sizes = gradients[i].sizes().vec();
      sum = add_term_(sum, as_matrix(gradients[i]), weights_[i].saved.unpack());
      weights_[i].used = true;
      gradients[i].reset();
    }
  }
  if (sum.defined()) {
    sizes.back() = sum.size(1);
    sum = sum.reshape(sizes);
  }
  return {sum};
}

/// Releases the weights that a backward has used. The others wait for the backward of their result.
void SharedInputNode::release_variables() {
  const std::lock_guard lock(mutex_);
  for (Weight& weight : weights_) {
    if (weight.used) {
      weight.saved.reset_data();
    }
  }
}

at::Tensor with_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (!sum.defined()) {
    return at::mm(a, b);
  }
  if (c10::GradMode::is_enabled() || !can_add(sum, {a, 1, b, 0})) {
    return sum.add(at::mm(a, b));
  }
  add_product(local_tensor(sum), local_tensor(a), local_tensor(b));
  return sum;
}

at::Tensor gradient_of_weight(tessera::detail::Node& node, std::size_t output,
                              const at::Tensor& rows, const at::Tensor& x) {
  const tessera::detail::OpenGradient open(node, node.next_edge(output));
  if (!can_add(open.tensor(), {rows, 0, x, 0})) {
    return at::mm(rows.t(), x);
  }
  add_product(local_tensor(open.tensor()), local_tensor(rows).t(), local_tensor(x));
  return {};
}

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return takes_node(x, weight, bias) ? recorded_product(x, weight, bias, nullptr)
                                     : product(x, weight, bias);
}

std::unique_ptr<LinearProducts> make_linear_products() {
  return std::make_unique<PlainProducts>();
}

}  // namespace tessera::nn::detail
