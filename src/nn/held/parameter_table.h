#pragma once

#include <torch/nn/module.h>

#include <string>

namespace tessera::nn {

/// libtorch's own table of the parameters of `module`, which is for classes that derive from it.
inline torch::OrderedDict<std::string, at::Tensor>& parameter_table(torch::nn::Module& module) {
  struct Derived : torch::nn::Module {
    static auto table() { return &Derived::parameters_; }
  };
  return module.*Derived::table();
}

}  // namespace tessera::nn
