// Which form a call takes. The other files of this folder add them, by kinds of operators;
// plan_call looks here once for each new call, after the rule has determined what would be moved.

#include "forms/form.h"

#include <list>
#include <unordered_map>

namespace tessera::detail {
namespace {

constexpr std::string_view kAtenPrefix = "aten::";

/// A list does not move its elements when it grows.
std::list<std::vector<Form>>& added_forms() {
  static std::list<std::vector<Form>> forms;
  return forms;
}

/// The forms of each operator that has any, by its name in the tables.
std::unordered_map<std::string_view, std::vector<const Form*>> forms_by_name() {
  std::unordered_map<std::string_view, std::vector<const Form*>> forms;
  for (const auto table : form_tables()) {
    for (const Form& form : table) {
      forms[form.name].push_back(&form);
    }
  }
  return forms;
}

}  // namespace

AddedForms::AddedForms(std::initializer_list<Form> forms) {
  added_forms().emplace_back(forms);
}

std::vector<std::span<const Form>> form_tables() {
  return {added_forms().begin(), added_forms().end()};
}

std::span<const Form* const> forms_of(const OperatorInfo& info) {
  static const auto by_name = forms_by_name();
  std::string_view name = info.name;
  if (name.starts_with(kAtenPrefix)) {
    name.remove_prefix(kAtenPrefix.size());
  }
  const auto found = by_name.find(name);
  return found == by_name.end() ? std::span<const Form* const>{} : found->second;
}

FormChoice choose_form(const OperatorInfo& info, const BoundCall& bound, double bytes) {
  FormChoice choice;
  for (const Form* form : forms_of(info)) {
    const std::optional<double> own = form->bytes(bound);
    if (own && form->own_collectives) {
      return {form, /*moves=*/false};
    }
    // A form that sends as much as the rule is not worth its own kernels; of equal forms the first
    // is taken.
    if (!own || *own >= bytes) {
      continue;
    }
    choice = {form, *own > 0};
    bytes = *own;
  }
  return choice;
}

}  // namespace tessera::detail
