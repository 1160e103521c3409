// The tensors of a model and an optimizer, under the names by which files store them.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/nn/module.h"
#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

/// A parameter and every FQN that leads to it: several where it is tied.
struct NamedParameter {
  nn::SlotPtr slot;
  std::vector<std::string> names;  ///< the first of them is that of named_slots()
  bool is_buffer = false;
};

/// The parameters of a module, in its order, each once.
std::vector<NamedParameter> parameter_names(const nn::ModuleBase& module);

/// All parameters, then the buffers that are saved. Buffers of libtorch's modules get slots for
/// this call, which share their memory.
std::vector<NamedParameter> saved_slots(const nn::ModuleBase& module);

/// Those of saved_slots() that the files of a model hold: all but its adapters' (nn::apply_lora).
std::vector<NamedParameter> model_slots(const nn::ModuleBase& module);

/// The element of `of_parameters` for the parameter of an optimizer's state "FQN.exp_avg". Throws
/// Error if there is none.
template <class T>
T& find_for_state(std::map<std::string, T>& of_parameters, const std::string& state) {
  const std::size_t dot = state.rfind('.');
  const auto found = of_parameters.find(state.substr(0, dot));
  TESSERA_CHECK(dot != std::string::npos && found != of_parameters.end(), "the optimizer's state '",
                state,
                "' is not named by a parameter of the model: pass what optim::named_state() "
                "gives for this model");
  return found->second;
}

/// Throws Error for a parameter that is a pending sum, or that is known to differ between ranks
/// (set_distinct_along): a file has one value for each name.
void check_one_value(const nn::ParameterSlot& slot, const std::string& name);
/// Throws Error for a parameter that is not filled.
void check_filled(const std::vector<NamedParameter>& parameters);
/// Throws Error for a parameter whose values cannot be set now.
void check_fillable(const nn::ParameterSlot& slot, const std::string& name);

/// Whether a load may convert the type: between floating-point types only. Other conversions could
/// lose values.
bool is_convertible_type(c10::ScalarType from, c10::ScalarType to);

/// The tensors in which a model and its files differ.
struct Mismatch {
  std::vector<std::string> missing, unexpected, different;

  bool empty() const { return missing.empty() && unexpected.empty() && different.empty(); }
};
/// "; missing: a, b": the first names, and how many more there are. "" for none.
std::string listed(const char* what, const std::vector<std::string>& names);

/// A tensor of the files: a parameter, or the rows of a fused one that belong to one of its parts
/// (nn::StoredParts).
struct StoredTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::optional<PartRows> rows{};  ///< those of the parameter; nullopt: all

  /// With an offset in this tensor, and the part of `block` that goes there.
  using Visit = std::function<void(std::span<const std::int64_t> offset, const at::Tensor& part)>;
  /// Calls `visit` for the overlap of a block of the parameter at `offset` with this tensor.
  void visit(std::span<const std::int64_t> offset, const at::Tensor& block,
             const Visit& visit) const;
};

/// The tensors that files store a parameter as: under its FQN, or by parts, whose modules are
/// beside the parameter's module ("layers.0.qkv.weight" as "layers.0.q.weight" and so on).
std::vector<StoredTensor> stored_tensors(const std::string& fqn, const nn::ParameterSlot& slot);

/// A tensor of a checkpoint, and the tensor of the state that it is or is a part of. The parts of a
/// fused parameter are stored one by one, so that models with and without fusion can load them.
struct StateEntry {
  nn::SlotPtr slot;          ///< of the parameter, also for the optimizer's state beside it
  bool is_parameter = true;  ///< or a buffer; else an optimizer's state
  at::Tensor tensor;
  StoredTensor stored;             ///< under the first name
  std::vector<std::string> names;  ///< several for tied parameters
};

/// The same list on every rank, if the ranks have the same state. Throws Error for optimizer state
/// of a parameter that the model lacks.
std::vector<StateEntry> state_entries(const StateDict& state);

}  // namespace tessera::checkpoint
