// Norms of gradients and clipping, for plain and distributed parameters alike. The norm stays on
// the device: the host waits only if it is to check it.
#include "tessera/optim/clip_grad.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "local_shards.h"
#include "norm/grad_terms.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/slot_keeper.h"

namespace tessera::optim {
namespace {

// Whose gradients are not finite, for the message of a step that has failed. Shares the ranks'
// knowledge of gradients that are not finite: a reduction spreads the NaN of one rank over all, and
// only the sample that FSDP kept before the reduction tells its origin.

/// Names of parameters; the first three are shown.
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

/// `own` of each rank, and which ranks these are.
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

/// "" if no rank has names.
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

/// See describe_nonfinite(). Collective over `joint`; of this rank alone if that is empty.
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
      listed(joint, before, "", " brought what is not finite to the reduction of ");
  return !found.empty() ? found : listed(joint, now, "not finite on ", " is that of ");
}

/// The value is the same on every rank, so that all throw or none.
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
                  "; look at the data of that rank, lower the learning rate, or allow it with "
                  "error_if_nonfinite = false (TESSERA_DEBUG=1 warns of each gradient that is not "
                  "finite before it is reduced)");
  }
  return total;
}

void check(const NormOptions& options) {
  TESSERA_CHECK(options.norm_type > 0.0, "a ", options.norm_type,
                "-norm of gradients was asked for; p must be above 0 (infinity for the largest)");
}

/// The norm and the factor, with the gradients that they are of.
std::pair<GradTerms, kernels::NormAndFactor> total_and_factor(
    const std::vector<nn::SlotPtr>& parameters, double max_norm, const NormOptions& options) {
  TESSERA_CHECK(max_norm >= 0.0, "clip_grad_norm_ to a norm of ", max_norm,
                " was asked for; it must not be negative");
  check(options);
  const comm::CallerScope caller("clip_grad_norm_");
  const c10::AutoGradMode no_grad(false);
  GradTerms terms = collect_grads(parameters, options);
  check_gradient_copies(parameters, "clip_grad_norm_", options);
  kernels::NormAndFactor total = checked_norm(terms, parameters, options, max_norm);
  return {std::move(terms), std::move(total)};
}

}  // namespace

/// fp64 inside, fp32 for the caller.
at::Tensor grad_norm(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options) {
  check(options);
  const comm::CallerScope caller("grad_norm");
  const c10::AutoGradMode no_grad(false);
  return checked_norm(collect_grads(parameters, options), parameters, options).rounded;
}

std::string describe_nonfinite(const std::vector<nn::SlotPtr>& parameters,
                               const NormOptions& options) {
  const comm::CallerScope caller("describe_nonfinite");
  const c10::AutoGradMode no_grad(false);
  return nonfinite_text(collect_grads(parameters, options).joint, parameters);
}

at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                           const NormOptions& options) {
  const c10::AutoGradMode no_grad(false);
  const auto [terms, total] = total_and_factor(parameters, max_norm, options);
  // Always multiplied, by 1 as well: to ask whether it is needed would make the host wait.
  scale_by(terms.locals, total.factor);
  return total.rounded;
}

ClipFactor clip_factor(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                       const NormOptions& options) {
  const kernels::NormAndFactor total = total_and_factor(parameters, max_norm, options).second;
  return {total.rounded, total.factor};
}

}  // namespace tessera::optim
