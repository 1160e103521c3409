// The tensors of a model and an optimizer, under the names by which files store the tensors.

#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/nn/module.h"
#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

/// A parameter with all of its FQNs. A tied parameter has several FQNs.
struct NamedParameter {
  nn::SlotPtr slot;
  std::vector<std::string> names;  ///< all FQNs; the first is the name in named_slots()
  bool is_buffer = false;
};

/// Returns all parameters of a module, then its persistent buffers. Buffers of torch::nn modules
/// get temporary parameter slots (nn::ParameterSlot) that share the memory of the buffers.
std::vector<NamedParameter> saved_slots(const nn::ModuleBase& module);

/// Returns saved_slots() without adapters (nn::apply_lora), which model files do not contain.
std::vector<NamedParameter> model_slots(const nn::ModuleBase& module);

/// `state`: a name of optimizer state, such as "FQN.exp_avg". Returns the element of
/// `of_parameters` for the parameter FQN. Throws Error if there is no such parameter.
template <class T>
T& find_for_state(std::map<std::string, T>& of_parameters, const std::string& state) {
  const std::size_t dot = state.rfind('.');
  const auto found = of_parameters.find(state.substr(0, dot));
  TESSERA_CHECK(dot != std::string::npos && found != of_parameters.end(), "the optimizer state '",
                state,
                "' does not belong to a parameter of the model: pass the result of "
                "optim::named_state() for this model");
  return found->second;
}

/// Returns the value of nn::Dropout::calls() for each Dropout in a module, by FQN; an empty object
/// if there is no Dropout.
nlohmann::json dropout_calls(const nn::ModuleBase& module);

/// Throws Error for a parameter that is Partial or marked as different between ranks
/// (set_distinct_along), because a file has one value for each name.
void check_one_value(const nn::ParameterSlot& slot, const std::string& name);
void check_filled(const std::vector<NamedParameter>& parameters);
/// Throws Error if the values of the parameter cannot be set now, because the parameter is on the
/// meta device or gathered.
void check_fillable(const nn::ParameterSlot& slot, const std::string& name);

/// Whether a load can convert values of type `from` to type `to`. Only floating-point types are
/// converted; other conversions could lose values.
bool is_convertible_type(c10::ScalarType from, c10::ScalarType to);

/// Names of tensors that only the model or only the files have, or whose sizes or types differ.
struct Mismatch {
  std::vector<std::string> missing, unexpected, different;

  bool empty() const { return missing.empty() && unexpected.empty() && different.empty(); }
};
/// Returns a text such as "; missing: a, b": the first names of `names`, and how many more there
/// are. Returns "" if `names` is empty.
std::string listed(const char* what, const std::vector<std::string>& names);

/// A tensor in checkpoint files: a whole parameter, or the rows of a fused parameter that belong to
/// one of the fused parameter's parts (nn::StoredParts).
struct StoredTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  /// The rows of the parameter that the tensor stores. nullopt means all rows.
  std::optional<PartRows> rows{};
  /// Whether the tensor is one matrix of a stacked parameter. `sizes` then lacks dimension 0 of the
  /// parameter.
  bool is_matrix_of_stack = false;

  /// A function that receives values of a parameter (`part`) and the position of these values in
  /// the stored tensor (`offset`).
  using Visit = std::function<void(std::span<const std::int64_t> offset, const at::Tensor& part)>;
  /// Calls `visit` with the elements of `block` that belong to the stored tensor. `block` is the
  /// block of the parameter that begins at `offset`.
  void visit(std::span<const std::int64_t> offset, const at::Tensor& block,
             const Visit& visit) const;
  /// Calls `visit` for each block of the stored tensor that this rank has in `parameter`. The
  /// tensors that `visit` receives share the memory of `parameter`.
  void visit_own(const at::Tensor& parameter, const Visit& visit) const;
};

/// Returns the tensors that store a parameter in files. A fused parameter has one tensor for each
/// part. For example, "layers.0.qkv.weight" is stored as "layers.0.q.weight" and so on.
std::vector<StoredTensor> stored_tensors(const std::string& fqn, const nn::ParameterSlot& slot);

/// A checkpoint tensor, and the model or optimizer tensor with the values. A fused parameter has
/// one StateEntry for each part.
struct StateEntry {
  nn::SlotPtr slot;          ///< for optimizer state, the slot of its parameter
  bool is_parameter = true;  ///< true for a parameter or buffer, false for optimizer state
  at::Tensor tensor;
  StoredTensor stored;             ///< the tensor in files that is called names[0]
  std::vector<std::string> names;  ///< the tensor's names; several for a tied parameter
};

/// Returns the entries of all tensors that a checkpoint of `state` stores, in the same order on all
/// ranks. Throws Error for optimizer state of a parameter that the model lacks.
std::vector<StateEntry> state_entries(const StateDict& state);

}  // namespace tessera::checkpoint
