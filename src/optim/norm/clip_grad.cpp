// Norms of gradients and clipping, for plain and distributed parameters alike. The norm stays on
// the device: the host waits only if it is to check it.
#include "tessera/optim/clip_grad.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "norm/grad_terms.h"
#include "norm/nonfinite.h"
#include "norm/plain_gradients.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

/// The value is the same on every rank, so that all throw or none.
at::Tensor checked_norm(const GradTerms& terms, const std::vector<nn::SlotPtr>& parameters,
                        const NormOptions& options) {
  at::Tensor norm = total_norm(terms, options.norm_type);
  // Parameters of other ranks may be others (pipeline stages).
  if (!options.over && options.distinct_along.empty()) {
    check_plain_gradients(parameters, terms.joint, norm);
  }
  if (options.error_if_nonfinite) {
    const auto value = norm.item<double>();
    TESSERA_CHECK(std::isfinite(value), "the ", options.norm_type, "-norm of the gradients is ",
                  value, ": ", nonfinite_text(terms.joint, parameters),
                  "; look at the data of that rank, lower the learning rate, or allow it with "
                  "error_if_nonfinite = false (TESSERA_DEBUG=1 warns of each gradient that is not "
                  "finite before it is reduced)");
  }
  return norm;
}

void check(const NormOptions& options) {
  TESSERA_CHECK(options.norm_type > 0.0, "a ", options.norm_type,
                "-norm of gradients was asked for; p must be above 0 (infinity for the largest)");
}

}  // namespace

/// fp64 inside, fp32 for the caller.
at::Tensor grad_norm(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options) {
  check(options);
  const comm::CallerScope caller("grad_norm");
  const c10::AutoGradMode no_grad(false);
  return checked_norm(collect_grads(parameters, options), parameters, options)
      .to(c10::ScalarType::Float);
}

std::string describe_nonfinite(const std::vector<nn::SlotPtr>& parameters,
                               const NormOptions& options) {
  const comm::CallerScope caller("describe_nonfinite");
  const c10::AutoGradMode no_grad(false);
  return nonfinite_text(collect_grads(parameters, options).joint, parameters);
}

at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                           const NormOptions& options) {
  TESSERA_CHECK(max_norm >= 0.0, "clip_grad_norm_ to a norm of ", max_norm,
                " was asked for; it must not be negative");
  check(options);
  const comm::CallerScope caller("clip_grad_norm_");
  const c10::AutoGradMode no_grad(false);
  const GradTerms terms = collect_grads(parameters, options);
  const at::Tensor norm = checked_norm(terms, parameters, options);
  // Always multiplied, by 1 as well: to ask whether it is needed would make the host wait. The 1e-6
  // is PyTorch's.
  scale_grads(terms, (max_norm / (norm + 1e-6)).clamp_max(1.0));
  return norm.to(c10::ScalarType::Float);
}

}  // namespace tessera::optim
