// Two custom operators on distributed tensors: one with a sharding rule, one that computes on local
// tensors.
//   tessera-run --nproc 4 -- build/bin/tutorial_04_operators

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <iostream>
#include <optional>

#include "tessera/tessera.hpp"

using namespace tessera;

// [operator]
/// The operator's kernel, which is called with the local parts of distributed tensors.
at::Tensor scaled_product(const at::Tensor& a, const at::Tensor& b, double scale) {
  return at::mm(a, b) * scale;
}

/// Registers the operator as any libtorch extension does, without mention of distributed tensors.
TORCH_LIBRARY(tutorial, library) {
  library.def("scaled_product(Tensor a, Tensor b, *, float scale) -> Tensor");
  library.impl("scaled_product", torch::dispatch(c10::DispatchKey::CPU, &scaled_product));
}

at::Tensor call_scaled_product(const at::Tensor& a, const at::Tensor& b, double scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tutorial::scaled_product", "")
                             .typed<decltype(scaled_product)>();
  return op.call(a, b, scale);
}
// [operator]

// [autograd]
/// The operator's autograd function, written as for plain libtorch. `a` and `b` may be distributed
/// tensors; backward calls the same operator, with its sharding rule.
struct ScaledProduct : torch::autograd::Function<ScaledProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a,
                            const at::Tensor& b, double scale) {
    context->save_for_backward({a, b});
    context->saved_data["scale"] = scale;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_scaled_product(a, b, scale);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const double scale = context->saved_data["scale"].toDouble();
    return {call_scaled_product(gradients[0], saved[1].t(), scale),
            call_scaled_product(saved[0].t(), gradients[0], scale), at::Tensor()};
  }
};

at::Tensor scaled_product_with_gradient(const at::Tensor& a, const at::Tensor& b, double scale) {
  return ScaledProduct::apply(a, b, scale);
}

TORCH_LIBRARY_IMPL(tutorial, Autograd, library) {
  library.impl("scaled_product", &scaled_product_with_gradient);
}
// [autograd]

// [rule] The sharding rule. The rows of a, the columns of b, and the inner dimension of both get a
// label, as in einsum. A mesh dimension may split the matrix product along any one label. If the
// inner dimension is split, the result is Partial: each rank has one term of the sum.
std::optional<ShardingRule> rule_of_scaled_product(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const int rows = rules::add_factor(rule, call.tensor(0).size(0));
  const int columns = rules::add_factor(rule, call.tensor(1).size(1));
  const int inner = rules::add_reduced(rule, call.tensor(0).size(1), ReduceOp::kSum);
  rule.inputs = {{{rows}, {inner}}, {{inner}, {columns}}};
  rule.outputs = {{{rows}, {columns}}};
  return rule;
}
// The rule is registered before main(), like the operator.
const bool kIsRuled = (register_rule("tutorial::scaled_product", &rule_of_scaled_product), true);
// [rule]

/// Computes softmax over a split dimension, with explicit all-reduces of the maximum and the sum.
/// split_softmax() has no backward, because communicator collectives have no gradient.
at::Tensor split_softmax(const at::Tensor& x, const DeviceMesh& mesh) {
  const auto on_parts = [&](const std::vector<at::Tensor>& parts) {
    comm::Communicator& group = mesh.group();
    const at::Tensor& part = parts[0];
    // A shard may be empty, and amax() of an empty tensor would throw on that rank alone. The
    // appended -inf column prevents the error.
    const at::Tensor lowest = part.new_full({part.size(0), 1}, -INFINITY);
    const at::Tensor largest = at::cat({part, lowest}, -1).amax(-1, /*keepdim=*/true);
    group.all_reduce(largest, ReduceOp::kMax)->wait();
    const at::Tensor exponentials = at::exp(part - largest);
    const at::Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
    group.all_reduce(sum, ReduceOp::kSum)->wait();
    return std::vector<at::Tensor>{exponentials / sum};
  };
  return local_map(on_parts, {x}, mesh, {{Shard{1}}},
                   {.in_placements = {Placements{Shard{1}}}, .out_sizes = {x.sizes().vec()}})[0];
}

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"tp"});
  const StrictScope strict;  // throws for an operator that would gather implicitly

  const at::Tensor whole_a = at::arange(7 * 6, c10::kDouble).view({7, 6}) / 42;
  const at::Tensor whole_b = at::arange(6 * 5, c10::kDouble).view({6, 5}) / 30;
  const at::Tensor a = distribute_tensor(whole_a, mesh, {Shard{1}}).tensor().requires_grad_();
  const at::Tensor b = distribute_tensor(whole_b, mesh, {Shard{0}}).tensor().requires_grad_();
  const DistributedTensor product(call_scaled_product(a, b, 2.0));
  TESSERA_CHECK(at::allclose(product.full_tensor(), at::mm(whole_a, whole_b) * 2),
                "the product is wrong");

  product.tensor().sum().backward();
  const at::Tensor ones = at::ones({7, 5}, c10::kDouble);
  TESSERA_CHECK(
      at::allclose(DistributedTensor(a.grad()).full_tensor(), 2 * ones.mm(whole_b.t())) &&
          at::allclose(DistributedTensor(b.grad()).full_tensor(), 2 * whole_a.t().mm(ones)),
      "a gradient is wrong");

  const DistributedTensor shares(split_softmax(a.detach(), mesh));
  TESSERA_CHECK(at::allclose(shares.full_tensor(), whole_a.softmax(-1)), "the softmax is wrong");

  if (world->rank() == 0) {
    std::cout << "the product is " << to_string(product.placements()) << ", the softmax "
              << to_string(shares.placements()) << ", the gradients "
              << to_string(DistributedTensor(a.grad()).placements()) << " and "
              << to_string(DistributedTensor(b.grad()).placements()) << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}
