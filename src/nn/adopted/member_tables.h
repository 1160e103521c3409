#pragma once

#include <torch/nn/module.h>

#include <string>

#include "tessera/nn/detail/adopted_module.h"

namespace tessera::nn {

/// Adds the members of one of libtorch's modules that hold its own parameters and buffers.
void find_in_libtorch(torch::nn::Module& module, detail::ModuleMembers& found);

/// libtorch's own table of the parameters of `module`, which is for classes that derive from it.
inline torch::OrderedDict<std::string, at::Tensor>& parameter_table(torch::nn::Module& module) {
  struct Derived : torch::nn::Module {
    static auto table() { return &Derived::parameters_; }
  };
  return module.*Derived::table();
}

/// What a norm's running statistic begins with: "running_var" with 1, others with 0.
inline double first_of_statistic(const std::string& name) {
  return name == "running_var" ? 1.0 : 0.0;
}

}  // namespace tessera::nn
