#include <ATen/ops/empty_strided.h>

#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "agreement.h"
#include "below_autograd.h"
#include "bound_call.h"
#include "call_plan.h"
#include "distributed_impl.h"
#include "expanded.h"
#include "implicit_count.h"
#include "leaf_gradient.h"
#include "list_writes.h"
#include "memory_view.h"
#include "seeded_generator.h"
#include "tessera/core/error.h"
#include "viewable.h"

namespace tessera::detail {
namespace {

/// A tensor whose new value the operator leaves elsewhere, or in another layout than its own.
struct Written {
  at::Tensor original;  ///< as the caller passed it
  at::Tensor local;     ///< what the operator wrote to
  std::size_t input;    ///< its number among the call's tensors
};

/// A tensor of the call that has been redistributed, and is only read.
struct Moved {
  at::Tensor from;
  LayoutPtr target;
  at::Tensor to;
};

/// The state of one call on its way through run_call.
class Run {
 public:
  Run(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
      torch::jit::Stack& stack)
      : op_(op),
        info_(info),
        plan_(plan),
        stack_(stack),
        first_(stack.size() - info.arguments.size()) {}

  void operator()() {
    const ListWrites writes(info_, std::span(stack_).subspan(first_));
    keep_originals();
    std::optional<c10::InferenceMode> ordinary;
    if (views_ordinary_tensor() && is_moved()) ordinary.emplace(false);
    localize_arguments();
    if (info_.storage_offset >= 0)
      begin_at_local_tensor(info_, plan_, std::span(stack_).subspan(first_));
    for (const auto& rewritten : plan_.rewritten) at(rewritten.argument) = rewritten.value;
    {
      BelowAutograd guard;
      if (info_.viewed >= 0 && is_moved()) keep_view_arguments();
      if (plan_.together) {
        run_or_fail_together(plan_.replicated.mesh, info_.name, [this] { execute(); });
      } else {
        execute();
      }
      write_back();
      for (const auto& view : through_) write_through(view);
    }
    writes.count();
    wrap_results();
    if (ordinary) {
      ordinary.reset();
      replay_views();
    }
  }

 private:
  c10::IValue& at(int argument) { return stack_[first_ + static_cast<std::size_t>(argument)]; }
  bool writes(std::size_t argument) const {
    return std::find(info_.written.begin(), info_.written.end(), static_cast<int>(argument)) !=
           info_.written.end();
  }

  void keep_originals() {
    for (const auto& result : info_.returns) {
      if (result.written >= 0) returned_.push_back(at(result.written));
    }
    if (info_.viewed >= 0 && at(info_.viewed).isTensor()) viewed_ = at(info_.viewed).toTensor();
  }

  void localize_arguments() {
    using Kind = OperatorInfo::ArgumentKind;
    for (std::size_t i = 0; i < info_.arguments.size(); ++i) {
      auto& value = stack_[first_ + i];
      if (info_.arguments[i] == Kind::kTensor) {
        if (value.isTensor() && value.toTensor().defined()) value = localize(value.toTensor(), i);
      } else if (info_.arguments[i] == Kind::kTensorList && value.isTensorList()) {
        value = localize_list(std::move(value), i);
      } else if (info_.arguments[i] == Kind::kOptionalTensorList && value.isList()) {
        value = localize_optional_list(value, i);
      }
    }
  }

  c10::List<at::Tensor> localize_list(c10::IValue list, std::size_t argument) {
    auto tensors = std::move(list).toTensorList();
    // The caller's list stays as it is; one that only the stack holds can be reused.
    if (tensors.use_count() > 1) tensors = tensors.copy();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor tensor = tensors.get(i);
      if (tensor.defined()) tensors.set(i, localize(tensor, argument));
    }
    return tensors;
  }

  c10::List<std::optional<at::Tensor>> localize_optional_list(const c10::IValue& list,
                                                              std::size_t argument) {
    c10::List<std::optional<at::Tensor>> locals;
    for (const auto& element : list.toListRef()) {
      const bool defined = element.isTensor() && element.toTensor().defined();
      locals.push_back(defined ? std::optional(localize(element.toTensor(), argument))
                               : std::nullopt);
    }
    return locals;
  }

  /// The local tensor that the operator gets for `tensor`.
  at::Tensor localize(const at::Tensor& tensor, std::size_t argument) {
    const auto& input = plan_.inputs[inputs_];
    auto* impl = as_distributed(tensor);
    if (impl != nullptr) prepare(*impl, tensor, argument);
    auto local = impl != nullptr ? impl->local() : tensor;
    if (info_.changes_shape && is_detached(impl)) local = plain_alias(local);
    if (plan_.random && impl != nullptr) device_ = local.device();
    if (input.plan) {
      local = moved(local, input);
    } else if (input.written != nullptr && impl != nullptr && local.numel() == 0) {
      local = local.clone();  // the operator may resize what is empty, on this rank alone
    }
    if (plan_.local_call) locals_.push_back(local);
    if (input.written != nullptr) written_.push_back({tensor, local, inputs_});
    ++inputs_;
    return local;
  }

  void prepare(DistributedTensorImpl& impl, const at::Tensor& tensor, std::size_t argument) {
    keep_gradient_layout(impl, tensor);
    if (!impl.detached_view()) [[likely]]
      return;
    check_readable(impl, info_.name);
    if (!writes(argument)) return;
    if (info_.changes_shape) return check_reshapable();
    check_writable(impl, info_.name);
    through_.push_back(tensor);
  }

  static bool is_detached(const DistributedTensorImpl* impl) {
    return impl != nullptr && impl->detached_view() != nullptr;
  }

  void check_reshapable() const {
    TESSERA_CHECK(plan_.has_rule && !is_moved(), info_.name,
                  " changes the sizes of a view that had to be gathered, which would part it from "
                  "the viewed tensor: take a view of that with the wanted sizes, or a clone");
  }

  /// What the operator writes to is a copy, or the tensor itself; on some ranks a redistribution
  /// gives the same memory with other strides.
  at::Tensor moved(const at::Tensor& local, const CallPlan::Input& input) {
    for (const auto& done : moved_) {  // as cat({x, x}) has it
      const bool same = done.from.is_same(local) && done.target == input.target;
      if (same && input.written == nullptr) return done.to;
    }
    auto result = redistributed(local, input);
    if (input.written == nullptr) {
      moved_.push_back({local, input.target, result});
    } else {
      if (result.is_alias_of(local)) result = result.clone();
      result = expanded_as(result, input.spec->strides);
    }
    if (local.unsafeGetTensorImpl()->is_wrapped_number()) {
      result.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return result;
  }

  at::Tensor redistributed(const at::Tensor& local, const CallPlan::Input& input) {
    auto result = run_plan(*input.plan, local, plan_.replicated.mesh, input.spec->sizes);
    if (plan_.has_rule) return result;
    // The default runs the operator as one rank would, strides included.
    if (result.strides() == input.spec->strides) return result;
    BelowAutograd guard;
    auto strided = at::empty_strided(input.spec->sizes, input.spec->strides, result.options());
    copy_to_expanded(strided, result);
    return strided;
  }

  void execute() {
    if (!plan_.local_call) {
      std::optional<SeededGenerator> generator;
      if (draws_from_default_generator()) generator.emplace(device_, next_random_key());
      if (info_.unsafe_view) at(0) = viewable(at(0).toTensor(), at(1).toIntVector());
      op_.callBoxed(stack_);
      return;
    }
    stack_.resize(first_);
    for (std::size_t i = 0; i < plan_.local_call->arguments.size(); ++i) {
      stack_.push_back(local_call_argument(i));
    }
    plan_.local_call->op.callBoxed(stack_);
    if (plan_.local_call->scale == 1.0) return;
    for (std::size_t i = first_; i < stack_.size(); ++i) {
      stack_[i].toTensor().mul_(plan_.local_call->scale);
    }
  }

  c10::IValue local_call_argument(std::size_t i) const {
    const auto& type = *plan_.local_call->op.schema().arguments()[i].real_type();
    return to_ivalue(plan_.local_call->arguments[i], type, locals_);
  }

  bool draws_from_default_generator() {
    if (!plan_.random) return false;
    return info_.generator < 0 || at(info_.generator).isNone();
  }

  /// Brings what was written to where it belongs.
  void write_back() {
    for (auto& [original, local, number] : written_) {
      const auto& input = plan_.inputs[number];
      const auto& spec = input.spec;
      auto* impl = as_distributed(original);
      const auto& own = impl != nullptr ? impl->local() : original;
      const bool there = local.is_same(own) && input.written == spec->sharding.layout;
      if (there && impl == nullptr) continue;  // one of libtorch's own, which it may resize
      if (!plan_.has_rule && local.sizes() != spec->sizes) {
        resize(*impl, local);
        continue;
      }
      if (there) continue;
      const auto left = intern_spec(
          {{plan_.replicated.mesh, input.written}, spec->sizes, spec->strides, spec->dtype});
      const auto value = redistribute_local(local, left, spec->sharding.layout);
      copy_to_expanded(own, value.is_alias_of(own) ? value.clone() : value);
    }
  }

  /// The operator gave an out= tensor other sizes, which an empty one takes.
  void resize(DistributedTensorImpl& original, const at::Tensor& local) {
    const auto spec = original.spec();
    const auto found = local.sizes().vec();
    const bool empty = original.numel() == 0;
    if (!empty && local.is_same(original.local())) {
      local.unsafeGetTensorImpl()->set_sizes_and_strides(spec->sizes, spec->strides);
    }
    TESSERA_CHECK(empty, info_.name, " would resize a distributed tensor of sizes ",
                  c10::IntArrayRef(spec->sizes), " to ", c10::IntArrayRef(found),
                  ": pass one of the result's sizes");
    if (original.version_counter().enabled() && !local.is_inference()) {
      local.unsafeGetTensorImpl()->set_version_counter(original.version_counter());
    }
    original.replace(local, default_spec(local));
  }

  void wrap_results() {
    const auto first = stack_.size() - info_.returns.size();
    std::size_t returned = 0;
    for (std::size_t r = 0; r < info_.returns.size(); ++r) {
      auto& value = stack_[first + r];
      if (info_.returns[r].written >= 0) {
        give_back(value, std::move(returned_[returned++]));
      } else if (value.isTensor()) {
        if (value.toTensor().defined()) value = wrap_result(std::move(value).toTensor());
        ++outputs_;
      } else if (value.isTensorList()) {
        value = wrap_list(value.toTensorVector());
      }
    }
  }

  c10::List<at::Tensor> wrap_list(std::vector<at::Tensor> results) {
    c10::List<at::Tensor> wrapped;
    wrapped.reserve(results.size());
    for (auto& result : results) {
      wrapped.push_back(result.defined() ? wrap_result(std::move(result)) : at::Tensor());
      ++outputs_;
    }
    return wrapped;
  }

  /// An in-place result is the tensor that was passed.
  void give_back(c10::IValue& value, c10::IValue original) {
    if (info_.changes_shape && original.isTensor()) {
      if (auto* impl = as_distributed(original.toTensor())) {
        auto local = value.toTensor();
        auto spec = spec_of(local);
        const auto view = is_detached(impl) ? view_of_former(*impl) : nullptr;
        impl->replace(std::move(local), std::move(spec));
        if (view != nullptr) impl->set_detached_view(view);
      }
    }
    ++outputs_;
    value = std::move(original);
  }

  at::Tensor wrap_result(at::Tensor local) {
    auto spec = spec_of(local);
    if (plan_.has_rule && plan_.outputs[outputs_].contiguous) local = local.contiguous();
    if (info_.viewed < 0) return wrap(std::move(local), std::move(spec));
    return wrap_view(std::move(local), std::move(spec));
  }

  /// A view of a local tensor that was not moved shares its version counter, as views do.
  at::Tensor wrap_view(at::Tensor local, TensorSpecPtr spec) {
    auto* base = viewed_.defined() ? as_distributed(viewed_) : nullptr;
    if (base == nullptr) return wrap(std::move(local), std::move(spec));
    const bool detached = is_moved() || base->detached_view() != nullptr;
    if (!detached && !local.is_inference() && !base->local().is_inference()) {
      local.unsafeGetTensorImpl()->set_version_counter(
          base->local().unsafeGetTensorImpl()->version_counter());
    }
    auto result = wrap(std::move(local), std::move(spec));
    if (detached) as_distributed(result)->set_detached_view(detach());
    return result;
  }

  /// Whether libtorch wants a tensor that counts its versions, even in inference mode: what is
  /// viewed does.
  bool views_ordinary_tensor() const { return viewed_.defined() && !viewed_.is_inference(); }

  /// Whether the tensor that a view operator views was brought elsewhere first.
  bool is_moved() const { return plan_.inputs.front().plan != nullptr; }

  void keep_view_arguments() {
    if (plan_.local_call) {
      for (std::size_t i = 0; i < plan_.local_call->arguments.size(); ++i) {
        view_arguments_.push_back(local_call_argument(i));
      }
      return;
    }
    view_arguments_.assign(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
  }

  DetachedViewPtr detach() {
    auto view = detached_view_of(viewed_);
    if (!is_moved()) return view;
    const auto& input = plan_.inputs.front();
    const auto viewed = static_cast<std::size_t>(info_.viewed);
    std::optional<std::vector<std::int64_t>> strides;
    if (!plan_.has_rule) strides = input.spec->strides;
    view_arguments_[viewed] = {};  // its copy is not needed any more
    view->replay = std::make_shared<DetachedView::Replay>(
        DetachedView::Replay{plan_.local_call ? plan_.local_call->op : op_, view_arguments_, viewed,
                             outputs_, input.target, std::move(strides)});
    return view;
  }

  TensorSpecPtr spec_of(const at::Tensor& local) {
    if (!plan_.has_rule) return default_spec(local);
    TESSERA_CHECK(outputs_ < plan_.outputs.size(), "internal: the rule of ", info_.name,
                  " names too few outputs");
    auto& output = plan_.outputs[outputs_];
    if (output.layout == nullptr) return default_spec(local);
    if (!output.spec || output.spec->dtype != local.scalar_type()) [[unlikely]] {
      output.spec = first_spec(output, local);
    }
    return output.spec;
  }

  TensorSpecPtr first_spec(CallPlan::Output& output, const at::Tensor& local) {
    const ShardingSpec sharding{plan_.replicated.mesh, output.layout};
    for (std::size_t dim = 0; dim < output.sizes.size(); ++dim) {
      if (output.sizes[dim] < 0) output.sizes[dim] = local.size(static_cast<std::int64_t>(dim));
    }
    const auto expected = local_sizes(sharding, output.sizes);
    TESSERA_CHECK(local.sizes() == expected, "internal: the rule of ", info_.name,
                  " expects a local "
                  "result of sizes ",
                  c10::IntArrayRef(expected), ", found ", local.sizes());
    return intern_spec({sharding, output.sizes, first_strides(output, local), local.scalar_type()});
  }

  /// Alike on all ranks, however thin their parts are.
  std::vector<std::int64_t> first_strides(CallPlan::Output& output, const at::Tensor& local) {
    if (output.strides) return *output.strides;
    const bool told =
        parts_tell_order(*output.layout, output.sizes) &&
        std::all_of(plan_.inputs.begin(), plan_.inputs.end(), [](const CallPlan::Input& input) {
          const LayoutPtr layout = input.target ? input.target : input.spec->sharding.layout;
          return parts_tell_order(*layout, input.spec->sizes);
        });
    if (told) return strides_in_order_of(output.sizes, local.strides());
    output.contiguous = true;
    plan_.direct = false;
    return contiguous_strides(output.sizes);
  }

  TensorSpecPtr default_spec(const at::Tensor& local) {
    const auto layout =
        Layout::replicated(plan_.replicated.layout->mesh_sizes(), static_cast<int>(local.dim()));
    return intern_spec({{plan_.replicated.mesh, layout},
                        local.sizes().vec(),
                        local.strides().vec(),
                        local.scalar_type()});
  }

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  CallPlan& plan_;
  torch::jit::Stack& stack_;
  const std::size_t first_;
  std::size_t inputs_ = 0;
  std::size_t outputs_ = 0;
  at::Tensor viewed_;
  std::vector<c10::IValue> view_arguments_;
  std::vector<at::Tensor> through_;
  c10::Device device_ = c10::kCPU;
  c10::SmallVector<c10::IValue, 2> returned_;
  c10::SmallVector<Written, 2> written_;
  c10::SmallVector<Moved, 2> moved_;
  std::vector<at::Tensor> locals_;
};

}  // namespace

void run_call(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
              torch::jit::Stack& stack) {
  if (plan.moves) count_implicit_redistribution();
  if (plan.form != nullptr) return run_form(*plan.form, info, stack);
  Run(op, info, plan, stack)();
}

}  // namespace tessera::detail
