#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/module.h"
#include "testing/values.h"

namespace tessera::testing {

/// Fills parameters with values that depend on the parameter's index and sizes, but not on its
/// layout. Collective if a parameter is distributed.
inline void fill(nn::ModuleBase& module) {
  const c10::NoGradGuard no_grad;
  double seed = 0;
  for (const auto& [name, slot] : module.named_slots()) {
    const at::Tensor& to = slot->persistent();
    const at::Tensor from = uniform_values(to.sizes(), seed++, 0.3);
    if (tessera::is_distributed(to)) {
      const ShardingSpec& spec = sharding_spec(to);
      local_tensor(to).copy_(local_tensor(
          distribute_tensor(from, spec.mesh, to_placements(*spec.layout, to.sizes()))));
    } else {
      to.copy_(from);
    }
    slot->set_initialized(true);
  }
}

template <class M>
class Filled : public M {
 public:
  using M::M;

 private:
  struct Filling {
    explicit Filling(M& module) { fill(module); }
  };
  Filling filling_{*this};
};

/// Returns a module made under MetaDevice: its parameters have sizes, but no memory.
template <class M, class... Arguments>
std::shared_ptr<M> made_on_meta(Arguments&&... arguments) {
  const nn::MetaDevice meta;
  return std::make_shared<M>(std::forward<Arguments>(arguments)...);
}

inline void after_accumulation(const at::Tensor& leaf,
                               std::function<void(const at::Tensor&)> call) {
  struct Hook final : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::function<void(const at::Tensor&)> f) : call(std::move(f)) {}
    void operator()(const at::Tensor& tensor) override { call(tensor); }
    std::function<void(const at::Tensor&)> call;
  };
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<Hook>(std::move(call)));
}

/// Returns the global values of all parameters, concatenated. Collective if any is distributed.
inline at::Tensor parameter_values(const nn::ModuleBase& module) {
  std::vector<at::Tensor> all;
  for (const auto& [name, slot] : module.named_slots()) {
    all.push_back(full_tensor(slot->persistent()).flatten());
  }
  return at::cat(all);
}

inline std::vector<at::Tensor> gradients_of(const nn::ModuleBase& model) {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : model.named_slots()) {
    gradients.push_back(slot->get().grad());
  }
  return gradients;
}

/// Expects gradient i to be `factor` * expected[i]. Collective if a gradient is distributed.
inline void expect_gradients(const nn::ModuleBase& model, const std::vector<at::Tensor>& expected,
                             double factor = 1, double relative = 1e-4, double absolute = 1e-6) {
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor gradient = full_tensor(slot->persistent().grad());
    EXPECT_TRUE(gradient.allclose(expected[i++].mul(factor), relative, absolute)) << name;
  }
}

}  // namespace tessera::testing
