// Steps of run_local: convert arguments of an operator to local tensors, and wrap its results.

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <span>

#include "autograd/autograd.h"
#include "execute/run_local.h"
#include "plan/call_plan.h"
#include "rank/rank.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"
#include "views/views.h"

namespace tessera::detail {
namespace {

/// Whether `tensor` has the strides `strides`, ignoring dimensions of size 1.
bool has_strides(const at::Tensor& tensor, at::IntArrayRef strides) {
  for (std::size_t dim = 0; dim < strides.size(); ++dim) {
    const auto d = static_cast<std::int64_t>(dim);
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[dim]) {
      return false;
    }
  }
  return true;
}

at::Tensor expand_again(const at::Tensor& tensor, at::IntArrayRef strides) {
  // Copies only the elements that exist in memory: contiguous() of the expanded tensor would
  // allocate memory for the expanded sizes.
  const BelowAutograd guard;
  return narrow_stride_zero(tensor, strides).contiguous().expand(tensor.sizes());
}

/// Whether as_strided(tensor, sizes, strides, offset) reads only elements of `tensor`. Marks the
/// elements in a bool buffer, and checks that the same view of the buffer contains only true.
bool reaches_elements(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::int64_t offset) {
  const BelowAutograd guard;
  const auto extent = static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.element_size());
  // The buffer is on the CPU, because no values of `tensor` are needed.
  const auto marks = at::zeros({extent}, at::kBool);
  marks.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).fill_(true);
  return marks.as_strided(sizes, strides, offset).all().item<bool>();
}

/// Adds the local tensor's storage offset to the offset argument of as_strided, which is relative
/// to the distributed tensor. Throws Error if a gathered copy lacks the strides or the memory for
/// the view.
void add_local_storage_offset(const OperatorInfo& info, const CallPlan& plan,
                              std::span<c10::IValue> arguments) {
  const auto where = static_cast<std::size_t>(info.storage_offset);
  const auto& input = plan.inputs.front();
  auto local = arguments[0].toTensor();
  // All positions along a dimension of stride 0 are one element in memory. A gather makes separate
  // elements; expand_again() restores the single element.
  if (input.plan && !has_strides(local, input.spec->strides)) {
    local = expand_again(local, input.spec->strides);
    arguments[0] = local;
  }
  auto& offset = arguments[where];
  offset = (offset.isNone() ? 0 : offset.toInt()) + local.storage_offset();
  TESSERA_CHECK(has_strides(local, input.spec->strides), info.name,
                " reads memory by strides: the tensor has strides ",
                c10::IntArrayRef(input.spec->strides), ", but the gathered copy has ",
                local.strides(), "; call clone() first");
  // Only a gather drops the memory between elements. A dense tensor has no such memory.
  if (!input.plan || local.is_meta() || input.spec->geometry.non_overlapping_and_dense) {
    return;
  }
  TESSERA_CHECK(reaches_elements(local, arguments[where - 2].toIntVector(),
                                 arguments[where - 1].toIntVector(), offset.toInt()),
                info.name,
                " reads memory between the elements of a view, but gathering copies only the "
                "elements; redistribute the viewed tensor to Replicate first");
}

/// A Localizer replaces the tensors of a call by local tensors, in order. The Localizer counts the
/// tensors, because the call plan refers to tensors by index.
class Localizer {
 public:
  explicit Localizer(LocalRun& run) : run_(run), info_(run.call.info), plan_(run.call.plan) {}

  void localize_argument(c10::IValue& value, std::size_t argument) {
    using Kind = OperatorInfo::ArgumentKind;
    const Kind kind = info_.arguments[argument];
    if (kind == Kind::kTensor) {
      if (value.isTensor() && value.toTensor().defined()) {
        value = localize(value.toTensor(), argument);
      }
    } else if (kind == Kind::kTensorList && value.isTensorList()) {
      value = localize_list(std::move(value), argument);
    } else if (kind == Kind::kOptionalTensorList && value.isList()) {
      value = localize_optional_list(value, argument);
    }
  }

 private:
  struct Moved {
    at::Tensor from;
    LayoutPtr target;
    at::Tensor to;
  };

  c10::List<at::Tensor> localize_list(c10::IValue list, std::size_t argument) {
    auto tensors = std::move(list).toTensorList();
    // The caller's list must not change, so a list with references outside the stack is copied.
    if (tensors.use_count() > 1) {
      tensors = tensors.copy();
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors.get(i);
      if (tensor.defined()) {
        tensors.set(i, localize(tensor, argument));
      }
    }
    return tensors;
  }

  /// Converts a list with optional elements. Returns a copy, because the caller's list must not
  /// change. An element that is None has no CallPlan::Input.
  c10::List<std::optional<at::Tensor>> localize_optional_list(const c10::IValue& list,
                                                              std::size_t argument) {
    c10::List<std::optional<at::Tensor>> locals;
    for (const c10::IValue& element : list.toListRef()) {
      const bool defined = element.isTensor() && element.toTensor().defined();
      locals.push_back(defined ? std::optional(localize(element.toTensor(), argument))
                               : std::nullopt);
    }
    return locals;
  }

  /// Returns the local tensor that replaces `tensor`. Adds the local tensor to `run_.locals` for a
  /// LocalCall, and to `run_.written` if the operator writes the tensor.
  at::Tensor localize(const at::Tensor& tensor, std::size_t argument) {
    const CallPlan::Input& input = plan_.inputs[next_input_];
    DistributedTensorImpl* impl = as_distributed(tensor);
    if (impl != nullptr) {
      keep_gradient_layout(*impl, tensor);
      check_detached(*impl, tensor, argument);
      if (plan_.seeded) {
        run_.device = impl->local().device();
      }
    }
    at::Tensor local = impl != nullptr ? impl->local() : tensor;
    if (input.plan) {
      local = moved(local, input);
    }
    // The operator gets a copy of an empty local tensor, because the caller's tensor must not be
    // resized on only this rank.
    if (input.written != nullptr && impl != nullptr && local.numel() == 0) {
      local = local.clone();
    }
    if (plan_.local_call) {
      run_.locals.push_back(local);
    }
    if (input.written != nullptr) {
      run_.written.push_back({tensor, local, next_input_});
    }
    ++next_input_;
    return local;
  }

  /// If the operator writes a DetachedView (a view with its own copy of the base's elements),
  /// records `tensor`, so that the write is later repeated on the base.
  void check_detached(const DistributedTensorImpl& impl, const at::Tensor& tensor,
                      std::size_t argument) {
    if (!impl.detached_view()) {
      return;
    }
    check_readable(impl, info_.name);
    if (!info_.is_written(argument) && !plan_.inputs[next_input_].updated) {
      return;
    }
    TESSERA_CHECK(!info_.changes_shape, info_.name,
                  " cannot change the sizes of a view that was gathered for the call; take a view "
                  "with the new sizes from the viewed tensor, or clone() the view");
    check_writable(impl, info_.name);
    run_.written_views.push_back(tensor);
  }

  at::Tensor moved(const at::Tensor& local, const CallPlan::Input& input) {
    // In a call such as cat({x, x}), redistributes x only once.
    for (const Moved& done : moved_) {
      if (done.from.is_same(local) && done.target == input.target && input.written == nullptr) {
        return done.to;
      }
    }
    at::Tensor result = redistributed(local, input);
    if (input.written == nullptr) {
      moved_.push_back({local, input.target, result});
    } else {
      result = expand_stride_zero(result, input.spec->strides);
    }
    if (is_wrapped_number(local)) {
      make_wrapped_number(result);
    }
    return result;
  }

  /// Redistributes `local`. For an operator without a sharding rule, also restores the strides of
  /// the distributed tensor, with a copy if necessary.
  at::Tensor redistributed(const at::Tensor& local, const CallPlan::Input& input) {
    at::Tensor result = run_plan(*input.plan, local, plan_.replicated.mesh, input.spec->sizes);
    if (plan_.has_rule || result.strides() == input.spec->strides) {
      return result;
    }
    const BelowAutograd guard;
    auto strided = at::empty_strided(input.spec->sizes, input.spec->strides, result.options());
    copy_to_stride_zero(strided, result);
    return strided;
  }

  LocalRun& run_;
  const OperatorInfo& info_;
  const CallPlan& plan_;
  std::size_t next_input_ = 0;
  c10::SmallVector<Moved, 2> moved_;
};

}  // namespace

// Replaces arguments one by one, so that distributed tensors can be freed as early as possible.
void localize_arguments(LocalRun& run) {
  Localizer localizer(run);
  for (std::size_t i = 0; i < run.call.info.arguments.size(); ++i) {
    localizer.localize_argument(run.call.stack[run.call.first + i], i);
  }
}

void rewrite_arguments(LocalRun& run) {
  if (run.call.info.storage_offset >= 0) {
    add_local_storage_offset(run.call.info, run.call.plan, run.call.arguments());
  }
  for (const CallPlan::Rewritten& rewritten : run.call.plan.rewritten) {
    run.call.argument(rewritten.argument) = rewritten.value;
  }
}

namespace {

class ResultWrapper {
 public:
  explicit ResultWrapper(LocalRun& run) : run_(run), info_(run.call.info), plan_(run.call.plan) {}

  /// Replaces the local result `value` on the stack by a distributed tensor. An undefined tensor
  /// stays undefined.
  void wrap_result(c10::IValue& value, const OperatorInfo::Return& returned) {
    if (returned.written >= 0) {
      give_back(value, std::move(run_.returned[next_returned_++]));
    } else if (value.isTensor()) {
      if (value.toTensor().defined()) {
        value = wrap_tensor(std::move(value).toTensor());
      }
      ++output_;
    } else if (value.isTensorList()) {
      value = wrap_list(value.toTensorVector());
    }
  }

 private:
  c10::List<at::Tensor> wrap_list(std::vector<at::Tensor> results) {
    c10::List<at::Tensor> wrapped;
    wrapped.reserve(results.size());
    for (at::Tensor& result : results) {
      wrapped.push_back(result.defined() ? wrap_tensor(std::move(result)) : at::Tensor());
      ++output_;
    }
    return wrapped;
  }

  /// Puts the caller's tensor `original` on the stack as the result of an in-place operator. If the
  /// operator changes shapes, first gives `original` its new local tensor and spec.
  void give_back(c10::IValue& value, c10::IValue original) {
    DistributedTensorImpl* impl =
        info_.changes_shape && original.isTensor() ? as_distributed(original.toTensor()) : nullptr;
    if (impl != nullptr) {
      at::Tensor local = value.toTensor();
      TensorSpecPtr spec = spec_of(local);
      impl->replace(std::move(local), std::move(spec));
    }
    ++output_;
    value = std::move(original);
  }

  /// For CallPlan::Output::contiguous, the spec is made before `local` is copied, because the spec
  /// needs the strides that the call plan or the operator determined, not the strides of the copy.
  at::Tensor wrap_tensor(at::Tensor local) {
    TensorSpecPtr spec = spec_of(local);
    if (plan_.has_rule && plan_.outputs[output_].contiguous) {
      local = local.contiguous();
    }
    return info_.viewed < 0 ? wrap(std::move(local), std::move(spec))
                            : wrap_view(std::move(local), std::move(spec));
  }

  /// Wraps a view of a local tensor. The view shares the version counter of the base. If the base
  /// was redistributed, the view gets a DetachedView, which repeats writes on the base.
  at::Tensor wrap_view(at::Tensor local, TensorSpecPtr spec) {
    const DistributedTensorImpl* base =
        run_.viewed.defined() ? as_distributed(run_.viewed) : nullptr;
    if (base == nullptr) {
      return wrap(std::move(local), std::move(spec));
    }
    const bool detached = run_.is_moved() || base->detached_view() != nullptr;
    if (!detached && !local.is_inference() && !base->local().is_inference()) {
      count_with(local, base->local());
    }
    at::Tensor result = wrap(std::move(local), std::move(spec));
    if (detached) {
      as_distributed(result)->set_detached_view(detached_view());
    }
    return result;
  }

  DetachedViewPtr detached_view() {
    DetachedViewPtr view = detached_view_of(run_.viewed);
    // The results of one view call, such as split(), do not overlap: a write to one result leaves
    // the others valid. So all results share the recorded version of the base.
    seen_ = seen_ == nullptr ? view->seen : seen_;
    view->seen = seen_;
    if (!run_.is_moved()) {
      return view;
    }
    const CallPlan::Input& input = plan_.inputs.front();
    const auto viewed = static_cast<std::size_t>(info_.viewed);
    std::optional<std::vector<std::int64_t>> strides;
    if (!plan_.has_rule) {
      strides = input.spec->strides;
    }
    run_.view_arguments[viewed] = {};
    view->replay = std::make_shared<DetachedView::Replay>(DetachedView::Replay{
        plan_.local_call ? plan_.local_call->op : run_.call.op, run_.view_arguments, viewed,
        output_, input.target, std::move(strides)});
    return view;
  }

  TensorSpecPtr spec_of(const at::Tensor& local) {
    if (!plan_.has_rule) {
      return replicated_spec(plan_, local);
    }
    TESSERA_CHECK(output_ < plan_.outputs.size(), "internal: the rule of ", info_.name,
                  " describes fewer outputs than the operator returned");
    CallPlan::Output& output = plan_.outputs[output_];
    // A sharding rule can leave the layout of an output open. Then the output is equal on all
    // ranks, for example the random seed of attention.
    if (output.layout == nullptr) {
      return replicated_spec(plan_, local);
    }
    // The dtype of some results depends on state that is not in the cache key, such as torch's
    // default dtype.
    if (!output.spec || output.spec->dtype != local.scalar_type()) [[unlikely]] {
      output.spec = first_spec(output, local);
    }
    return output.spec;
  }

  /// Makes the spec of an output after the kernel, which determines the dtype, the order of
  /// dimensions in memory, and unsharded sizes that the sharding rule does not know.
  TensorSpecPtr first_spec(CallPlan::Output& output, const at::Tensor& local) {
    const ShardingSpec sharding{plan_.replicated.mesh, output.layout};
    for (std::size_t dim = 0; dim < output.sizes.size(); ++dim) {
      if (output.sizes[dim] < 0) {
        output.sizes[dim] = local.size(static_cast<std::int64_t>(dim));
      }
    }
    const std::vector<std::int64_t> expected = local_sizes(sharding, output.sizes);
    TESSERA_CHECK(local.sizes() == expected, "internal: the rule of ", info_.name,
                  " expects a local "
                  "result of sizes ",
                  c10::IntArrayRef(expected), ", found ", local.sizes());
    // Global strides have no gaps, but for example a part of unsafe_split() has, and is no view.
    output.contiguous =
        output.contiguous || (info_.viewed < 0 && !local.is_non_overlapping_and_dense());
    return intern_spec({sharding, output.sizes, strides_of(output, local), local.scalar_type()});
  }

  static std::vector<std::int64_t> strides_of(const CallPlan::Output& output,
                                              const at::Tensor& local) {
    if (output.strides) {
      return *output.strides;
    }
    return output.contiguous ? contiguous_strides(output.sizes)
                             : strides_in_order_of(output.sizes, local.strides());
  }

  LocalRun& run_;
  const OperatorInfo& info_;
  CallPlan& plan_;
  std::size_t output_ = 0;
  std::size_t next_returned_ = 0;
  std::shared_ptr<DetachedView::Seen> seen_;
};

}  // namespace

TensorSpecPtr replicated_spec(const CallPlan& plan, const at::Tensor& local) {
  const LayoutPtr layout =
      Layout::replicated(plan.replicated.layout->mesh_sizes(), static_cast<int>(local.dim()));
  return intern_spec({{plan.replicated.mesh, layout},
                      local.sizes().vec(),
                      local.strides().vec(),
                      local.scalar_type()});
}

void wrap_results(LocalRun& run) {
  const auto& returns = run.call.info.returns;
  const std::size_t first = run.call.stack.size() - returns.size();
  ResultWrapper wrapper(run);
  for (std::size_t r = 0; r < returns.size(); ++r) {
    wrapper.wrap_result(run.call.stack[first + r], returns[r]);
  }
}

}  // namespace tessera::detail
