#include "family_run.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>

#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/random.h"
#include "testing/distributed.h"
#include "testing/placement_text.h"

namespace tessera::testing {
namespace {

std::string text_of(const Placement& placement) {
  if (is_replicate(placement)) {
    return "R";
  }
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    return fmt::format("S{}", shard->dim);
  }
  if (const auto* partial = std::get_if<Partial>(&placement)) {
    return partial->op == ReduceOp::kSum ? "P" : "P" + to_string(partial->op);
  }
  return to_string(placement);
}

std::string layout_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "-";
  }
  if (!tessera::is_distributed(tensor)) {
    return "plain";
  }
  std::string text;
  for (const auto& placement : DistributedTensor(tensor).placements()) {
    text += (text.empty() ? "" : ",") + text_of(placement);
  }
  return text;
}

std::string layouts_of(const Tensors& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    text += (text.empty() ? "" : " ") + layout_of(tensor);
  }
  return text;
}

/// Calls and bytes of each collective, over all groups.
std::string describe(const CommunicationScope& scope) {
  std::map<std::string, comm::Traffic> sums;
  for (const auto& [key, traffic] : scope.table()) {
    sums[key.second].calls += traffic.calls;
    sums[key.second].bytes += traffic.bytes;
  }
  std::string text;
  for (const auto& [collective, traffic] : sums) {
    if (traffic.calls == 0) {
      continue;
    }
    if (!text.empty()) {
      text += ", ";
    }
    if (traffic.calls > 1) {
      text += fmt::format("{} ", traffic.calls);
    }
    text += fmt::format("{} {}", collective, traffic.bytes);
  }
  return text.empty() ? "-" : text;
}

at::Tensor value_of(const Operand& operand, int seed) {
  const at::Tensor reals = values(operand.sizes, seed);
  switch (operand.kind) {
    case Operand::kReals:
      return reals;
    case Operand::kPositive:
      return reals.abs().add(0.5);
    case Operand::kMask:
      return reals.gt(0);
    case Operand::kIndices:
      return reals.mul(1000).abs().to(at::kLong).remainder(operand.limit);
  }
  return {};
}

Tensors values_of(const Operation& operation) {
  Tensors all;
  for (const Operand& operand : operation.operands) {
    all.push_back(value_of(operand, static_cast<int>(all.size())));
  }
  return all;
}

Tensors full_tensors(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(full_tensor(tensor));
  }
  return result;
}

/// A gradient of the sizes and layout of the result.
at::Tensor gradient_for(const at::Tensor& result, int seed) {
  const at::Tensor gradient = values(result.sizes(), seed);
  if (!tessera::is_distributed(result)) {
    return gradient;
  }
  Placements placements = DistributedTensor(result).placements();
  for (Placement& placement : placements) {
    if (is_partial(placement)) {
      placement = Replicate{};
    }
  }
  return distribute_tensor(gradient, DistributedTensor(result).mesh(), placements);
}

/// Gradients of the reals among `operands`, for those results that have one.
Tensors gradients_of(const Tensors& results, const Tensors& operands) {
  Tensors roots, seeds, inputs;
  for (const auto& result : results) {
    if (!result.requires_grad()) {
      continue;
    }
    seeds.push_back(gradient_for(result, 5 + static_cast<int>(roots.size())));
    roots.push_back(result);
  }
  for (const auto& operand : operands) {
    if (operand.requires_grad()) {
      inputs.push_back(operand);
    }
  }
  return torch::autograd::grad(roots, inputs, seeds, /*retain_graph=*/false,
                               /*create_graph=*/false, /*allow_unused=*/true);
}

/// Runs the operation on operands; the real ones get gradients. They are no leaves:
/// a leaf's gradient would be brought to the leaf's layout.
Outcome run(const Operation& operation, Tensors operands, const DeviceMesh* mesh) {
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const bool real = operation.operands[i].kind <= Operand::kPositive;
    if (operation.differentiable && real) {
      operands[i] = operands[i].detach().requires_grad_().view_as(operands[i]);
    }
  }
  Outcome outcome;
  Tensors results, gradients;
  const auto count = [&](const auto& work) -> std::string {
    if (mesh == nullptr) {
      return work(), "-";
    }
    const CommunicationScope scope(*mesh);
    work();
    return describe(scope);
  };
  outcome.forward = count([&] { results = operation.run(operands); });
  outcome.layout_of_results = layouts_of(results);
  outcome.results = full_tensors(results);
  if (!operation.differentiable) {
    return outcome;
  }
  outcome.backward = count([&] { gradients = gradients_of(results, operands); });
  outcome.layout_of_gradients = layouts_of(gradients);
  outcome.gradients = full_tensors(gradients);
  return outcome;
}

Tensors distribute(const Tensors& values, const std::string& layouts, const DeviceMesh& mesh) {
  const auto each = split(layouts, ' ');
  Tensors result;
  for (std::size_t i = 0; i < values.size(); ++i) {
    result.push_back(distribute_tensor(values[i], mesh, placements_of(each.at(i))));
  }
  return result;
}

std::string replicated(const Operation& operation, const DeviceMesh& mesh) {
  std::string text;
  for (std::size_t i = 0; i < operation.operands.size(); ++i) {
    text += mesh.ndim() == 1 ? "R " : "R,R ";
  }
  return text;
}

}  // namespace

Outcome run_as(const Operation& operation, const char* layouts, const DeviceMesh& mesh) {
  if (operation.random) {
    manual_seed(7);
  }
  return run(operation, distribute(values_of(operation), layouts, mesh), &mesh);
}

Outcome expected_of(const Operation& operation, const DeviceMesh& mesh) {
  if (operation.random) {
    return run_as(operation, replicated(operation, mesh).c_str(), mesh);
  }
  return run(operation, values_of(operation), nullptr);
}

}  // namespace tessera::testing
