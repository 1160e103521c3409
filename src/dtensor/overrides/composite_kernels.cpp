#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/detach.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "dispatch/call_cache.h"
#include "operators/operator_info.h"
#include "plan/call_plan.h"
#include "random/fills.h"
#include "rank/rank.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "views/views.h"

namespace tessera::detail {

// Kernels for composite operators whose libtorch implementation fails on distributed tensors. Plain
// tensors still use libtorch's implementation. operator_info.cpp lists the operators (kOwnKernel,
// kHelperTensors).

namespace {

// Kernels for operators that read memory. A distributed tensor has no memory of its own, so these
// kernels gather the tensor first.

at::Tensor whole(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor() : tensor;
}

const DeviceMesh& mesh_of(const std::vector<at::Tensor>& tensors) {
  return sharding_spec(*std::ranges::find_if(tensors, tessera::is_distributed)).mesh;
}

/// Throws Error if plain and distributed tensors must not be combined. Called before the kernel
/// runs any operator, so that no collective runs before the error.
void check_mixing(const std::string& name, const std::vector<at::Tensor>& tensors) {
  if (std::ranges::none_of(tensors, tessera::is_distributed) ||
      plain_is_replicated_on(mesh_of(tensors))) {
    return;
  }
  const DeviceMesh& mesh = mesh_of(tensors);
  const auto plain = std::ranges::find_if(tensors, [](const at::Tensor& tensor) {
    return !tessera::is_distributed(tensor) && (tensor.numel() > 1 || tensor.requires_grad());
  });
  TESSERA_CHECK(plain == tensors.end(), name,
                " mixes distributed tensors with plain tensors (distributed tensors on ",
                to_string(mesh), ", and a plain tensor of sizes ", plain->sizes(),
                "); distribute the plain tensor first, or use a ReplicationScope if it is equal on "
                "all ranks");
  compare_plain(mesh, name, tensors);
}

/// Whether at least one of `tensors` is distributed, and each plain tensor has at most one element.
/// Does not check whether the plain tensors are replicated.
bool has_only_distributed(const std::vector<at::Tensor>& tensors) {
  const auto fits = [](const at::Tensor& tensor) {
    return tessera::is_distributed(tensor) || tensor.numel() <= 1;
  };
  return std::ranges::any_of(tensors, tessera::is_distributed) &&
         std::ranges::all_of(tensors, fits);
}

std::vector<at::Tensor> tensors_of_call(const OperatorInfo& info, const torch::jit::Stack& stack) {
  return bind_call(info, std::span(stack).last(info.arguments.size())).tensors;
}

std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& where,
                                     std::int64_t dim) {
  check_mixing("aten::tensor_split", {self, where});
  return composite::tensor_split(self, whole(where), dim);
}

// The kernel of reshape. Adds to libtorch's error messages that the sizes are global sizes.
at::Tensor reshape(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  try {
    return composite::reshape_symint(self, sizes);
  } catch (c10::Error& error) {
    if (tessera::is_distributed(self)) {
      add_global_sizes(error, self);
    }
    throw;
  }
}

// Kernels for gradient formulas. libtorch's formulas write a gradient into plain zeros, so a
// distributed gradient would have to be gathered. These kernels write into distributed zeros.

at::Tensor value_selecting_reduction_backward(const at::Tensor& gradient, std::int64_t dim,
                                              const at::Tensor& indices,
                                              c10::SymIntArrayRef symbolic_sizes, bool keepdim) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic_sizes);
  if (!tessera::is_distributed(gradient) || !tessera::is_distributed(indices)) {
    return composite::value_selecting_reduction_backward(gradient, dim, indices, sizes, keepdim);
  }
  const bool kept = keepdim || sizes.empty();
  const auto values = kept ? gradient : gradient.unsqueeze(dim);
  return values.new_zeros(sizes).scatter(dim, kept ? indices : indices.unsqueeze(dim), values);
}

// Kernels for operators that make plain helper tensors (a mask, a window, positions). The helper
// tensors are equal on all ranks, so libtorch's composite kernels run in a ReplicationScope.

/// Converts plain results on the stack to replicated distributed tensors. A plain result, such as a
/// mask, is equal on all ranks.
void distribute_results(const DeviceMesh& mesh, std::size_t results, torch::jit::Stack& stack) {
  for (std::size_t i = stack.size() - results; i < stack.size(); ++i) {
    if (stack[i].isTensor() && !tessera::is_distributed(stack[i].toTensor())) {
      const Placements everywhere(static_cast<std::size_t>(mesh.ndim()), Replicate{});
      stack[i] = distribute_tensor(stack[i].toTensor(), mesh, everywhere).tensor();
    }
  }
}

/// Runs libtorch's composite kernel of the operator. The operators that this kernel calls are
/// dispatched to kDistributedKey one by one.
void redispatch_composite(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors,
                          torch::jit::Stack& stack) {
  c10::DispatchKeySet keys;
  for (const auto& tensor : tensors) {
    keys = keys | tensor.key_set();
  }
  const auto below = c10::after_ADInplaceOrView_keyset - c10::DispatchKeySet(kDistributedKey);
  op.redispatchBoxed(keys & below, &stack);
}

void compose_in_scope(const c10::OperatorHandle& op, c10::DispatchKeySet,
                      torch::jit::Stack* stack) {
  const auto& info = operator_info(op);
  const auto tensors = tensors_of_call(info, *stack);
  check_mixing(info.name, tensors);
  std::optional<ReplicationScope> scope;
  if (has_only_distributed(tensors)) {
    scope.emplace();
  }
  redispatch_composite(op, tensors, *stack);
  if (std::ranges::any_of(tensors, tessera::is_distributed)) {
    distribute_results(mesh_of(tensors), info.returns.size(), *stack);
  }
}

/// Runs libtorch's composite kernel of an operator on gathered tensors, for operators whose
/// composite kernel does not work on distributed tensors.
void compose_gathered(const c10::OperatorHandle& op, c10::DispatchKeySet,
                      torch::jit::Stack* stack) {
  const auto& info = operator_info(op);
  const auto tensors = tensors_of_call(info, *stack);
  if (std::ranges::none_of(tensors, tessera::is_distributed)) {
    return redispatch_composite(op, tensors, *stack);
  }
  check_mixing(info.name, tensors);
  check_gather(info.name, tensors);
  for (c10::IValue& value : std::span(*stack).last(info.arguments.size())) {
    value = kernels::with_tensors(value, whole);
  }
  redispatch_composite(op, tensors_of_call(info, *stack), *stack);
  distribute_results(mesh_of(tensors), info.returns.size(), *stack);
}

/// Runs an operator without its last argument `out`, and copies the result to a distributed `out`.
/// libtorch's own kernel would call _unsafe_view or set_ on `out`.
void copy_result_to_out(const c10::OperatorHandle& op, c10::DispatchKeySet,
                        torch::jit::Stack* stack) {
  const auto& info = operator_info(op);
  const at::Tensor out = stack->back().toTensor();
  if (!tessera::is_distributed(out)) {
    return redispatch_composite(op, tensors_of_call(info, *stack), *stack);
  }
  stack->pop_back();
  find_operator(info.name.substr(0, info.name.size() - std::string_view("_out").size()))
      .callBoxed(stack);
  const at::Tensor result = stack->back().toTensor();
  TESSERA_CHECK(out.sizes() == result.sizes(), info.name,
                " would resize a distributed tensor of sizes ", out.sizes(), " to ", result.sizes(),
                "; pass a tensor that has the sizes of the result");
  out.copy_(result);
  stack->back() = out;
}

template <auto kKernel>
void implement_boxed(torch::Library& library, std::string_view names) {
  for (const std::string& name : names_in(names)) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kKernel>());
  }
}

void implement_in_scope(torch::Library& library) {
  for (const TraitRow& row : trait_rows()) {
    if (row.trait == Trait::kHelperTensors) {
      implement_boxed<compose_in_scope>(library, row.names);
    }
  }
}

void implement_composite_kernels(torch::Library& library) {
  library.impl("tensor_split.tensor_indices_or_sections", &tensor_split);
  library.impl("value_selecting_reduction_backward", &value_selecting_reduction_backward);
  implement_boxed<compose_gathered>(
      library,
      "ctc_loss.Tensor max_pool1d nanquantile nanquantile.scalar one_hot "
      "quantile quantile.scalar");
  implement_boxed<copy_result_to_out>(library,
                                      "kron.out matmul.out quantile.out quantile.scalar_out "
                                      "nanquantile.out nanquantile.scalar_out");
  implement_in_scope(library);
}

// Registers the kernels of this file on all dispatch keys through which a call may arrive. Above
// autograd, libtorch decomposes composite operators. Below autograd, reshape has a call plan.
TORCH_LIBRARY_IMPL(aten, TESSERA_DISTRIBUTED_KEY, library) {
  implement_composite_kernels(library);
}
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  implement_composite_kernels(library);
  library.impl("reshape", &reshape);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  implement_composite_kernels(library);
  library.impl("reshape", &reshape);
}

// Kernels for Bernoulli operators with a probability for each element, or with a new result tensor.
// For distributed tensors, the kernels draw by global index.

using torch::jit::Stack;

constexpr std::size_t kArguments = 3;

bool draws_by_element(const Stack& stack) {
  return tessera::is_distributed(torch::jit::peek(stack, 0, kArguments).toTensor()) &&
         torch::jit::peek(stack, 2, kArguments).isNone();
}

void put(Stack& stack, at::Tensor result) {
  torch::jit::drop(stack, kArguments);
  stack.emplace_back(std::move(result));
}

void bernoulli_of_each(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (!draws_by_element(*stack)) {
    return dispatch(op, *stack);
  }
  const at::Tensor self = torch::jit::peek(*stack, 0, kArguments).toTensor();
  const at::Tensor p = torch::jit::peek(*stack, 1, kArguments).toTensor();
  check_mixing("aten::bernoulli_.Tensor", {self, p});
  const at::Tensor uniform = at::empty_like(self, self.options().dtype(at::kDouble)).uniform_();
  put(*stack, self.copy_(uniform.lt(p)));
}

void bernoulli_of_number(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (!draws_by_element(*stack)) {
    return dispatch(op, *stack);
  }
  const at::Tensor self = torch::jit::peek(*stack, 0, kArguments).toTensor();
  const double p = torch::jit::peek(*stack, 1, kArguments).toDouble();
  const RandomSourceScope scope(self);
  put(*stack, at::empty_like(self).bernoulli_(p));
}

TORCH_LIBRARY_IMPL(aten, TESSERA_DISTRIBUTED_KEY, library) {
  implement_boxed<bernoulli_of_each>(library, "bernoulli_.Tensor");
  implement_boxed<bernoulli_of_number>(library, "bernoulli.p");
}

// Kernels for operators that do not read the values of a distributed tensor and need no call plan.

at::Tensor detach(const at::Tensor& self) {
  const auto* impl = as_distributed(self);
  if (impl == nullptr) {
    // In the scope of an OperatorMode or MetaDevice, plain tensors can also reach this kernel.
    BelowFallback guard;
    return at::detach(self);
  }
  return alias_tensor(*impl);
}

bool is_same_size(const at::Tensor& self, const at::Tensor& other) {
  return self.sizes() == other.sizes();
}

/// Whether set_data(self, from) is permitted. Not permitted for a plain `self` with a distributed
/// `from`, because `self` would get the dispatch key of `from`.
bool may_take_data_of(const at::Tensor& self, const at::Tensor& from) {
  const bool ours = as_distributed(self) != nullptr;
  TESSERA_CHECK(ours == (as_distributed(from) != nullptr), "set_data between a ",
                ours ? "distributed tensor and a plain one" : "plain tensor and a distributed one",
                "; assign a new tensor, or copy the values with copy_()");
  return ours || may_take_state_of(self, from);
}

TORCH_LIBRARY_IMPL(aten, TESSERA_DISTRIBUTED_KEY, library) {
  library.impl("detach", &detach);
  library.impl("is_same_size", &is_same_size);
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}
// set_data() calls _has_compatible_shallow_copy_type with autograd's keys enabled. So for a plain
// tensor the kernel must be registered on autograd's keys.
TORCH_LIBRARY_IMPL(aten, AutogradMeta, library) {
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

}  // namespace
}  // namespace tessera::detail
