// The gathered input of column-wise Linears. Backward gathers the input again, or takes the input
// from the recomputation in activation checkpointing. Autograd's graph for an input x:
//
//   x shard <- GatherBackward <- x whole <- LinearInputBackward <- ProductBackward_i <- y_i
//                                            weight_i <- WeightBackward_i <-|
//                                            bias_i <-----------------------'
//
// The matrix products of one linear_products() call share one LinearInputBackward.
//
// WeightBackward has a lower sequence number than GatherBackward, so autograd runs WeightBackward
// later. As a result, backward
//   1. starts the gather of x in the first ProductBackward,
//   2. computes the gradients of x during the gather,
//   3. starts the reduce-scatter of the sum of these gradients,
//   4. computes the gradients of the weights during the reduce-scatter.
// Any other order is correct too, but loses the overlap or needs a second gather.

#include "internal.h"

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/layers.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::Edge;
using tessera::detail::Node;
using tessera::detail::variable_list;

void check_first_order() {
  TESSERA_CHECK(!c10::GradMode::is_enabled(),
                "a backward that gathers an input again cannot be differentiated; call backward "
                "without create_graph, or set .regather = false in the styles");
}

/// Returns `gradient` as a distributed tensor on `mesh`. A plain gradient is the same on all ranks
/// and becomes a replicated tensor.
DistributedTensor gradient_on(const DeviceMesh& mesh, const at::Tensor& gradient) {
  return tessera::is_distributed(gradient)
             ? DistributedTensor(gradient)
             : DistributedTensor::from_local(gradient, mesh, {Replicate{}});
}

/// The functions that compute the matrix products of a Linear and of its backward, for aten::linear
/// or for fp8. `bias` can be undefined.
struct Products {
  at::Tensor (*of_output)(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
  nn::detail::SharedInputNode::AddTerm add_of_input;
  at::Tensor (*of_weight)(Node& node, const at::Tensor& gradient, const at::Tensor& x);
};

constexpr Products kProducts{nn::detail::linear_product, nn::detail::with_product,
                             [](Node& node, const at::Tensor& gradient, const at::Tensor& x) {
                               return nn::detail::gradient_of_weight(
                                   node, 0, gradient.flatten(0, -2), x.flatten(0, -2));
                             }};
constexpr Products kFp8Products{
    nn::detail::fp8_product,
    [](const at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& weight) {
      const at::Tensor term = tessera::detail::fp8_linear_input_grad(gradient, weight);
      return sum.defined() ? sum.add(term) : term;
    },
    [](Node&, const at::Tensor& gradient, const at::Tensor& x) {
      return tessera::detail::fp8_linear_weight_grad(gradient, x);
    }};

/// The input x of column-wise Linears, gathered by one all-gather. Saves the shard of x for
/// backward, and gathers x again for the weights' gradients. Under activation checkpointing saves
/// the gathered x, because the recomputation gathers x anyway.
class GatheredInput {
 public:
  GatheredInput(const DistributedTensor& shard, const at::Tensor& whole)
      : saved_(tessera::detail::hooks_keep_tensors() ? whole : shard.tensor()) {}

  /// Called before each use of whole(). The first call starts the all-gather if a shard was saved.
  void expect_use() {
    if (waiting_++ == 0) {
      const c10::NoGradGuard no_grad;
      whole_ = DistributedTensor(saved_.unpack())
                   .redistribute({Replicate{}}, {.async = true, .source_unchanged = true});
    }
  }

  const at::Tensor& whole() const { return whole_.tensor(); }

  void end_use() {
    if (--waiting_ == 0) {
      whole_ = DistributedTensor();
      release_if_unused();
    }
  }

  /// Called when the autograd graph is freed: no further backward will run.
  void release() {
    released_ = true;
    release_if_unused();
  }

 private:
  void release_if_unused() {
    if (released_ && waiting_ == 0) {
      saved_.release();
    }
  }

  tessera::detail::KeptTensor saved_;
  DistributedTensor whole_;
  int waiting_ = 0;
  bool released_ = false;
};

struct GatherBackward final : Node {
  GatherBackward(std::shared_ptr<GatheredInput> i, const DistributedTensor& shard,
                 std::uint64_t late)
      : input(std::move(i)), mesh(shard.mesh()), shards(shard.placements()), late_number(late) {}

  variable_list apply(variable_list&& gradients) override {
    check_first_order();
    if (!gradients[0].defined()) {
      return {at::Tensor()};
    }
    return {gradient_on(mesh, gradients[0])
                .redistribute(shards, {.async = true, .source_unchanged = true})
                .tensor()};
  }
  void release_variables() override { input->release(); }
  std::string name() const override { return "GatherBackward"; }

  std::shared_ptr<GatheredInput> input;
  DeviceMesh mesh;
  Placements shards;
  std::uint64_t late_number;  ///< sequence number of WeightBackward (see the top of this file)
};

/// The autograd node of the weight's gradient: (gradient of y)^T x.
struct WeightBackward final : Node {
  WeightBackward(std::uint64_t number, std::shared_ptr<GatheredInput> i, const Products& p)
      : Node(number), products(p), input(std::move(i)) {}

  variable_list apply(variable_list&& gradients) override {
    check_first_order();
    const at::Tensor gradient = products.of_weight(*this, gradients[0], input->whole());
    input->end_use();
    return {gradient};
  }
  std::string name() const override { return "WeightBackward"; }

  const Products& products;
  std::shared_ptr<GatheredInput> input;
};

/// Passes the gradient of the output y to the nodes of the input and of the weight. The gradient of
/// the bias is the sum of the gradient's rows.
struct ProductBackward final : Node {
  ProductBackward(std::shared_ptr<GatheredInput> i, ShardingSpec o)
      : input(std::move(i)), output(std::move(o)) {}

  variable_list apply(variable_list&& gradients) override {
    check_first_order();
    variable_list results(num_outputs());
    if (!gradients[0].defined()) {
      return results;
    }
    const at::Tensor of_output =
        gradient_on(output.mesh, gradients[0]).redistribute(output.layout).tensor();
    if (task_should_compute_output(0)) {
      results[0] = of_output;
    }
    if (task_should_compute_output(1)) {
      input->expect_use();
      results[1] = of_output;
    }
    if (task_should_compute_output(2)) {
      results[2] = of_output.flatten(0, -2).sum(0);
    }
    return results;
  }
  std::string name() const override { return "ProductBackward"; }

  std::shared_ptr<GatheredInput> input;
  ShardingSpec output;
};

bool is_split_as(const at::Tensor& bias, const at::Tensor& weight) {
  if (!tessera::is_distributed(bias)) {
    return false;
  }
  const ShardingSpec& of_bias = sharding_spec(bias);
  const ShardingSpec& of_weight = sharding_spec(weight);
  return of_bias.mesh == of_weight.mesh && !of_bias.layout->is_partial() &&
         of_bias.layout->digits(0) == of_weight.layout->digits(0);
}

/// Returns the autograd node of the all-gather that made x; nullptr if x was not gathered.
tessera::detail::NodePtr<GatherBackward> gather_of(const at::Tensor& x, const at::Tensor& weight,
                                                   const at::Tensor& bias) {
  if (!c10::GradMode::is_enabled() || !x.requires_grad() || x.dim() < 2 ||
      !tessera::is_distributed(weight) || (bias.defined() && !is_split_as(bias, weight))) {
    return nullptr;
  }
  const Layout& layout = *sharding_spec(weight).layout;
  const bool columns = layout.mesh_ndim() == 1 && layout.sharded_dim(0) == 0;
  return columns ? tessera::detail::node_cast<GatherBackward>(x.grad_fn()) : nullptr;
}

/// Computes the matrix product of the local tensors without autograd. The last dimension of the
/// result is sharded like the first dimension of the weight.
at::Tensor local_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const Products& products) {
  const c10::NoGradGuard no_grad;
  const ShardingSpec& spec = sharding_spec(weight);
  Layout::Dims dims(static_cast<std::size_t>(x.dim()));
  dims.back() = spec.layout->digits(0);
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  // As in aten::linear, the matrix product adds the bias: a separate addition would round again.
  const at::Tensor local = products.of_output(local_tensor(x), local_tensor(weight),
                                              bias.defined() ? local_tensor(bias) : at::Tensor());
  return make_distributed(local,
                          {spec.mesh, Layout::intern(spec.layout->mesh_sizes(), std::move(dims))},
                          std::move(sizes));
}

at::Tensor regathered(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const Products& products, nn::detail::SharedInputNode& of_input) {
  const tessera::detail::NodePtr<GatherBackward> gather = gather_of(x, weight, bias);
  at::Tensor product = local_product(x, weight, bias, products);
  const auto node =
      tessera::detail::make_node<ProductBackward>(gather->input, sharding_spec(product));
  Edge of_weight;
  if (weight.requires_grad()) {
    const auto late =
        tessera::detail::make_node<WeightBackward>(gather->late_number, gather->input, products);
    tessera::detail::set_inputs(*late, weight);
    of_weight = Edge(late, late->add_input_metadata(product));
  }
  of_input.keep(weight);
  const Edge of_bias = bias.defined() ? tessera::detail::edge_to(bias) : Edge();
  node->set_next_edges({of_input.edge_of(product), of_weight, of_bias});
  tessera::detail::set_node(product, node);
  return product;
}

/// Computes matrix products that share one gathered input x. If x was not gathered, `others`
/// computes all products together; without `others` the products are computed one by one.
class RegatheredProducts final : public nn::detail::LinearProducts {
 public:
  explicit RegatheredProducts(const Products& products,
                              std::unique_ptr<nn::detail::LinearProducts> others = nullptr)
      : products_(products), others_(std::move(others)) {}

  at::Tensor add(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) override {
    if (gather_of(x, weight, bias) == nullptr) {
      return others_ != nullptr ? others_->add(x, weight, bias)
                                : products_.of_output(x, weight, bias);
    }
    if (of_input_ == nullptr || !of_input_->takes(x)) {
      of_input_ =
          tessera::detail::make_node<nn::detail::SharedInputNode>(x, products_.add_of_input);
    }
    return regathered(x, weight, bias, products_, *of_input_);
  }

 private:
  const Products& products_;
  std::unique_ptr<nn::detail::LinearProducts> others_;
  /// The autograd node that sums the gradient of x over all products of x. The node is replaced
  /// when add() gets another x.
  tessera::detail::NodePtr<nn::detail::SharedInputNode> of_input_;
};

std::unique_ptr<nn::detail::LinearProducts> make_regathered_products() {
  return std::make_unique<RegatheredProducts>(kProducts, nn::detail::make_linear_products());
}

std::unique_ptr<nn::detail::LinearProducts> make_regathered_fp8_products() {
  return std::make_unique<RegatheredProducts>(kFp8Products);
}

}  // namespace

at::Tensor gather_again_in_backward(const DistributedTensor& shard) {
  const Placements everywhere{Replicate{}};
  if (!c10::GradMode::is_enabled() || !shard.tensor().requires_grad()) {
    return shard.redistribute(everywhere);
  }
  at::Tensor whole;
  {
    const c10::NoGradGuard no_grad;
    whole = shard.redistribute(everywhere).tensor();
  }
  const std::uint64_t late_number = tessera::detail::take_sequence_number();
  // GatheredInput gets `whole` while `whole` has no autograd node. Otherwise GatheredInput would
  // own the node, which owns GatheredInput: a reference cycle.
  const auto node = tessera::detail::make_node<GatherBackward>(
      std::make_shared<GatheredInput>(shard, whole), shard, late_number);
  tessera::detail::set_inputs(*node, shard.tensor());
  tessera::detail::set_node(whole, node);
  return whole;
}

nn::detail::LinearProduct regathered_product(const nn::Linear& linear) {
  const Products& products = nn::is_fp8(linear) ? kFp8Products : kProducts;
  return [&products](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return RegatheredProducts(products).add(x, weight, bias);
  };
}

void set_regathered_product(nn::ModuleBase& module, bool regather) {
  if (auto* linear = dynamic_cast<nn::Linear*>(&module); linear != nullptr && regather) {
    linear->set_product(regathered_product(*linear), nn::is_fp8(*linear)
                                                         ? make_regathered_fp8_products
                                                         : make_regathered_products);
  }
}

}  // namespace tessera::tensor_parallel
