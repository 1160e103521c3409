#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "rank/rank.h"
#include "redistribute/redistribute.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/comm/trace.h"
#include "tessera/core/detail/bounded_cache.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/sharding_spec.h"

namespace tessera::detail {

// Runs the plans of core's planner (tessera/core/detail/redistribute_plan.h) on local tensors. A
// redistribution is planned once; its steps are the functions of redistribute_steps.cpp. Used for
// the program's own redistributions and for redistributions of operators' arguments
// (execute/arguments_and_results.cpp).

namespace {

/// Bounds the cache: a spec contains sizes, so a program whose sizes keep changing would add plans
/// for ever.
constexpr std::size_t kCachedPlans = 2048;

/// Identifies a redistribution. Spec and layout are interned, and the key owns them, so their
/// addresses are not reused.
struct RedistributionKey {
  TensorSpecPtr spec;
  LayoutPtr target;
  friend bool operator==(const RedistributionKey&, const RedistributionKey&) = default;
};

struct RedistributionKeyHash {
  std::size_t operator()(const RedistributionKey& key) const {
    return std::hash<const void*>{}(key.spec.get()) * 31 + std::hash<LayoutPtr>{}(key.target);
  }
};

/// One cache per thread, because plans own meshes, and ranks may be threads of one process.
auto& plans() {
  thread_local BoundedCache<RedistributionKey, RedistributionPlan, RedistributionKeyHash> plans(
      kCachedPlans);
  return plans;
}

/// Names the step for the process group, which with TESSERA_DEBUG reports ranks that run another
/// step.
std::optional<comm::PurposeScope> compared(const Step& step, const at::Tensor& local,
                                           const DeviceMesh& mesh, c10::IntArrayRef sizes) {
  if (!checks_calls()) [[likely]] {
    return std::nullopt;
  }
  return std::make_optional<comm::PurposeScope>(
      group_of(step, mesh), fmt::format("{} of {} [{}] {} -> {}", comm::CallerScope::current(),
                                        c10::toString(local.scalar_type()), fmt::join(sizes, ", "),
                                        to_string(*step.from), to_string(*step.to)));
}

Started start_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                   c10::IntArrayRef sizes) {
  const auto purpose = compared(step, local, mesh, sizes);
  switch (step.kind) {
    case StepKind::kAllGather:
      return all_gather_step(step, local, mesh, sizes);
    case StepKind::kReduceScatter:
      return reduce_scatter_step(step, local, mesh, sizes);
    case StepKind::kAllReduce:
      return all_reduce_step(step, local, mesh);
    case StepKind::kAllToAll:
      return all_to_all_step(step, local, mesh, sizes);
    default:
      fail("internal: this step of a redistribution communicates nothing");
  }
}

at::Tensor local_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes) {
  switch (step.kind) {
    case StepKind::kSlice:
      return slice_step(step, local, mesh, sizes);
    case StepKind::kMakePartial:
      return make_partial_step(step, local, mesh);
    case StepKind::kRelabel:
      return local;
    default:
      // The calling thread waits for this step, so pending transfers are finished first (see
      // Transfer).
      if (!group_of(step, mesh).keeps_order_on_device()) {
        finish_transfers();
      }
      return finish(start_step(step, local, mesh, sizes));
  }
}

bool only_shapes(const Step& step, const at::Tensor& local, const DeviceMesh& mesh) {
  return local.is_meta() && !(communicates(step) && group_of(step, mesh).takes_meta_tensors());
}

at::Tensor run_steps(std::span<const Step> steps, at::Tensor local, const DeviceMesh& mesh,
                     c10::IntArrayRef sizes) {
  for (const auto& step : steps) {
    // A step returns the elements in order but not in shape; the layout after the step determines
    // the shape.
    const auto shape = local_sizes(ShardingSpec{mesh, step.to}, sizes);
    local = only_shapes(step, local, mesh) ? at::empty(shape, local.options())
                                           : local_step(step, local, mesh, sizes).reshape(shape);
  }
  return local;
}

}  // namespace

void clear_plans() {
  plans().clear();
}

RedistributionPlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target) {
  return plans().get({spec, target}, [](const RedistributionKey& key) {
    return plan_redistribution(key.spec->sharding.layout, key.target, key.spec->sizes,
                               static_cast<std::int64_t>(c10::elementSize(key.spec->dtype)));
  });
}

at::Tensor run_plan(const RedistributionPlan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes) {
  if (plan.steps.empty()) {
    return local;
  }
  BelowAutograd guard;
  return run_steps(plan.steps, std::move(local), mesh, sizes);
}

TransferPtr start_plan(RedistributionPlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes) {
  const std::span<const Step> steps(plan->steps);
  std::size_t last = steps.size();  // index after the last step that is a collective
  while (last > 0 && !communicates(steps[last - 1])) {
    --last;
  }
  if (last == 0 || local.is_meta()) {
    return nullptr;
  }
  BelowAutograd guard;
  const auto& step = steps[last - 1];
  local = run_steps(steps.first(last - 1), std::move(local), mesh, sizes);
  // NCCL's stream preserves the order of collectives. With process groups of any other kind the
  // queue of transfers must preserve it, also for tensors on a GPU that are sent through the host
  // (see Transfer).
  comm::Communicator* group = &group_of(step, mesh);
  if (group->keeps_order_on_device()) {
    group = nullptr;
  } else {
    finish_transfers_on(*group);
  }
  auto started = start_step(step, local, mesh, sizes);
  // Owns the plan, into which `steps` points, because the transfer may outlive the plan cache's
  // entry. The steps after the last collective do not communicate, so finishing the transfer needs
  // no peers.
  started.rest = [plan = std::move(plan), rest = std::move(started.rest), steps, last, mesh,
                  sizes = sizes.vec()] {
    const auto shape = local_sizes(ShardingSpec{mesh, steps[last - 1].to}, sizes);
    return run_steps(steps.subspan(last), rest().reshape(shape), mesh, sizes);
  };
  return Transfer::start(std::move(started), group);
}

at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec,
                              LayoutPtr target) {
  if (spec->sharding.layout == target) {
    return local;
  }
  return run_plan(*plan_for(spec, target), local, spec->sharding.mesh, spec->sizes);
}

at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target) {
  const BelowAutograd guard;
  const DeviceMesh& mesh = target.mesh;
  const at::Tensor whole = mesh.coordinate() == mesh.shape().coordinate(source)
                               ? tensor.contiguous().clone()
                               : at::empty(tensor.sizes(), tensor.options());
  if (mesh.size() > 1 && whole.numel() > 0 && !whole.is_meta()) {
    flush_pending_transfers(mesh.group_of_all_ranks()).broadcast(whole, source)->wait();
  }
  const auto sizes = tensor.sizes().vec();
  const ShardingSpec replicated{
      mesh, Layout::replicated(mesh.shape().sizes(), static_cast<int>(tensor.dim()))};
  return redistribute_local(
      whole, intern_spec({replicated, sizes, contiguous_strides(sizes), tensor.scalar_type()}),
      target.layout);
}

// Pending sums of many small gradients of tensor parallelism, combined into one all-reduce. FSDP's
// reduction of a parameter group adds sums to a DeferredSums (fsdp/collectives.cpp); the
// DeferredSums object is in the context that FSDP units share.

comm::Communicator* pending_sum_group(const at::Tensor& gradient, const at::Tensor& leaf) {
  const ShardingSpec& from = sharding_spec(gradient);
  const ShardingSpec& to = sharding_spec(leaf);
  const std::vector<PartialDim>& partial = from.layout->partial();
  // Layouts are interned, so the layout without the partial is compared by pointer. Only sums are
  // combined: a mean or a product cannot be added to sums.
  const bool only_sum = partial.size() == 1 && partial[0].op == ReduceOp::kSum &&
                        Layout::intern(from.layout->mesh_sizes(), from.layout->dims()) == to.layout;
  return only_sum ? &from.mesh.group(partial[0].mesh_dim) : nullptr;
}

void DeferredSums::add(comm::Communicator& group, at::Tensor value, Then then, const void* owner) {
  const auto same = [&](const Bucket& bucket) {
    return bucket.group == &group && bucket.dtype == value.scalar_type();
  };
  auto bucket = std::ranges::find_if(buckets_, same);
  if (bucket == buckets_.end()) {
    bucket = buckets_.insert(buckets_.end(), Bucket{&group, value.scalar_type(), {}});
  }
  bucket->terms.push_back({std::move(value), std::move(then), owner});
}

void DeferredSums::forget(const void* owner) {
  for (Bucket& bucket : buckets_) {
    std::erase_if(bucket.terms, [owner](const Term& term) { return term.owner == owner; });
  }
  std::erase_if(buckets_, [](const Bucket& bucket) { return bucket.terms.empty(); });
}

void DeferredSums::run() {
  // The buckets are moved out before they are processed, because a `then` may call add(), and
  // failed sums must not be sent again.
  const std::vector<Bucket> buckets = std::exchange(buckets_, {});
  std::ranges::for_each(buckets, [](const Bucket& bucket) { run(bucket); });
}

/// Ranks match terms by position, so they must have added them in the same order.
void DeferredSums::run(const Bucket& bucket) {
  std::vector<at::Tensor> flat;
  for (const Term& term : bucket.terms) {
    flat.push_back(term.value.reshape({-1}));
  }
  const at::Tensor sums = at::cat(flat);
  const comm::CallerScope caller("sum of the gradients of replicated parameters");
  flush_pending_transfers(*bucket.group).all_reduce(sums, ReduceOp::kSum)->wait();
  std::int64_t offset = 0;
  for (const Term& term : bucket.terms) {
    const std::int64_t numel = term.value.numel();
    term.then(sums.narrow(0, offset, numel).view(term.value.sizes()));
    offset += numel;
  }
}

}  // namespace tessera::detail

namespace tessera {

// The collectives that a program sees. The wrapper around every process group (comm/checked/)
// counts all collectives in a table, with or without a scope. A scope reports the difference
// between two readings of the table; only the list of single calls is recorded for the scope
// itself.

CommunicationScope::CommunicationScope(const DeviceMesh& mesh)
    : world_(mesh.world()), before_(world_->traffic().table()), recorder_(world_->traffic()) {}

comm::TrafficTable CommunicationScope::table() const {
  return world_->traffic().since(before_);
}

comm::Traffic CommunicationScope::total() const {
  return comm::total(table());
}

comm::Traffic CommunicationScope::total(const std::string& mesh_dim) const {
  return comm::total(table(), mesh_dim);
}

std::string CommunicationScope::report() const {
  std::string text =
      fmt::format("{:12} {:16} {:>8} {:>14}\n", "dimension", "collective", "calls", "bytes");
  for (const auto& [key, traffic] : table()) {
    text += fmt::format("{:12} {:16} {:>8} {:>14}\n", key.first, key.second, traffic.calls,
                        traffic.bytes);
  }
  return text;
}

std::string CommunicationScope::listing() const {
  std::string text = fmt::format("{:>6} {:12} {:16} {:>14} {}\n", "call", "dimension", "collective",
                                 "bytes", "for");
  int number = 0;
  for (const auto& call : calls()) {
    text += fmt::format("{:>6} {:12} {:16} {:>14} {}\n", ++number, call.group, call.collective,
                        call.bytes, call.purpose);
  }
  return text;
}

}  // namespace tessera
