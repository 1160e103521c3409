#include "verify/judge.h"

#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "compare/difference.h"
#include "compare/parts.h"
#include "verify/findings.h"
#include "verify/pairs.h"

namespace tessera::observe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Finding finding_of(const Pair& pair, const VerifyOptions& options) {
  Finding finding{pair.name, pair.fqn, pair.layout};
  finding.noise = pair.noise;
  if (!pair.on_mesh.defined() && !pair.one_rank.defined()) {
    return finding;
  }
  if (!pair.on_mesh.defined() || !pair.one_rank.defined()) {
    finding.distance = kInfinity;
    finding.layout = fmt::format(
        "exists {}", pair.on_mesh.defined() ? "on the mesh alone" : "on one rank alone, not");
    return finding;
  }
  finding.largest = largest_of(pair.one_rank);
  finding.epsilon =
      std::max({epsilon_of(pair.on_mesh.scalar_type()), epsilon_of(pair.one_rank.scalar_type()),
                options.coarsest ? epsilon_of(*options.coarsest) : 0.0});
  if (pair.on_mesh.sizes() != pair.one_rank.sizes()) {
    finding.distance = kInfinity;
    finding.layout += fmt::format(", is {} on one rank, and so here", layout_of(pair.one_rank));
    return finding;
  }
  if (pair.one_rank.numel() == 0) {
    return finding;
  }
  const Farthest found = farthest(pair.on_mesh, pair.one_rank);
  finding.distance = found.distance;
  finding.at = coordinate_of(found.index, pair.one_rank.sizes());
  finding.value = fmt::format("{:.6g}", found.value);
  finding.recorded = fmt::format("{:.6g}", found.recorded);
  return finding;
}

std::vector<Finding> findings_of(const std::vector<Pair>& pairs, const VerifyOptions& options) {
  std::vector<Finding> findings;
  for (const Pair& pair : pairs) {
    findings.push_back(finding_of(pair, options));
  }
  return findings;
}

/// If samples are split, only the loss, which comes last, can be compared.
std::vector<Finding> of_outputs(std::vector<Pair> pairs, const PairingRanks& ranks,
                                const VerifyOptions& options) {
  if (options.splits_samples) {
    pairs.erase(pairs.begin(), pairs.end() - 1);
  }
  ranks.make_whole(pairs, /*all=*/options.splits_samples);
  if (options.splits_samples) {
    pairs[0].on_mesh = ranks.mean_over_batches(pairs[0].on_mesh);
    pairs[0].one_rank = ranks.mean_over_batches(pairs[0].one_rank);
  }
  return findings_of(pairs, options);
}

std::vector<Finding> of_gradients(std::vector<Pair> pairs, const PairingRanks& ranks,
                                  const VerifyOptions& options) {
  ranks.make_whole(pairs, /*all=*/true);
  for (Pair& pair : pairs) {
    pair.one_rank = ranks.mean_over_batches(pair.one_rank);
    // Whether a parameter that nothing uses has a gradient is FSDP's choice.
    pair.on_mesh = pair.on_mesh.defined() ? pair.on_mesh : at::zeros_like(pair.one_rank);
  }
  return findings_of(pairs, options);
}

void raise(std::vector<double>& noise, const std::vector<SeenTensor>& run,
           const std::vector<SeenTensor>& other) {
  std::map<std::string, at::Tensor> others;
  for (const SeenTensor& tensor : other) {
    others.emplace(tensor.name, tensor.value);
  }
  noise.resize(run.size());
  for (std::size_t i = 0; i < run.size(); ++i) {
    const at::Tensor& ours = run[i].value;
    const at::Tensor& theirs = others[run[i].name];
    const bool alike =
        ours.defined() == theirs.defined() && (!ours.defined() || ours.sizes() == theirs.sizes());
    const double distance = !alike           ? kInfinity
                            : ours.defined() ? farthest(theirs, ours).distance
                                             : 0;
    noise[i] = std::max(noise[i], distance);
  }
}

std::size_t count_modules(const std::vector<SeenTensor>& outputs) {
  std::set<std::string> modules;
  for (const SeenTensor& output : outputs) {
    modules.insert(output.fqn);
  }
  return modules.size();
}

}  // namespace

void raise_noise(Noise& noise, const SeenRun& run, const SeenRun& other) {
  raise(noise.outputs, run.outputs, other.outputs);
  raise(noise.gradients, run.gradients, other.gradients);
}

VerifyReport judge(const SeenRun& on_mesh, const SeenRun& one_rank, const Noise& noise,
                   const DeviceMesh& mesh, const VerifyOptions& options) {
  const PairingRanks ranks(mesh, options.batch_dims);
  const std::vector<Finding> outputs =
      of_outputs(pairs_of(on_mesh.outputs, one_rank.outputs, noise.outputs), ranks, options);
  const std::vector<Finding> gradients = of_gradients(
      pairs_of(on_mesh.gradients, one_rank.gradients, noise.gradients), ranks, options);
  Together of_calls = put_together(outputs, mesh);
  Together of_parameters = put_together(gradients, mesh);
  return {.outputs = std::move(of_calls.differences),
          .gradients = std::move(of_parameters.differences),
          .modules = options.splits_samples ? 0 : count_modules(one_rank.outputs),
          .parameters = gradients.size(),
          .largest = std::max(of_calls.largest, of_parameters.largest)};
}

}  // namespace tessera::observe
