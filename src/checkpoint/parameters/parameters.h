// Shared by loading and saving: a model's parameters, for any kind of files.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {

/// A parameter and every FQN that leads to it: several where it is tied.
struct NamedParameter {
  nn::SlotPtr slot;
  std::vector<std::string> names;  ///< the first of them is that of named_slots()
  bool is_buffer = false;
};

/// The parameters of a module, in its order, each once.
std::vector<NamedParameter> parameter_names(const nn::ModuleBase& module);

/// All parameters, and behind them the buffers that are saved. Those of libtorch's own modules have
/// slots made for the call, which share their memory.
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
/// (set_distinct_along): only one copy would be saved, and the others lost.
void check_one_value(const nn::ParameterSlot& slot, const std::string& name);
/// Throws Error for a parameter that is not filled.
void check_filled(const std::vector<NamedParameter>& parameters);
/// Throws Error for a parameter whose values cannot be set now.
void check_fillable(const nn::ParameterSlot& slot, const std::string& name);

/// Whether a load may convert the type. Floating-point types are converted; a silent conversion of
/// others could lose values.
bool is_convertible_type(c10::ScalarType from, c10::ScalarType to);

/// The tensors in which a model and its files differ.
struct Mismatch {
  std::vector<std::string> missing, unexpected, different;

  bool empty() const { return missing.empty() && unexpected.empty() && different.empty(); }
};
/// "; missing: a, b": the first names, and how many more there are. "" for none.
std::string listed(const char* what, const std::vector<std::string>& names);

}  // namespace tessera::checkpoint
