// The last step of run_local: wraps the local results as distributed tensors.

#include "autograd/autograd.h"
#include "execute/run_local.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

/// Wraps results and counts them as a plan counts its outputs: each element of a list separately.
class ResultWrapper {
 public:
  explicit ResultWrapper(LocalRun& run) : run_(run), info_(run.call.info), plan_(run.call.plan) {}

  /// Replaces a local result on the stack by a distributed tensor. An undefined result is
  /// unchanged, but counted.
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

  /// Returns the caller's tensor as the result of an in-place operator. If the shape has changed,
  /// the caller's wrapper gets the new local tensor and its spec; a detached view becomes a view of
  /// its previous base.
  void give_back(c10::IValue& value, c10::IValue original) {
    DistributedTensorImpl* impl =
        info_.changes_shape && original.isTensor() ? as_distributed(original.toTensor()) : nullptr;
    if (impl != nullptr) {
      at::Tensor local = value.toTensor();
      TensorSpecPtr spec = spec_of(local);
      const auto view = impl->detached_view() ? view_of_former(*impl) : nullptr;
      impl->replace(std::move(local), std::move(spec));
      if (view != nullptr) {
        impl->set_detached_view(view);
      }
    }
    ++output_;
    value = std::move(original);
  }

  /// Finds the spec before a possible copy, because the strides must be those of the plan, not of a
  /// contiguous copy.
  at::Tensor wrap_tensor(at::Tensor local) {
    TensorSpecPtr spec = spec_of(local);
    if (run_.recorded && local.requires_grad()) {
      return wrap_recorded(local, *spec);
    }
    if (plan_.has_rule && plan_.outputs[output_].contiguous) {
      local = local.contiguous();
    }
    return info_.viewed < 0 ? wrap(std::move(local), std::move(spec))
                            : wrap_view(std::move(local), std::move(spec));
  }

  /// Refuses a pending reduction other than a sum, because its gradient would depend on all terms.
  at::Tensor wrap_recorded(const at::Tensor& local, const TensorSpec& spec) const {
    for (const auto& [mesh_dim, op] : spec.sharding.layout->partial()) {
      TESSERA_CHECK(op == ReduceOp::kSum, info_.name, " returns a ", to_string(Partial{op}),
                    " whose gradient is wanted, and the operators that its kernel is made of "
                    "give that of a sum only: implement it for DispatchKey::Autograd, or call it "
                    "in a NoGradGuard");
    }
    return from_local_with_gradient(local, spec.sharding, spec.sizes,
                                    gradient_layout(spec.sharding.layout));
  }

  /// A view of a local tensor that was not redistributed shares its version counter, as views do. A
  /// view of a copy, or of a detached view, gets the state that directs its reads and writes to the
  /// base (distributed_impl.h). Inference tensors have no counter to share.
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

  /// The state with which the view can be made again from its base, after a write through the view.
  DetachedViewPtr detached_view() {
    DetachedViewPtr view = detached_view_of(run_.viewed);
    // All results of one call share one record, because they are parts of the base that do not
    // overlap.
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
    run_.view_arguments[viewed] = {};  // releases the copy of the base, which is not needed any
                                       // more
    view->replay = std::make_shared<DetachedView::Replay>(DetachedView::Replay{
        plan_.local_call ? plan_.local_call->op : run_.call.op, run_.view_arguments, viewed,
        output_, input.target, std::move(strides)});
    return view;
  }

  /// The spec of result number output_. After the first call of a plan this is a look-up without
  /// hashing.
  TensorSpecPtr spec_of(const at::Tensor& local) {
    if (!plan_.has_rule) {
      return replicated_spec(plan_, local);
    }
    TESSERA_CHECK(output_ < plan_.outputs.size(), "internal: the rule of ", info_.name,
                  " names too few outputs");
    CallPlan::Output& output = plan_.outputs[output_];
    // The rule only declares that this output is the same on all ranks (such as the seeds of
    // attention).
    if (output.layout == nullptr) {
      return replicated_spec(plan_, local);
    }
    // The type is compared, because it may depend on state that is not in the cache key, such as
    // libtorch's default type.
    if (!output.spec || output.spec->dtype != local.scalar_type()) [[unlikely]] {
      output.spec = first_spec(output, local);
    }
    return output.spec;
  }

  /// Makes the spec of an output after the first run of the kernel, which determines the type and
  /// the order of dimensions in memory. Sizes that the rule does not know are those of the local
  /// result, since such dimensions are not sharded. The check detects wrong rules at their first
  /// call.
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
