#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace tessera::detail {

/// As check_policy, for operators where only parts reach that check: they would be refused late,
/// and after collectives.
void check_mixing(const std::string& name, const std::vector<at::Tensor>& tensors);

/// Whether the caller passed a distributed tensor, and no plain one (of more than one element):
/// whether such a plain tensor counts as replicated is the caller's choice.
bool has_only_distributed(const std::vector<at::Tensor>& tensors);

/// Writes an operator's result to a distributed `out`. Where libtorch would resize `out`, that one
/// cannot follow: its layout may not fit other sizes.
at::Tensor& copy_to(at::Tensor& out, const at::Tensor& result, const char* name);

}  // namespace tessera::detail
