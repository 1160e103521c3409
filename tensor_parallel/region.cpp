// What plain tensors below a plan mean, and the comparisons of what no rank can know alone. A part
// that meets a parameter without a style is found where the part arrives at the next style: what
// lies between is plain operators, which ask nobody.

#include "region.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "plan/plan_text.h"
#include "tessera/core/detail/environment_switch.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/end_of_backward.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/call_depth.h"
#include "tessera/nn/detail/slot_keeper.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::call_at_end_of_backward;
using tessera::detail::Equality;
using tessera::detail::GivenLocal;
using tessera::detail::Replica;

/// Those below `root` that have slots, each once. Not named_slots(), which refuses the others.
nn::NamedSlots parameters_below(const nn::ModuleBase& root) {
  nn::NamedSlots found;
  nn::visit_modules(root, [&](const std::string& fqn, const nn::ModuleBase& module) {
    for (const auto& [name, slot] : module.slots()) {
      if (std::ranges::find(found, slot, &nn::NamedSlots::value_type::second) == found.end()) {
        found.emplace_back(nn::join_fqn(fqn, name), slot);
      }
    }
  });
  return found;
}

/// Whether a mesh has ranks of the 1-D `other` beside this one.
bool shares_ranks(const DeviceMesh& mesh, const DeviceMesh& other) {
  return std::ranges::any_of(other.ranks(), [&](int rank) {
    return rank != mesh.world()->rank() &&
           std::ranges::find(mesh.ranks(), rank) != mesh.ranks().end();
  });
}

/// Whether `rank` has the same shard as this one. A rank that is not of the tensor's mesh is of
/// another slice like it, and at this rank's place there.
bool holds_the_same(const ShardingSpec& spec, int rank) {
  const std::vector<int>& ranks = spec.mesh.ranks();
  std::int64_t index = std::ranges::find(ranks, rank) - ranks.begin();
  if (index == std::ssize(ranks)) {
    return true;
  }
  for (int dim = spec.mesh.ndim() - 1; dim >= 0; --dim) {
    const std::int64_t coordinate = index % spec.mesh.size(dim);
    if (coordinate != spec.mesh.local_rank(dim) &&
        !tessera::detail::is_replicated_on(*spec.layout, dim)) {
      return false;
    }
    index /= spec.mesh.size(dim);
  }
  return true;
}

std::string describe(const GivenLocal& given) {
  return detail::concat("a local tensor that ", c10::IntArrayRef(given.sizes), ", laid out as ",
                        to_string(to_placements(*given.layout, given.sizes)), ", gave away");
}

}  // namespace

Region::Region(nn::ModuleBase& root, DeviceMesh mesh)
    : mesh_(std::move(mesh)),
      debug_(tessera::detail::debug_checks()),
      parameters_(parameters_below(root)) {}

void Region::add(nn::ModuleBase& module, const std::string& fqn, bool is_left_plain) {
  if (!is_left_plain) {
    styled_.insert(&module);
  }
  if (!names_.emplace(&module, fqn).second) {
    return;
  }
  module.attach(shared_from_this());
  module.add_forward_pre_hook(
      [region = shared_from_this()](auto&, nn::TensorList) { region->compare_once(); });
}

void Region::watch_root(nn::ModuleBase& root) {
  root.add_forward_pre_hook([region = shared_from_this()](auto&, nn::TensorList) {
    if (region->debug_ && region->compared_ && !nn::is_recomputing()) {
      region->compare_values(Equality::kRounded);
    }
    region->compare_once();
  });
  root.add_forward_hook([region = shared_from_this()](auto& self, nn::TensorList outputs) {
    for (const at::Tensor* output : outputs) {
      if (output->defined() && !tessera::is_distributed(*output)) {
        region->check_output(self, *output);
      }
    }
  });
  if (debug_) {
    root.add_forward_hook([region = shared_from_this()](auto&, nn::TensorList outputs) {
      region->compare_after_backward(outputs);
    });
  }
}

std::string Region::name_of(const nn::ModuleBase& module) const {
  return quoted(names_.at(&module));
}

// What a style takes a plain tensor for.

void Region::check(const nn::ModuleBase& module, const at::Tensor& tensor,
                   const Placement& placement) {
  if (is_replicate(placement)) {
    check_replicated(module, tensor);
  } else {
    check_part(module, tensor, placement);
  }
}

void Region::check_part(const nn::ModuleBase& module, const at::Tensor& tensor,
                        const Placement& placement) {
  if (!tensor.requires_grad()) {
    if (!c10::GradMode::is_enabled()) {
      warn_unseen(module);
    }
    return;
  }
  seen_ = true;
  const auto sources = parts_.trace(tensor);
  for (const at::Tensor& leaf : sources.leaves) {
    if (const std::string parameter = parameter_of(leaf); !parameter.empty()) {
      parts_.forget();
      fail_uncovered(module, placement, parameter);
    }
  }
  for (const GivenLocal& given : sources.given) {
    if (given.mesh == mesh_ && given.replicated()) {
      parts_.forget();
      fail(name_of(module), " takes a plain tensor for a part, ", to_string(placement),
           ", but it was computed from ", describe(given),
           ": the gradient there would be that of one part; hand that out as a part as well "
           "(output_layouts), or distributed (use_local_output = false)");
    }
  }
  if (sources.cut) {
    if (const auto met = tessera::detail::met_pieces(tensor)) {
      parts_.forget();
      fail_met(module, placement, *met);
    }
  }
  // Terms of a sum may be of any kind.
  const auto* shard = std::get_if<Shard>(&placement);
  if (shard != nullptr && !read_.contains({&module, sources.signature})) {
    if (const auto read = tessera::detail::not_a_share(tensor, mesh_, shard->dim)) {
      parts_.forget();
      fail_read(detail::concat(name_of(module), " takes a plain tensor for a part, ",
                               to_string(placement), ", but "),
                *read);
    }
    read_.emplace(&module, sources.signature);
  }
}

void Region::warn_unseen(const nn::ModuleBase& module) {
  if (seen_ || mesh_.size() == 1 || std::exchange(warned_, true)) {
    return;
  }
  TORCH_WARN(
      name_of(module),
      " takes a plain tensor for a part, in a forward without gradients: what plain operators "
      "computed of it is looked at only with gradients, in whose graph it is found; run "
      "one forward with gradients first, if it is not known to be right");
}

void Region::check_output(const nn::ModuleBase& root, const at::Tensor& output) {
  tessera::detail::LocalHistory history;
  const auto sources = history.trace(output);
  const bool has_part = std::ranges::any_of(sources.given, [this](const GivenLocal& given) {
    return given.mesh == mesh_ && !given.replicated();
  });
  if (!has_part) {
    return;
  }
  check_covered(output, sources.leaves);
  // Another module's forward, around this one, may know what to do with a part.
  const bool ends =
      nn::detail::call_depth() == 1 && !nn::is_recomputing() && !styled_.contains(&root);
  const nn::ModuleBase* key = ends ? &root : nullptr;
  if (read_.contains({key, sources.signature})) {
    return;
  }
  if (const auto read = tessera::detail::part_read(output)) {
    fail_read("an output of the module that the plan was applied to was computed from a part, but ",
              *read);
  }
  TESSERA_CHECK(
      !ends || !tessera::detail::is_part(output), "the model hands out a plain tensor, ",
      output.sizes(),
      ", that is one rank's part of what one rank computes: a loss or a number made of it "
      "would be one rank's; give the style of the last module .output_layouts = "
      "Replicate{}, or .use_local_output = false, which says what is split, or give the "
      "model itself a style (prepare_module_output) that hands out parts");
  read_.emplace(key, sources.signature);
}

/// Throws Error if a plain parameter among `leaves` was computed with a part.
void Region::check_covered(const at::Tensor& output, const std::vector<at::Tensor>& leaves) const {
  const auto is_own = [this](const at::Tensor& leaf) { return !parameter_of(leaf).empty(); };
  if (std::ranges::none_of(leaves, is_own)) {
    return;
  }
  if (const at::Tensor leaf = tessera::detail::leaf_met_by_part(output, is_own); leaf.defined()) {
    const std::string parameter = parameter_of(leaf);
    fail(
        "an output of the module that the plan was applied to was computed from a part and from "
        "parameter '",
        parameter,
        "', which the plan leaves plain: on each rank its gradient would be that of "
        "one part, and its copies would drift apart; add ",
        line_for_parts(owner_of(parameter)));
  }
}

namespace {

std::string how_met(tessera::detail::MetPieces::How how) {
  using How = tessera::detail::MetPieces::How;
  switch (how) {
    case How::kReordered:
      return "pieces of one part were put together in another order";
    case How::kAlone:
      return "pieces of one part were used without the others";
    default:
      return "pieces of one part were computed with each other";
  }
}

}  // namespace

void Region::fail_met(const nn::ModuleBase& module, const Placement& placement,
                      const tessera::detail::MetPieces& met) const {
  const std::string owner = met.parameter.defined() ? owner_of(parameter_of(met.parameter)) : "";
  const std::string parts = met.count > 0 ? detail::concat(met.count) : "N";
  fail(name_of(module), " takes a plain tensor for a part, ", to_string(placement), ", but in it ",
       how_met(met.how), ": ", c10::IntArrayRef(met.sizes), " was cut along dimension ", met.dim,
       ", of which each rank has a share, so that its pieces are not one rank's; if these are the ",
       "parts of a fused weight, add {\"", owner.empty() ? "MODULE" : pattern_of(owner),
       "\", fused_colwise_parallel({.parts = ", parts,
       "})}, or for unequal parts hold them in an nn::FusedLinear; else cut a distributed tensor "
       "(use_local_output = false)");
}

namespace {

std::string what_is_wrong(const tessera::detail::PartRead& read) {
  using How = tessera::detail::PartRead::How;
  const c10::IntArrayRef sizes = read.sizes;
  switch (read.how) {
    case How::kUnknown:
      return read.name.empty() ? detail::concat("it was computed from ", read.why)
                               : detail::concat("what ", read.name,
                                                " makes of a part is not known (", read.why, ")");
    case How::kPiece:
      return "one piece of what is split (a head) was taken for all of them";
    case How::kReordered:
      return detail::concat("what is split is dimension ", read.dim, " of ", sizes,
                            ", or not in order there: a view, a transpose or the like took it "
                            "elsewhere than on one rank");
    default:
      return detail::concat(read.name, " computed along dimension ", read.dim, " of ", sizes,
                            ", of which each rank has a share: of its own alone that is not what "
                            "one rank computes");
  }
}

}  // namespace

void Region::fail_read(const std::string& begin, const tessera::detail::PartRead& read) const {
  const std::string owner = read.parameter.defined() ? owner_of(parameter_of(read.parameter)) : "";
  const std::string pattern = owner.empty() ? "MODULE" : pattern_of(owner);
  fail(begin, what_is_wrong(read), "; have ", owner.empty() ? "the module before" : quoted(owner),
       " hand out a distributed tensor, which knows what is split (.use_local_output = false in "
       "the style of \"",
       pattern,
       "\"), or keep the operator within what a rank has whole (a head), or say what the result is "
       "with DistributedTensor::from_local or local_map; if these are the parts of a fused "
       "weight, add {\"",
       pattern, "\", fused_colwise_parallel({.parts = N})}");
}

void Region::fail_uncovered(const nn::ModuleBase& module, const Placement& placement,
                            const std::string& parameter) const {
  fail(name_of(module), " takes a plain tensor for a part, ", to_string(placement),
       ", but parameter '", parameter, "', which the plan leaves plain, took part in it: on each ",
       "rank its gradient would be that of one part, and its copies would drift apart; add ",
       line_for_parts(owner_of(parameter)));
}

void Region::check_replicated(const nn::ModuleBase& module, const at::Tensor& tensor) {
  for (const GivenLocal& given : replicated_.trace(tensor).given) {
    if (given.mesh == mesh_ && !given.replicated()) {
      replicated_.forget();
      fail(name_of(module), " takes a plain tensor for the same on every rank of ",
           to_string(mesh_), ", but it was computed from ", describe(given),
           "; say that it is a part, for a module that computes on parts with ",
           line_for_parts(names_.at(&module)),
           ", or pass what you have reduced as DistributedTensor::from_local()");
    }
  }
  if (debug_) {
    tessera::detail::check_replicas(
        tessera::detail::peers_of(mesh_), {{"its plain input", tensor.detach()}},
        Equality::kRounded, detail::concat(name_of(module), " on ", to_string(mesh_)),
        "give every rank of this mesh the same batch (is another dimension of the mesh meant?), or "
        "say in the plan that it is a part");
  }
}

std::string Region::parameter_of(const at::Tensor& leaf) const {
  const auto found = std::ranges::find_if(
      parameters_, [&](const auto& entry) { return nn::is_computed_with(*entry.second, leaf); });
  return found == parameters_.end() ? "" : found->first;
}

// What the ranks compare.

bool Region::has_copies(const nn::ParameterSlot& slot) const {
  const at::Tensor& tensor = slot.persistent();
  if (tensor.is_meta() || (slot.distinct_along() && shares_ranks(slot.distinct_along(), mesh_))) {
    return false;
  }
  if (!tessera::is_distributed(tensor)) {
    return true;
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  return std::ranges::all_of(mesh_.ranks(), [&](int rank) { return holds_the_same(spec, rank); });
}

std::vector<Replica> Region::copies(bool gradients) const {
  std::vector<Replica> replicas;
  for (const auto& [name, slot] : parameters_) {
    if (has_copies(*slot)) {
      const at::Tensor& tensor = slot->persistent();
      replicas.push_back(
          {detail::concat(gradients ? "the gradient of parameter '" : "parameter '", name, "'"),
           local_tensor(gradients ? tensor.grad() : tensor)});
    }
  }
  return replicas;
}

void Region::compare_once() {
  if (!compared_) {
    compare_values(Equality::kBitwise);
    compared_ = true;
  }
}

void Region::compare_values(Equality equality) const {
  tessera::detail::check_replicas(
      tessera::detail::peers_of(mesh_), copies(false), equality,
      detail::concat("tensor parallelism on ", to_string(mesh_)),
      "give its copies the same values (one seed for all ranks, nn::init_weights, a checkpoint), "
      "let the plan split it, or, where each rank has another (experts), say so with "
      "ParameterSlot::set_distinct_along()");
}

void Region::compare_gradients() const {
  tessera::detail::check_replicas(
      tessera::detail::peers_of(mesh_), copies(true), Equality::kRounded,
      detail::concat("tensor parallelism on ", to_string(mesh_)),
      "its copies would drift apart: let the plan cover the module that has it, or what it is "
      "computed with");
}

/// After what others have autograd call at the end of this backward: FSDP's reductions, and
/// pending sums.
void Region::compare_after_backward(nn::TensorList outputs) {
  for (const at::Tensor* output : outputs) {
    if (!output->defined() || !output->requires_grad()) {
      continue;
    }
    output->register_hook([region = shared_from_this()](const at::Tensor&) {
      const int backward = torch::autograd::get_current_graph_task_id();
      if (std::exchange(region->backward_, backward) == backward) {
        return;
      }
      call_at_end_of_backward(
          [region] { call_at_end_of_backward([region] { region->compare_gradients(); }); });
    });
  }
}

}  // namespace tessera::tensor_parallel
