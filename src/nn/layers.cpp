// The layers Linear, Embedding, RMSNorm, LayerNorm, Dropout and FusedLinear, and the matrix
// products of several Linears.

#include "tessera/nn/detail/lora.h"
#include "tessera/nn/detail/records.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"

namespace tessera::nn::detail {

// The autograd node of a Linear. Forward and backward call the same operators as libtorch's linear,
// so results have the same bits. Linears with the same input share a node for the input's gradient.

namespace {

using tessera::detail::KeptTensor;
using tessera::detail::SavedVariable;
using tessera::detail::variable_list;

at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.flatten(0, -2);
}

bool sums_over(const Layout& layout, std::vector<int> mesh_dims) {
  std::ranges::sort(mesh_dims);
  return std::ranges::equal(layout.partial(), mesh_dims, [](const PartialDim& partial, int dim) {
    return partial == PartialDim{dim, ReduceOp::kSum};
  });
}

/// The two factors of a matrix product, and the dimension of each factor along which the product
/// sums.
struct Factors {
  const at::Tensor& a;
  int summed_of_a;
  const at::Tensor& b;
  int summed_of_b;

  int kept_of_a() const { return 1 - summed_of_a; }
  int kept_of_b() const { return 1 - summed_of_b; }
};

/// Whether multiplying the local shards of a and b gives a product in the layout of `sum`.
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

/// Whether addmm can add the product of a and b to `sum`. CUDA's addmm can add a product of bf16 or
/// fp16 matrices to an fp32 sum.
bool has_type_of_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() &&
         (sum.scalar_type() == a.scalar_type() ||
          (sum.is_cuda() && sum.scalar_type() == at::kFloat && a.element_size() == 2));
}

void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (sum.scalar_type() == a.scalar_type()) {
    sum.addmm_(a, b);
  } else {
    at::Tensor out = sum;
    at::addmm_out(out, out, a, b, sum.scalar_type());
  }
}

/// Whether a single operator can compute the matrix product and add the product to `sum` in place.
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
  /// `of_input`: the node for the gradient of x; nullptr if this LinearNode computes the gradient.
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
    // Usually the gradient of the weight comes first, so that x_ is freed early. If
    // takes_gradient(), the gradient of x comes first: the recomputation of x needs the gradient.
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
      // Autograd sums `rows` to the bias's shape, but does not copy a single row. rows.sum(0)
      // copies, so that the gradients of x and of the bias do not share memory.
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

  std::optional<KeptTensor> x_;  ///< the input x of the Linear, saved for the weight's gradient
  /// The weight, saved for the gradient of x; empty if a SharedInputNode computes this gradient.
  std::optional<SavedVariable> weight_;
};

/// Whether LinearNode supports the arguments of a Linear. libtorch's own node is used for vectors,
/// for autocast, and for a mix of plain and distributed tensors.
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

at::Tensor recorded_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            SharedInputNode* of_input) {
  // The node must be created before the matrix product: the node saves tensors, and a recomputation
  // (activation checkpointing) stops after the last saved tensor.
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
  // The result must not be a view made in no_grad mode: autograd forbids later in-place writes to
  // such views.
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
  tessera::detail::NodePtr<SharedInputNode> of_input_;
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

/// Releases the weights that a backward has used. A later backward can still need the other
/// weights.
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

namespace tessera::nn {

std::vector<at::Tensor> linear_products(
    const at::Tensor& x, const std::vector<std::reference_wrapper<Linear>>& linears) {
  std::vector<at::Tensor> results;
  const detail::MakeLinearProducts make =
      linears.empty() ? nullptr : linears.front().get().products_together();
  const auto is_like_first = [&](const Linear& linear) {
    return linear.products_together() == make;
  };
  if (make == nullptr || !std::ranges::all_of(linears, is_like_first)) {
    for (Linear& linear : linears) {
      results.push_back(linear(x));
    }
    return results;
  }
  const std::unique_ptr<detail::LinearProducts> products = make();
  const detail::LinearProduct product = [&](const at::Tensor& own, const at::Tensor& weight,
                                            const at::Tensor& bias) {
    return products->add(own, weight, bias);
  };
  for (Linear& linear : linears) {
    results.push_back(linear(x, product));
  }
  return results;
}

Linear::Linear(std::int64_t in_features, std::int64_t out_features, LinearOptions options)
    : in_features_(in_features), out_features_(out_features) {
  weight = register_slot("weight", {out_features, in_features});
  if (options.bias) {
    bias = register_slot("bias", {out_features});
  }
}

at::Tensor Linear::forward(const at::Tensor& x) {
  check_called();
  const at::Tensor y =
      product_ ? product_(x, *weight, own_bias()) : detail::linear_product(x, *weight, own_bias());
  const auto lora = attached<LoraBranch>();
  return lora == nullptr
             ? y
             : y.add((*lora->b)((*lora->a)(lora->input(x, is_training()))), lora->scale);
}

at::Tensor Linear::forward(const at::Tensor& x, const detail::LinearProduct& product) {
  check_called();
  TESSERA_CHECK(
      attached<LoraBranch>() == nullptr,
      "Linear: a function that replaces the matrix product was passed, but the module has "
      "an adapter, whose output would be lost; merge the adapter first (merge_lora)");
  return product(x, *weight, own_bias());
}

detail::MakeLinearProducts Linear::products_together() const {
  return attached<LoraBranch>() == nullptr && !checkpoints_calls() ? together_ : nullptr;
}

at::Tensor Linear::own_bias() const {
  return bias.defined() && !leaves_out_bias() ? *bias : at::Tensor();
}

void Linear::reset_parameters(const InitContext& init) {
  // Initialises a Linear like PyTorch: the bound is that of kaiming_uniform with a = sqrt(5).
  const double bound = in_features_ > 0 ? 1.0 / std::sqrt(static_cast<double>(in_features_)) : 0.0;
  init.fill(weight, init::uniform(-bound, bound));
  if (bias.defined()) {
    init.fill(bias, init::uniform(-bound, bound));
  }
  // The LoRA adapter's matrix B starts as zeros, so that a new adapter has no effect.
  if (const auto lora = attached<LoraBranch>()) {
    init.fill(lora->b->weight, init::zeros());
  }
}

Embedding::Embedding(std::int64_t num_embeddings, std::int64_t embedding_dim) {
  weight = register_slot("weight", {num_embeddings, embedding_dim});
}

at::Tensor Embedding::forward(const at::Tensor& indices) {
  check_called();
  return nn::embedding(weight, indices);
}

void Embedding::reset_parameters(const InitContext& init) {
  // Initialises an Embedding like PyTorch. Language models use a smaller standard deviation.
  init.fill(weight, init::normal(0.0, 1.0));
}

RMSNorm::RMSNorm(std::int64_t size, double eps) : eps_(eps) {
  weight = register_slot("weight", {size});
}

at::Tensor RMSNorm::forward(const at::Tensor& x) {
  check_called();
  return nn::rms_norm(x, weight, eps_);
}

std::pair<at::Tensor, at::Tensor> RMSNorm::forward(const at::Tensor& x,
                                                   const at::Tensor& residual) {
  check_called();
  return nn::add_rms_norm(x, residual, weight, eps_);
}

void RMSNorm::reset_parameters(const InitContext& init) {
  init.fill(weight, init::ones());
}

LayerNorm::LayerNorm(std::int64_t size, LayerNormOptions options) : size_(size), eps_(options.eps) {
  weight = register_slot("weight", {size});
  if (options.bias) {
    bias = register_slot("bias", {size});
  }
}

at::Tensor LayerNorm::forward(const at::Tensor& x) {
  check_called();
  return at::layer_norm(x, {size_}, *weight, *bias, eps_);
}

void LayerNorm::reset_parameters(const InitContext& init) {
  init.fill(weight, init::ones());
  if (bias.defined()) {
    init.fill(bias, init::zeros());
  }
}

Dropout::Dropout(double p) : p_(p) {
  // Dropout probability p = 1 is refused, because the scale 1 / (1 - p) would be infinite.
  TESSERA_CHECK(p >= 0.0 && p < 1.0, "dropout with probability ", p,
                " is invalid; it must be in [0, 1)");
}

at::Tensor Dropout::forward(const at::Tensor& x) {
  check_called();
  if (!is_training() || p_ == 0.0) {
    return x;
  }
  if (!key_) {
    TESSERA_CHECK(is_in_a_tree(),
                  "a Dropout was called in the forward of another module, but is not registered: "
                  "all unregistered Dropouts drop the same elements, in evaluation too; pass the "
                  "Dropout to register_module");
    key_ = RandomKey{0, stream_of(fqn()->c_str())};
  }
  // A recomputation gets the call number of the forward, and so repeats the dropout mask.
  return nn::dropout(x, p_, {key_->seed, substream(key_->stream, replayed_count(calls_))});
}

void Dropout::reset_parameters(const InitContext& init) {
  // init_buffers() does not change the key and the number of calls, which can come from a
  // checkpoint.
  if (!init.buffers_only() || !key_) {
    key_ = init.key();
  }
  calls_ = init.buffers_only() ? calls_ : 0;
}

namespace {

std::int64_t total_features(const std::vector<FusedPart>& parts, std::int64_t groups) {
  std::int64_t total = 0;
  for (const FusedPart& part : parts) {
    TESSERA_CHECK(groups > 0 && part.out_features > 0 && part.out_features % groups == 0,
                  "FusedLinear: part '", part.name, "' of ", part.out_features,
                  " features can't be split into ", groups,
                  " equal groups; pass a number of groups that divides every part");
    total += part.out_features;
  }
  TESSERA_CHECK(total > 0, "FusedLinear was given no parts; pass at least one");
  return total;
}

}  // namespace

FusedLinear::FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts,
                         FusedLinearOptions options)
    : Linear(in_features, total_features(parts, options.groups), {.bias = options.bias}),
      detail::FusedParts(std::move(parts), options.groups) {
  StoredParts stored{.parts = {}, .groups = groups_};
  for (const FusedPart& part : parts_) {
    stored.parts.push_back({part.name, part.out_features / groups_});
  }
  for (const auto& [name, slot] : slots()) {
    slot->role.stored_parts = stored;
  }
}

std::vector<at::Tensor> FusedLinear::split(const at::Tensor& output) const {
  const std::int64_t features = output.size(-1);
  const std::int64_t of_group = out_features() / groups_;
  // A shard of `output` can be split if the shard has whole groups, or if all parts have equal
  // sizes.
  const auto is_equal = [this](const FusedPart& part) {
    return part.out_features == parts_.front().out_features;
  };
  const bool whole = features == out_features();
  const bool equal = std::ranges::all_of(parts_, is_equal);
  const auto count = static_cast<std::int64_t>(parts_.size());
  TESSERA_CHECK(whole || (groups_ > 1 ? features % of_group == 0 : equal && features % count == 0),
                "FusedLinear: a tensor with ", features,
                " features can't be split into the module's parts, which have ", out_features(),
                " features in total; pass the result of forward, or a rank's share of it under "
                "fused_colwise_parallel");
  if (groups_ == 1 && equal) {
    return output.split(features / count, -1);
  }
  std::vector<std::int64_t> sizes;
  for (const FusedPart& part : parts_) {
    sizes.push_back(part.out_features / groups_);
  }
  if (groups_ == 1) {
    return output.split_with_sizes(sizes, -1);
  }
  std::vector<at::Tensor> parts =
      output.unflatten(-1, {features / of_group, of_group}).split_with_sizes(sizes, -1);
  for (at::Tensor& part : parts) {
    part = part.flatten(-2);
  }
  return parts;
}

}  // namespace tessera::nn
