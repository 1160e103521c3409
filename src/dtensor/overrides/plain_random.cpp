// Random operators of at:: on plain tensors in a RandomRegion. The kernels run above autograd,
// which records what a kernel calls. Fills draw each number by global element index. Other random
// operators accept only whole tensors.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout_ops.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "operators/operator_info.h"
#include "random/fills.h"
#include "rank/rank.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

using torch::jit::Stack;
using Arguments = std::span<const c10::IValue>;

c10::DispatchKeySet below(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRandomKey);
}

/// Whether this thread is outside of every RandomRegion. The enabled dispatch keys do not show
/// this, because libtorch can restore the keys of a region that has ended.
bool outside() {
  return random_region() == nullptr;
}

Arguments arguments_of(const OperatorInfo& info, const Stack& stack) {
  return Arguments(stack).last(info.arguments.size());
}

/// Fills a plain tensor with random numbers. If `self` requires a gradient, fills a new tensor and
/// copies the numbers to `self`, because autograd can record a copy.
void fill_plain(const at::Tensor& self, const RandomPlace& place, const OperatorInfo& info,
                Arguments arguments, RandomKey key) {
  const bool recorded = self.requires_grad() && c10::GradMode::is_enabled();
  const at::Tensor values = recorded ? at::empty_like(self.detach()) : self;
  {
    const BelowAutograd guard;
    info.traits.fill()({values, place, key}, arguments);
  }
  if (recorded) {
    self.copy_(values);
  } else if (!self.is_inference()) {
    count_write(self);
  }
}

bool has_generator(const OperatorInfo& info, Arguments arguments) {
  return info.generator >= 0 && !arguments[static_cast<std::size_t>(info.generator)].isNone();
}

/// Throws Error if this rank has only a shard of the tensor, because the operator draws its numbers
/// one after another. `own_generator`: whether the caller passed a generator.
void check_whole(const OperatorInfo& info, const RandomPlace& place, bool own_generator) {
  TESSERA_CHECK(!place.is_part || !own_generator, info.name,
                " was given a generator, but ranks with different parts of a tensor would draw "
                "equal numbers from it; omit the generator (seed with manual_seed)");
  TESSERA_CHECK(!place.is_part, info.name, kDrawsInOrder);
}

void fill(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const OperatorInfo& info = operator_info(op);
  const Arguments arguments = arguments_of(info, *stack);
  const at::Tensor self = arguments[0].toTensor();
  if (outside() || tessera::is_distributed(self)) {
    return op.redispatchBoxed(below(keys), stack);
  }
  if (has_generator(info, arguments)) {
    check_whole(info, random_place({info.name, self, random_source(), {}}), true);
    return op.redispatchBoxed(below(keys), stack);
  }
  const RandomKey key = next_random_key();
  if (!self.is_meta()) {
    const RandomPlace place = random_place({info.name, self, random_source(), key});
    fill_plain(self, place, info, arguments, key);
  }
  torch::jit::drop(*stack, info.arguments.size());
  stack->emplace_back(self);
}

void note_source(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (outside()) {
    return op.redispatchBoxed(below(keys), stack);
  }
  const RandomSourceScope scope(arguments_of(operator_info(op), *stack)[0].toTensor());
  op.redispatchBoxed(below(keys), stack);
}

bool draws(const c10::OperatorHandle& op, Arguments arguments) {
  const auto& schema = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = schema[i].name();
    if (((name == "dropout_p" || name == "dropout") && arguments[i].toDouble() == 0) ||
        ((name == "training" || name == "train") && arguments[i].isBool() &&
         !arguments[i].toBool())) {
      return false;
    }
  }
  return true;
}

/// Returns a tensor that has the sizes of the operator's result: the first tensor argument of the
/// operator; for randperm, a meta vector with the length of the permutation.
at::Tensor drawn_for(const OperatorInfo& info, Arguments arguments) {
  if (arguments[0].isTensor()) {
    return arguments[0].toTensor();
  }
  if (arguments[0].isInt()) {
    return at::empty({arguments[0].toInt()}, at::device(c10::kMeta));
  }
  const std::vector<at::Tensor> tensors = bind_call(info, arguments).tensors;
  return tensors.empty() ? at::empty({}, at::device(c10::kMeta)) : tensors.front();
}

void draw_in_order(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const OperatorInfo& info = operator_info(op);
  const Arguments arguments = arguments_of(info, *stack);
  const std::vector<at::Tensor> tensors = bind_call(info, arguments).tensors;
  if (outside() || std::ranges::any_of(tensors, tessera::is_distributed) || !draws(op, arguments)) {
    return op.redispatchBoxed(below(keys), stack);
  }
  const bool own_generator = has_generator(info, arguments);
  const RandomKey key = own_generator ? RandomKey{} : next_random_key();
  const at::Tensor target = drawn_for(info, arguments);
  const at::Tensor source = arguments[0].isTensor() ? target : random_source();
  check_whole(info, random_place({info.name, target, source, key}), own_generator);
  std::optional<SeededGenerator> generator;
  const c10::Device device = tensors.empty() ? c10::Device(c10::kCPU) : tensors.front().device();
  if (!own_generator && !device.is_meta()) {
    generator.emplace(device, key);
  }
  const ExcludeKeys guard(kRandomKey);
  op.redispatchBoxed(below(keys), stack);
}

/// Called if an operator draws nothing for an empty tensor. Takes a random key and exchanges the
/// counts of batch rows, as ranks that draw do.
void count_if_empty(const at::Tensor& tensor) {
  if (tensor.numel() > 0) {
    return;
  }
  next_random_key();
  const std::shared_ptr<BatchRows>& rows = random_region()->rows();
  if (rows != nullptr && !tensor.is_meta()) {
    rows->settle();
  }
}

/// The kernel of dropout operators with the arguments (tensor, probability, training).
void composed_dropout(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Arguments arguments = arguments_of(operator_info(op), *stack);
  const double p = arguments[1].toDouble();
  if (!outside() && p > 0 && p < 1 && arguments[2].toBool()) {
    count_if_empty(arguments[0].toTensor());
  }
  note_source(op, keys, stack);
}

/// The kernel of multinomial. Several samples with replacement are drawn one after another.
void multinomial(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Arguments arguments = arguments_of(operator_info(op), *stack);
  if (arguments[1].toInt() > 1 && arguments[2].toBool()) {
    return draw_in_order(op, keys, stack);
  }
  // No random key is taken here for a distributed tensor: the kernel that runs on the gathered
  // tensor takes the random key.
  if (!outside() && !tessera::is_distributed(arguments[0].toTensor())) {
    count_if_empty(arguments[0].toTensor());
  }
  note_source(op, keys, stack);
}

at::Tensor& bernoulli(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& p,
                      std::optional<at::Generator> generator) {
  if (outside() || generator) {
    return at::_ops::bernoulli__Tensor::redispatch(below(keys), self, p, generator);
  }
  const at::Tensor uniform =
      at::empty_like(self.detach(), self.options().dtype(at::kDouble)).uniform_();
  return self.copy_(uniform.lt(p.detach()));
}

at::Tensor bernoulli_p(c10::DispatchKeySet keys, const at::Tensor& self, double p,
                       std::optional<at::Generator> generator) {
  if (outside() || generator) {
    return at::_ops::bernoulli_p::redispatch(below(keys), self, p, generator);
  }
  const RandomSourceScope scope(self);
  return at::empty_like(self.detach()).bernoulli_(p);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(c10::DispatchKeySet keys, const at::Tensor& x,
                                                  double p, std::optional<bool> train) {
  if (outside() || tessera::is_distributed(x) || !train.value_or(true) || p <= 0 || p >= 1) {
    return at::_ops::native_dropout::redispatch(below(keys), x, p, train);
  }
  const RandomSourceScope scope(x);
  const at::Tensor kept = at::empty_like(x.detach()).bernoulli_(1 - p);
  return {x.mul(kept).mul(1 / (1 - p)), kept.to(at::kBool)};
}

/// The kernel of attention with dropout, because a fused CUDA kernel would draw other numbers.
at::Tensor attention(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const std::optional<at::Tensor>& mask,
                     double dropout_p, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  // libtorch would divide by the number of key and value heads, which may be zero.
  TESSERA_CHECK(
      !enable_gqa || key.dim() < 3 || value.dim() < 3 ||
          (key.sym_size(-3) != 0 && value.sym_size(-3) != 0),
      "scaled_dot_product_attention: keys or values have no heads on this rank; split the heads "
      "over no more ranks than there are key-value heads");
  if (outside() || dropout_p == 0 || !query.is_cuda() || tessera::is_distributed(query)) {
    return at::_ops::scaled_dot_product_attention::redispatch(
        below(keys), query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout_p, is_causal, std::nullopt, scale, enable_gqa));
}

using Kernel = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*);

template <Kernel kernel>
void implement(torch::Library& library, std::string_view names) {
  for (const std::string& name : names_in(names)) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

TORCH_LIBRARY_IMPL(_, TESSERA_RANDOM_KEY, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, TESSERA_RANDOM_KEY, library) {
  implement<fill>(library,
                  "bernoulli_.float exponential_ normal_ random_.from random_.to uniform_");
  implement<composed_dropout>(
      library,
      "alpha_dropout alpha_dropout_ dropout dropout_ feature_alpha_dropout feature_alpha_dropout_ "
      "feature_dropout feature_dropout_");
  implement<note_source>(
      library,
      "bernoulli bernoulli.Tensor exponential normal_functional rand_like rand_like.generator "
      "randint_like randint_like.low_dtype randn_like randn_like.generator random.from random.to "
      "uniform");
  implement<draw_in_order>(
      library,
      "_cudnn_attention_forward _cudnn_init_dropout_state _cudnn_rnn _efficient_attention_forward "
      "_fill_mem_eff_dropout_mask_ _flash_attention_forward _flash_attention_forward.quantized "
      "_fused_dropout _sample_dirichlet _scaled_dot_product_cudnn_attention "
      "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
      "_scaled_dot_product_flash_attention.quantized _standard_gamma bernoulli.out binomial "
      "cauchy cauchy_ geometric geometric_ log_normal log_normal_ random random_ miopen_rnn "
      "multinomial.out normal.Tensor_Tensor normal.Tensor_Tensor_out "
      "normal.Tensor_float normal.Tensor_float_out normal.float_Tensor normal.float_Tensor_out "
      "poisson randperm.generator_out rrelu_with_noise rrelu_with_noise.out rrelu_with_noise_");
  implement<multinomial>(library, "multinomial");
  library.impl("bernoulli_.Tensor", TORCH_FN(bernoulli));
  library.impl("bernoulli.p", TORCH_FN(bernoulli_p));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  library.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

}  // namespace
}  // namespace tessera::detail
