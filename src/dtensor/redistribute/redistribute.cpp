#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/transform.hpp>

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "rank/rank.h"
#include "redistribute/redistribute.h"
#include "tensor/tensor_spec.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/comm/trace.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/sharding_spec.h"

namespace tessera::detail {

// Index arithmetic of redistribution steps. A step views the local tensor as (before, digit,
// after), where the Digit is a factor of a tensor dimension's size (see Layout). An all-to-all has
// two Digits.

namespace {

/// Returns how many of `extent` positions this rank has. Each mesh dimension splits the chunk of
/// the previous mesh dimension.
std::int64_t local_extent(std::int64_t extent, const DeviceMesh& mesh,
                          std::span<const int> mesh_dims) {
  for (int d : mesh_dims) {
    extent = chunk_size(extent, mesh.size(d), mesh.local_rank(d));
  }
  return extent;
}

/// Returns the local sizes of the Digits (factors of the dimension's size) of tensor dimension
/// `dim`. An unsharded dimension counts as a single Digit.
std::vector<std::int64_t> local_extents(const Layout& layout, int dim, std::int64_t size,
                                        const DeviceMesh& mesh) {
  if (layout.digits(dim).empty()) {
    return {size};
  }
  std::vector<std::int64_t> extents;
  for (const auto& digit : layout.digits(dim)) {
    extents.push_back(local_extent(digit.extent == 0 ? size : digit.extent, mesh, digit.mesh_dims));
  }
  return extents;
}

/// The Digit (factor of a tensor dimension's size) that a redistribution step splits or gathers.
struct StepDigit {
  LayoutPtr layout;
  int dim;
  std::size_t digit;

  static StepDigit cut_by(LayoutPtr layout, int dim, int mesh_dim) {
    const auto& digits = layout->digits(dim);
    const auto digit = std::find_if(digits.begin(), digits.end(), [&](const Digit& d) {
      return std::find(d.mesh_dims.begin(), d.mesh_dims.end(), mesh_dim) != d.mesh_dims.end();
    });
    TESSERA_CHECK(digit != digits.end(), "internal: mesh dimension ", mesh_dim,
                  " does not cut dimension ", dim, " of ", to_string(*layout));
    return {layout, dim, static_cast<std::size_t>(digit - digits.begin())};
  }

  /// Returns this rank's length along the Digit (a factor of the dimension's size) after an
  /// all-gather over `mesh_dims`, the last mesh dimensions over which the Digit is sharded.
  std::int64_t gathered_extent(c10::IntArrayRef sizes, const DeviceMesh& mesh,
                               const std::vector<int>& mesh_dims) const {
    const Digit& own = layout->digits(dim)[digit];
    const auto extent = own.extent == 0 ? sizes[static_cast<std::size_t>(dim)] : own.extent;
    const auto kept = own.mesh_dims.size() - mesh_dims.size();
    return local_extent(extent, mesh, std::span(own.mesh_dims).first(kept));
  }
};

/// Returns the products of the sizes around the Digits (factors of dimension sizes) of a step:
/// (before, after) or (before, between, after). `digits` must be sorted.
std::vector<std::int64_t> extents_around(const std::vector<StepDigit>& digits, LayoutPtr layout,
                                         c10::IntArrayRef sizes, const DeviceMesh& mesh) {
  std::vector<std::int64_t> products{1};
  auto next = digits.begin();
  for (int dim = 0; dim < layout->tensor_ndim(); ++dim) {
    // An all-to-all gathers a Digit of the old layout and splits a Digit of the new layout. The
    // Digit's own layout gives the local sizes of its tensor dimension.
    const bool has_digit = next != digits.end() && next->dim == dim;
    const auto extents = local_extents(has_digit ? *next->layout : *layout, dim,
                                       sizes[static_cast<std::size_t>(dim)], mesh);
    for (const auto& [i, extent] : ranges::views::enumerate(extents)) {
      if (has_digit && next->digit == i) {
        products.push_back(1);
      } else {
        products.back() *= extent;
      }
    }
    if (has_digit) {
      ++next;
    }
  }
  return products;
}

/// A contiguous range of positions along a tensor dimension, or along a factor of its size.
struct Chunk {
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

/// Returns the chunk of each rank of mesh.group(mesh_dims) if these mesh dimensions split `extent`
/// positions one after another.
std::vector<Chunk> chunks_of(std::int64_t extent, const DeviceMesh& mesh,
                             const std::vector<int>& mesh_dims) {
  std::vector<Chunk> chunks{{0, extent}};
  for (const int dim : mesh_dims) {
    const auto count = mesh.size(dim);
    // As in a process group, the last mesh dimension varies fastest.
    std::vector<Chunk> finer;
    for (const auto& [chunk, i] :
         ranges::views::cartesian_product(chunks, ranges::views::iota(std::int64_t{0}, count))) {
      finer.push_back(
          {chunk.offset + chunk_offset(chunk.size, count, i), chunk_size(chunk.size, count, i)});
    }
    chunks = std::move(finer);
  }
  return chunks;
}

/// Whether every non-empty chunk i has the offset i * (size of the first chunk). Then a buffer of
/// equally padded chunks is in tensor order.
bool only_last_are_short(const std::vector<Chunk>& chunks) {
  const auto full = chunks.front().size;
  for (const auto& [i, chunk] : ranges::views::enumerate(chunks)) {
    if (chunk.size > 0 && chunk.offset != full * static_cast<std::int64_t>(i)) {
      return false;
    }
  }
  return true;
}

std::size_t group_rank(const DeviceMesh& mesh, const std::vector<int>& mesh_dims) {
  std::int64_t rank = 0;
  for (int d : mesh_dims) {
    rank = rank * mesh.size(d) + mesh.local_rank(d);
  }
  return static_cast<std::size_t>(rank);
}

// Runs the steps of a redistribution plan on this rank. Collectives need equally long, consecutive
// chunks in a flat buffer, so most of this code reorders and pads chunks.

/// Returns `tensor` flattened to 1-D, contiguous, and without lazy conjugation or negation.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous().view({-1});
}

/// Returns a complex tensor as a view of real numbers: collectives do not support complex dtypes.
at::Tensor reals(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

Started without_collective(const at::Tensor& tensor) {
  return {nullptr, [tensor] { return tensor; }};
}

/// Throws Error for a dtype that does not support the reduction. check_partials has already checked
/// what the program requested, so an error here is a bug of the library.
void check_reducible(const Step& step, const at::Tensor& tensor) {
  TESSERA_CHECK(is_reducible(tensor.scalar_type(), step.op), "internal: a tensor of ",
                tensor.scalar_type(), " cannot be reduced with ", to_string(step.op));
}

at::Tensor padded(const at::Tensor& tensor, std::int64_t numel) {
  if (tensor.numel() == numel) {
    return tensor;
  }
  auto result = at::zeros({numel}, tensor.options());
  result.narrow(0, 0, tensor.numel()).copy_(tensor);
  return result;
}

/// A tensor viewed as (before, extent, after); rank i has the positions chunks[i] of `extent`.
struct ChunkedView {
  std::int64_t before, extent, after;
  std::vector<Chunk> chunks;
  std::int64_t row() const { return before * after; }
  const Chunk& own_chunk(const Step& step, const DeviceMesh& mesh) const {
    return chunks[group_rank(mesh, step.mesh_dims)];
  }
  /// Whether the chunks of all ranks follow one another in memory, as collectives require.
  bool is_in_order() const { return before == 1 && only_last_are_short(chunks); }
};

/// Views the local tensor as (before, extent, after), where `step` splits or gathers `extent`.
/// `sharded`: the layout (before or after the step) that shards `step.dim` over `step.mesh_dims`.
ChunkedView chunked_view(LayoutPtr sharded, const Step& step, const DeviceMesh& mesh,
                         c10::IntArrayRef sizes) {
  const auto digit = StepDigit::cut_by(sharded, step.dim, step.mesh_dims.back());
  const auto around = extents_around({digit}, sharded, sizes, mesh);
  const auto extent = digit.gathered_extent(sizes, mesh, step.mesh_dims);
  return {around[0], extent, around[1], chunks_of(extent, mesh, step.mesh_dims)};
}

/// Joins the gathered chunks of all ranks, each padded to `stride` elements, to one flat tensor.
at::Tensor join(const at::Tensor& gathered, std::int64_t stride, const ChunkedView& view) {
  if (view.is_in_order()) {
    return gathered.narrow(0, 0, view.extent * view.row());
  }
  std::vector<at::Tensor> chunks;
  for (const auto& [rank, chunk] : ranges::views::enumerate(view.chunks)) {
    chunks.push_back(
        gathered.narrow(0, static_cast<std::int64_t>(rank) * stride, chunk.size * view.row())
            .view({view.before, chunk.size, view.after}));
  }
  return at::cat(chunks, 1).view({-1});
}

/// Splits a flat tensor into one chunk per rank and pads each chunk to `stride` elements.
at::Tensor separate(const at::Tensor& tensor, std::int64_t stride, const ChunkedView& view) {
  const auto count = static_cast<std::int64_t>(view.chunks.size());
  if (view.is_in_order()) {
    return padded(tensor, count * stride);
  }
  const bool even = view.chunks.back().size * view.row() == stride;
  auto result = even ? at::empty({count * stride}, tensor.options())
                     : at::zeros({count * stride}, tensor.options());
  const auto shaped = tensor.view({view.before, view.extent, view.after});
  for (const auto& [rank, chunk] : ranges::views::enumerate(view.chunks)) {
    result.narrow(0, static_cast<std::int64_t>(rank) * stride, chunk.size * view.row())
        .view({view.before, chunk.size, view.after})
        .copy_(shaped.narrow(1, chunk.offset, chunk.size));
  }
  return result;
}

/// An all-to-all on this rank: gathers one Digit (factor of a tensor dimension's size) and splits
/// another. The local tensor is viewed as (before, Digit, between, Digit, after).
class AllToAll {
 public:
  AllToAll(const Step& step, const DeviceMesh& mesh, c10::IntArrayRef sizes)
      : gather_first_(step.dim < step.to_dim), me_(group_rank(mesh, step.mesh_dims)) {
    const auto gathered = StepDigit::cut_by(step.from, step.dim, step.mesh_dims.back());
    const auto scattered = StepDigit::cut_by(step.to, step.to_dim, step.mesh_dims.back());
    around_ = extents_around(
        gather_first_ ? std::vector{gathered, scattered} : std::vector{scattered, gathered},
        step.from, sizes, mesh);
    from_ = chunks_of(gathered.gathered_extent(sizes, mesh, step.mesh_dims), mesh, step.mesh_dims);
    scattered_ = scattered.gathered_extent(sizes, mesh, step.mesh_dims);
    to_ = chunks_of(scattered_, mesh, step.mesh_dims);
  }

  bool is_empty() const {
    return rest() * scattered_ * (from_.back().offset + from_.back().size) == 0;
  }
  std::int64_t own_gathered_extent() const { return from_[me_].size; }
  std::int64_t scattered_extent() const { return scattered_; }

  std::vector<std::int64_t> shape(std::int64_t gathered, std::int64_t scattered) const {
    return {around_[0], gather_first_ ? gathered : scattered, around_[1],
            gather_first_ ? scattered : gathered, around_[2]};
  }

  /// Copies the elements into one buffer, ordered by receiving rank. Copies nothing if the split
  /// dimension is the outermost.
  at::Tensor pack(const at::Tensor& local) const {
    if (scatter_dim() == 1 && around_[0] == 1) {
      return local.view({-1});
    }
    std::vector<at::Tensor> blocks;
    for (const auto& chunk : to_) {
      blocks.push_back(local.narrow(scatter_dim(), chunk.offset, chunk.size).reshape({-1}));
    }
    return at::cat(blocks);
  }

  /// Joins the elements that all ranks have sent, along the dimension that is gathered.
  at::Tensor unpack(const at::Tensor& received) const {
    if (gather_dim() == 1 && around_[0] == 1) {
      return received;
    }
    std::vector<at::Tensor> blocks;
    std::int64_t offset = 0;
    for (const auto& chunk : from_) {
      const auto numel = chunk.size * to_[me_].size * rest();
      blocks.push_back(received.narrow(0, offset, numel).view(shape(chunk.size, to_[me_].size)));
      offset += numel;
    }
    return at::cat(blocks, gather_dim()).view({-1});
  }

  /// Returns how many real numbers this rank sends to each rank. `reals_each`: 2 for complex
  /// elements, otherwise 1.
  std::vector<std::int64_t> send_counts(std::int64_t reals_each) const {
    return counts(to_, from_[me_].size * rest() * reals_each);
  }
  std::vector<std::int64_t> receive_counts(std::int64_t reals_each) const {
    return counts(from_, to_[me_].size * rest() * reals_each);
  }
  std::int64_t received() const {
    const auto numbers = receive_counts(1);
    return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
  }

 private:
  std::int64_t gather_dim() const { return gather_first_ ? 1 : 3; }
  std::int64_t scatter_dim() const { return gather_first_ ? 3 : 1; }
  std::int64_t rest() const { return around_[0] * around_[1] * around_[2]; }

  static std::vector<std::int64_t> counts(const std::vector<Chunk>& chunks, std::int64_t row) {
    return chunks |
           ranges::views::transform([row](const Chunk& chunk) { return chunk.size * row; }) |
           ranges::to<std::vector>();
  }

  bool gather_first_;
  std::size_t me_;
  std::int64_t scattered_ = 0;
  std::vector<std::int64_t> around_;
  // For each rank: `from_`, the rank's chunk of the dimension that is gathered; `to_`, the rank's
  // chunk of the dimension that is split.
  std::vector<Chunk> from_, to_;
};

comm::Communicator& group_of(const Step& step, const DeviceMesh& mesh) {
  // The first use of a process group makes the process group, which is collective.
  return step.mesh_dims.size() == 1 ? mesh.group(step.mesh_dims.front())
                                    : mesh.group(step.mesh_dims);
}

// Functions that run one redistribution step on a local tensor, below autograd. A result has the
// right element order, but not the right shape. If the first chunk is empty, all chunks are empty,
// and all ranks skip the collective.

Started all_gather_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes) {
  const auto view = chunked_view(step.from, step, mesh, sizes);
  const auto count = static_cast<std::int64_t>(view.chunks.size());
  if (count == 1) {
    return without_collective(flat(local));
  }
  const auto stride = view.chunks.front().size * view.row();
  const auto input = padded(flat(local), stride);
  const auto output = at::empty({count * stride}, local.options());
  if (stride == 0) {
    return without_collective(join(output, stride, view));
  }
  return {group_of(step, mesh).all_gather(reals(output), reals(input)),
          [input, output, stride, view] { return join(output, stride, view); }};
}

Started reduce_scatter_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                            c10::IntArrayRef sizes) {
  check_reducible(step, local);
  const auto view = chunked_view(step.to, step, mesh, sizes);
  if (view.chunks.size() == 1) {
    return without_collective(flat(local));
  }
  const auto stride = view.chunks.front().size * view.row();
  const auto input = separate(flat(local), stride, view);
  const auto output = at::empty({stride}, local.options());
  auto mine = output.narrow(0, 0, view.own_chunk(step, mesh).size * view.row());
  if (stride == 0) {
    return without_collective(mine);
  }
  return {group_of(step, mesh).reduce_scatter(reals(output), reals(input), step.op),
          [input, output, mine] { return mine; }};
}

Started all_reduce_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh) {
  check_reducible(step, local);
  auto& group = group_of(step, mesh);
  auto result = flat(local);
  if (group.size() == 1 || local.numel() == 0) {
    return without_collective(result);
  }
  if (result.is_alias_of(local)) {
    result = result.clone();
  }
  return {group.all_reduce(reals(result), step.op), [result] { return result; }};
}

Started all_to_all_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes) {
  const AllToAll exchange(step, mesh, sizes);
  if (exchange.is_empty()) {
    return without_collective(flat(local));
  }
  const auto input = exchange.pack(flat(local).view(
      exchange.shape(exchange.own_gathered_extent(), exchange.scattered_extent())));
  const std::int64_t reals_each = local.is_complex() ? 2 : 1;
  const auto output = at::empty({exchange.received()}, local.options());
  auto work = group_of(step, mesh)
                  .all_to_all(reals(output), reals(input), exchange.receive_counts(reals_each),
                              exchange.send_counts(reals_each));
  return {std::move(work), [exchange, input, output] { return exchange.unpack(output); }};
}

at::Tensor slice_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes) {
  const auto view = chunked_view(step.to, step, mesh, sizes);
  const auto& mine = view.own_chunk(step, mesh);
  return flat(local)
      .view({view.before, view.extent, view.after})
      .narrow(1, mine.offset, mine.size)
      .contiguous();
}

at::Tensor make_partial_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh) {
  auto value = flat(local);
  if (group_rank(mesh, step.mesh_dims) == 0) {
    return value;
  }
  switch (step.op) {
    case ReduceOp::kSum:
      return at::zeros_like(value);
    case ReduceOp::kProduct:
      return at::ones_like(value);
    case ReduceOp::kAvg:
    case ReduceOp::kMax:
    case ReduceOp::kMin:
      return value;  // equal terms: their average, maximum or minimum is the term itself
  }
  fail("internal: unknown reduction");
}

}  // namespace

// Runs redistribution plans (tessera/core/detail/redistribute_plan.h) on local tensors, for calls
// of redistribute() and for arguments of operators. The plans are cached.

namespace {

/// The maximum number of cached plans; a full cache is emptied. Without a limit, a program with
/// changing sizes would fill the memory.
constexpr std::size_t kCachedPlans = 2048;

/// The cache key of a redistribution plan. The key owns the interned spec and layout, so their
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

/// Each thread has its own cache: a plan refers to the mesh of one rank; ranks may be threads.
auto& plans() {
  thread_local std::unordered_map<RedistributionKey, RedistributionPlanPtr, RedistributionKeyHash>
      plans;
  return plans;
}

/// With TESSERA_DEBUG=1, the ranks of the process group compare a description of the step.
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
      // finish() waits for the collective at once, so older asynchronous redistributions must
      // finish first (see Transfer).
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
    // The result of a step has the right order of elements; reshape() gives it the local shape.
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
  auto& cached = plans();
  if (const auto found = cached.find({spec, target}); found != cached.end()) {
    return found->second;
  }
  auto plan = std::make_shared<const RedistributionPlan>(
      plan_redistribution(spec->sharding.layout, target, spec->sizes,
                          static_cast<std::int64_t>(c10::elementSize(spec->dtype))));
  if (cached.size() >= kCachedPlans) {
    cached.clear();
  }
  cached.emplace(RedistributionKey{spec, target}, plan);
  return plan;
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
                       c10::IntArrayRef sizes, bool source_unchanged) {
  const std::span<const Step> steps(plan->steps);
  std::size_t last = steps.size();  // number of steps until the last collective, inclusive
  while (last > 0 && !communicates(steps[last - 1])) {
    --last;
  }
  if (last == 0 || local.is_meta()) {
    return nullptr;
  }
  BelowAutograd guard;
  const auto& step = steps[last - 1];
  const at::Tensor source = local;
  local = run_steps(steps.first(last - 1), std::move(local), mesh, sizes);
  // The collective may read its input later. An all-reduce works on a copy of its input anyway.
  if (!source_unchanged && step.kind != StepKind::kAllReduce && local.is_alias_of(source)) {
    local = local.clone();
  }
  // With NCCL, the device keeps collectives in order. Other process groups need the rank's queue of
  // transfers, also for GPU tensors that are sent through CPU memory.
  comm::Communicator* group = &group_of(step, mesh);
  if (group->keeps_order_on_device()) {
    group = nullptr;
  } else {
    finish_transfers_on(*group);
  }
  auto started = start_step(step, local, mesh, sizes);
  // The lambda owns the plan, because `steps` refers to the plan, which may be removed from the
  // cache. The steps after the last collective do not communicate.
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

// DeferredSums sums many small Partial gradients of tensor parallelism in one all-reduce. FSDP
// calls add() while it reduces a parameter group. All FSDP units of a model share one DeferredSums.

comm::Communicator* pending_sum_group(const at::Tensor& gradient, const at::Tensor& leaf) {
  const ShardingSpec& from = sharding_spec(gradient);
  const ShardingSpec& to = sharding_spec(leaf);
  const std::vector<PartialDim>& partial = from.layout->partial();
  // Only sums can share an all-reduce, and the summed gradient must have the leaf's layout. Equal
  // layouts are one object, so == compares addresses.
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
  // `buckets_` is emptied first: callbacks may call add(), and failed sums must not be sent again.
  const std::vector<Bucket> buckets = std::exchange(buckets_, {});
  std::ranges::for_each(buckets, [](const Bucket& bucket) { run(bucket); });
}

/// One all-reduce sums all tensors of the bucket, so all ranks must call add() in the same order.
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

// CommunicationScope reports the collectives of a program. comm/checked/ counts all collectives. A
// scope subtracts the counts at the scope's beginning, and also records single calls.

CommunicationScope::CommunicationScope(const DeviceMesh& mesh)
    : world_(mesh.world()),
      before_(world_->traffic().table()),
      recorder_(std::make_shared<comm::CallRecorder>(world_->traffic())) {}

comm::TrafficTable CommunicationScope::table() const {
  return world_->traffic().since(before_);
}

comm::Traffic CommunicationScope::total(const std::string& mesh_dim) const {
  return comm::total(table(), mesh_dim);
}

std::vector<comm::CollectiveCall> CommunicationScope::calls() const {
  return recorder_->calls();
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
