// Gradient norms and clipping, for plain and distributed parameters. The norm is a tensor on the
// device; the host waits for the norm only to check its value.

#include "tessera/optim/clip_grad.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "local_shards.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::optim {
namespace {

/// Whether the world rank `rank` is in `mesh`.
bool contains(const DeviceMesh& mesh, int rank) {
  return std::ranges::find(mesh.ranks(), rank) != mesh.ranks().end();
}

bool contains(const DeviceMesh& mesh, const DeviceMesh& part) {
  return mesh == part ||
         std::ranges::all_of(part.ranks(), [&](int rank) { return contains(mesh, rank); });
}

/// Decides which rank adds a local gradient to the norm. Submeshes with copies of one parameter add
/// one gradient. Submeshes with different parameters (experts, pipeline stages) add all gradients.
class Counting {
 public:
  /// Whether this rank adds its local gradient to the norm. The rank must have coordinate 0 along
  /// each replicating mesh dimension, and its mesh must be the first with a copy.
  bool counts(const nn::ParameterSlot& slot, const ShardingSpec& spec) {
    const std::vector<std::int64_t>& coordinate = spec.mesh.coordinate();
    if (coordinate.empty()) {
      return false;
    }
    for (int d = 0; d < spec.mesh.ndim(); ++d) {
      if (spec.layout->sharded_dim(d) < 0 && coordinate[static_cast<std::size_t>(d)] > 0) {
        return false;
      }
    }
    const DeviceMesh& distinct = slot.distinct_along();
    // A model has hundreds of parameters but only two or three meshes, so is_first() is cached.
    const auto [known, is_new] = found_.try_emplace({spec.mesh, distinct}, false);
    if (is_new) {
      known->second = is_first(spec.mesh, distinct);
    }
    return known->second;
  }

 private:
  static bool is_first(const DeviceMesh& mesh, const DeviceMesh& distinct) {
    const DeviceMesh base = mesh.root();
    const int front = base.ranks().front();
    if (!base.contains_this_rank() || !distinct) {
      return contains(mesh, front);
    }
    if (distinct.root() != base) {
      return contains(mesh, front) || contains(distinct, front);
    }
    std::vector<bool> skipped = nn::detail::dims_in_root(distinct);
    const std::vector<bool> own = nn::detail::dims_in_root(mesh);
    for (std::size_t d = 0; d < own.size(); ++d) {
      skipped[d] = skipped[d] && !own[d];
    }
    return contains(mesh, first_rank(base, skipped)) || contains(distinct, front);
  }

  /// Returns the rank of `base` with this rank's coordinates along the dimensions that `skipped`
  /// marks, and coordinate 0 along all other dimensions.
  static int first_rank(const DeviceMesh& base, const std::vector<bool>& skipped) {
    std::size_t index = 0;
    for (int d = 0; d < base.ndim(); ++d) {
      const bool stays = skipped[static_cast<std::size_t>(d)];
      index = index * static_cast<std::size_t>(base.size(d)) +
              static_cast<std::size_t>(stays ? base.local_rank(d) : 0);
    }
    return base.ranks()[index];
  }

  struct MeshHash {
    std::size_t operator()(const std::pair<DeviceMesh, DeviceMesh>& pair) const {
      return std::hash<DeviceMesh>()(pair.first) * 31 + std::hash<DeviceMesh>()(pair.second);
    }
  };

  std::unordered_map<std::pair<DeviceMesh, DeviceMesh>, bool, MeshHash> found_;
};

void widen(DeviceMesh& joint, const DeviceMesh& mesh) {
  if (!joint || (mesh.size() > joint.size() && contains(mesh, joint))) {
    joint = mesh;
  }
  TESSERA_CHECK(contains(joint, mesh), "the norm of gradients on ", to_string(joint), " and on ",
                to_string(mesh),
                " cannot be computed: neither mesh contains all ranks of the other; ",
                "set NormOptions::over to a mesh that contains both");
}

}  // namespace

/// Collects gradients for a norm. First every rank, even without gradients, determines the joint
/// mesh of the parameters. Then each rank collects its gradients, and reduces Partial gradients.
GradTerms collect_grads(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options) {
  TESSERA_CHECK(std::ranges::find(parameters, nullptr) == parameters.end(),
                "the norm of gradients was called with a null parameter; pass slots of modules, "
                "for example optim::slots_of(model)");
  Counting counting;
  GradTerms terms;
  terms.joint = options.over;
  // A rank without gradients also takes part in the reductions of Partial gradients.
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor& parameter = slot->persistent();
    if (!terms.device) {
      terms.device = parameter.device();
    }
    if (tessera::is_distributed(parameter)) {
      widen(terms.joint, sharding_spec(parameter).mesh.root());
    }
  }
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor grad = slot_gradient(*slot);
    if (!grad.defined() || local_tensor(grad).numel() == 0) {
      continue;
    }
    terms.locals.push_back(local_tensor(grad));
    if (!tessera::is_distributed(grad)) {
      terms.plain.push_back(grad);
    } else {
      auto& list = counting.counts(*slot, sharding_spec(grad)) ? terms.owned : terms.copies;
      list.push_back(local_tensor(grad));
    }
  }
  for (auto* list : {&terms.locals, &terms.plain, &terms.owned, &terms.copies}) {
    // Kernels for lists of tensors are faster with fewer tensors, so adjacent gradients are joined.
    *list = merge_adjoining(*list);
  }
  return terms;
}

namespace {

constexpr auto kDouble = c10::ScalarType::Double;

/// Returns the norms of all tensors as one fp64 tensor on `device`. Splits large CPU tensors, and
/// returns one norm per piece: libtorch's CPU norm has few fp32 accumulators (error 2e-4 for 7
/// million elements).
at::Tensor norms(const std::vector<at::Tensor>& tensors, double p, c10::Device device) {
  constexpr std::int64_t kPiece = 65536;
  std::map<std::pair<c10::DeviceType, c10::ScalarType>, std::vector<at::Tensor>> lists;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor real = tensor.is_complex() ? tensor.abs() : tensor;
    std::vector<at::Tensor>& list = lists[{real.device().type(), real.scalar_type()}];
    if (real.is_cpu() && real.numel() > kPiece) {
      std::ranges::move(real.reshape({-1}).split(kPiece), std::back_inserter(list));
    } else {
      list.push_back(real);
    }
  }
  std::vector<at::Tensor> found;
  for (const auto& [kind, list] : lists) {
    const auto type = kind.second == kDouble ? kDouble : c10::ScalarType::Float;
    found.push_back(at::stack(at::_foreach_norm(list, p, type)).to(device, kDouble));
  }
  return at::cat(found);
}

/// Returns this rank's term of the norm, a 0-d tensor that is then reduced over ranks: the sum of
/// |x|^p, or max |x| for p = infinity.
at::Tensor local_term(const std::vector<at::Tensor>& tensors, double p, c10::Device device) {
  if (tensors.empty()) {
    return at::zeros({}, at::dtype(kDouble).device(device));
  }
  const at::Tensor each = norms(tensors, p, device);
  return std::isinf(p) ? each.max() : each.pow(p).sum();
}

/// Reduces `values` over `mesh`. Asynchronous redistributions of a backward must be finished first;
/// otherwise ranks could wait forever for each other.
void all_reduce(const DeviceMesh& mesh, const at::Tensor& values, ReduceOp op) {
  if (mesh.size() == 1) {
    return;
  }
  flush_pending_transfers(mesh.group_of_all_ranks()).all_reduce(values, op)->wait();
}

/// Returns the maximum of `value` over all ranks. Some communication back ends ignore NaN in a
/// maximum, so a second number says whether a rank has NaN.
at::Tensor reduce_max(const DeviceMesh& mesh, const at::Tensor& value) {
  const at::Tensor nan = value.isnan();
  const at::Tensor pair = at::stack({value.masked_fill(nan, 0.0), nan.to(kDouble)});
  all_reduce(mesh, pair, ReduceOp::kMax);
  return pair[0].masked_fill(pair[1].gt(0.0), std::nan(""));
}

at::Tensor reduce_sum(const DeviceMesh& mesh, at::Tensor value) {
  all_reduce(mesh, value, ReduceOp::kSum);
  return value;
}

c10::Device home(const GradTerms& terms) {
  c10::Device first = terms.device.value_or(c10::kCPU);
  if (!terms.joint || terms.joint.size() == 1) {
    return first;
  }
  // With CPU offloading, gradients are in CPU memory, but the mesh communicates on the GPU.
  const c10::Device device = terms.joint.device();
  return device.type() == first.type() ? first : device;
}

/// The norm on CUDA needs three kernel launches and one all-reduce.
kernels::NormAndFactor norm_on_cuda(const GradTerms& terms, c10::Device device,
                                    std::optional<double> max_norm) {
  const at::Tensor squares =
      kernels::squares_on_cuda(terms.owned, terms.plain, terms.copies, device);
  if (terms.joint) {
    all_reduce(terms.joint, squares[0], ReduceOp::kSum);
  }
  return kernels::clip_norm_on_cuda(squares, max_norm.value_or(1.0));
}

at::Tensor composed_norm(const GradTerms& terms, double p, c10::Device device) {
  at::Tensor owned = local_term(terms.owned, p, device);
  // Plain gradients are the same on every rank, so they are added after the reduction over ranks
  // and counted once.
  const at::Tensor plain = local_term(terms.plain, p, device);
  const bool max = std::isinf(p);
  if (terms.joint) {
    // One rank's copy of a gradient can be NaN or infinite by an error. All ranks must see the NaN
    // or infinity, so that all ranks skip the step or stop.
    const at::Tensor uncounted = plain + local_term(terms.copies, p, device);
    // x - x is 0 only if x is finite; the expression replaces isfinite(), which has no meta kernel.
    const at::Tensor not_finite = uncounted.masked_fill((uncounted - uncounted).eq(0.0), 0.0);
    owned = max ? reduce_max(terms.joint, at::maximum(owned, not_finite))
                : reduce_sum(terms.joint, owned + not_finite);
  }
  return max ? at::maximum(owned, plain) : (owned + plain).pow(1.0 / p);
}

}  // namespace

kernels::NormAndFactor total_norm(const GradTerms& terms, double p,
                                  std::optional<double> max_norm) {
  const c10::Device device = home(terms);
  if (p == 2.0 && kernels::has_norm_kernels(terms.locals, device)) {
    return norm_on_cuda(terms, device, max_norm);
  }
  const at::Tensor norm = composed_norm(terms, p, device);
  kernels::NormAndFactor total{
      .norm = norm, .factor = {}, .of_step = {}, .rounded = norm.to(c10::ScalarType::Float)};
  if (max_norm) {
    total.factor = (*max_norm / (norm + 1e-6)).clamp_max(1.0);  // the constant 1e-6 as in PyTorch
    total.of_step = total.factor + (norm - norm);
  }
  return total;
}

void check_max_norm(double max_norm) {
  TESSERA_CHECK(max_norm >= 0.0, "clip_grad_norm_ with max_norm ", max_norm,
                " is invalid; max_norm must not be negative");
}

namespace {

// Functions for the message about non-finite gradients. A reduction spreads a NaN to all ranks, so
// FSDP records on each rank whether the gradient was finite before the reduction.

class Names {
 public:
  void add(const nn::ParameterSlot& slot) {
    if (++count_ <= 3) {
      text_ += (count_ == 1 ? "" : ", ") + nn::describe(slot);
    }
  }
  std::string text() const {
    return count_ > 3 ? tessera::detail::concat(text_, " and ", count_ - 3, " more") : text_;
  }

 private:
  std::string text_;
  int count_ = 0;
};

bool is_nonfinite(const at::Tensor& gradient) {
  return gradient.defined() && !local_tensor(gradient).isfinite().all().item<bool>();
}

std::map<std::string, std::vector<int>> of_all_ranks(const DeviceMesh& joint,
                                                     const std::string& own) {
  if (!joint || joint.size() == 1) {
    return {{own, {joint ? joint.world()->rank() : 0}}};
  }
  std::map<std::string, std::vector<int>> ranks;
  const auto texts = comm::gather_texts(joint.group_of_all_ranks(), joint.device(), own);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    ranks[texts[i]].push_back(joint.ranks()[i]);
  }
  return ranks;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string listed(const DeviceMesh& joint, const Names& own, const char* before,
                   const char* between) {
  std::string list;
  for (const auto& [names, ranks] : of_all_ranks(joint, own.text())) {
    if (!names.empty()) {
      list += (list.empty() ? "" : "; ") + (before + ranks_text(ranks)) + between + names;
    }
  }
  return list;
}

/// Implements describe_nonfinite(). Collective over the mesh `joint`. If `joint` is undefined,
/// describes only this rank's gradients.
std::string nonfinite_text(const DeviceMesh& joint, const std::vector<nn::SlotPtr>& parameters) {
  Names before;
  Names now;
  for (const nn::SlotPtr& slot : parameters) {
    if (nn::brought_nonfinite(*slot)) {
      before.add(*slot);
    }
    if (is_nonfinite(slot->persistent().grad())) {
      now.add(*slot);
    }
  }
  const std::string found =
      listed(joint, before, "", " passed non-finite values to the reduction of ");
  return !found.empty() ? found : listed(joint, now, "on ", ", these gradients are not finite: ");
}

/// Computes the norm, equal on every rank. Throws Error for a NaN or infinite norm if
/// options.error_if_nonfinite is set.
kernels::NormAndFactor checked_norm(const GradTerms& terms,
                                    const std::vector<nn::SlotPtr>& parameters,
                                    const NormOptions& options,
                                    std::optional<double> max_norm = std::nullopt) {
  kernels::NormAndFactor total = total_norm(terms, options.norm_type, max_norm);
  const at::Tensor& norm = total.norm;
  if (options.error_if_nonfinite) {
    const auto value = norm.item<double>();
    TESSERA_CHECK(std::isfinite(value), "the ", options.norm_type, "-norm of the gradients is ",
                  value, ": ", nonfinite_text(terms.joint, parameters),
                  "; check the batch of each named rank, lower the learning rate, or set "
                  "error_if_nonfinite = false (TESSERA_DEBUG=1 warns of each gradient that is not "
                  "finite before it is reduced)");
  }
  return total;
}

void check(const NormOptions& options) {
  TESSERA_CHECK(options.norm_type > 0.0, "a ", options.norm_type,
                "-norm of gradients is invalid; norm_type must be above 0 (or infinity)");
}

std::pair<GradTerms, kernels::NormAndFactor> total_and_factor(
    const std::vector<nn::SlotPtr>& parameters, double max_norm, const NormOptions& options) {
  check_max_norm(max_norm);
  check(options);
  const comm::CallerScope caller("clip_grad_norm_");
  const c10::AutoGradMode no_grad(false);
  GradTerms terms = collect_grads(parameters, options);
  check_gradient_copies(parameters, "clip_grad_norm_", options);
  kernels::NormAndFactor total = checked_norm(terms, parameters, options, max_norm);
  return {std::move(terms), std::move(total)};
}

}  // namespace

/// The norm is computed in fp64 and returned in fp32.
at::Tensor grad_norm(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options) {
  check(options);
  const comm::CallerScope caller("grad_norm");
  const c10::AutoGradMode no_grad(false);
  return checked_norm(collect_grads(parameters, options), parameters, options).rounded;
}

std::string detail::describe_nonfinite(const std::vector<nn::SlotPtr>& parameters,
                                       const NormOptions& options) {
  const comm::CallerScope caller("describe_nonfinite");
  const c10::AutoGradMode no_grad(false);
  return nonfinite_text(collect_grads(parameters, options).joint, parameters);
}

at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                           const NormOptions& options) {
  const c10::AutoGradMode no_grad(false);
  const auto [terms, total] = total_and_factor(parameters, max_norm, options);
  // The gradients are multiplied even if the factor is 1: to compare the factor with 1, the host
  // would have to wait for the device.
  scale_by(terms.locals, total.factor);
  return total.rounded;
}

ClipFactor clip_factor(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                       const NormOptions& options) {
  const kernels::NormAndFactor total = total_and_factor(parameters, max_norm, options).second;
  return {total.rounded, total.of_step};
}

}  // namespace tessera::optim
