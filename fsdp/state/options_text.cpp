// Options as text, in the order of their fields. Their columns in a plan's table are in
// applied_units.cpp.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/fsdp/options.h"

namespace tessera::fsdp {
namespace {

class FieldTexts {
 public:
  void add(const char* name, const std::string& value) {
    texts_.push_back(fmt::format(".{} = {}", name, value));
  }
  void add_type(const char* name, const std::optional<c10::ScalarType>& type) {
    if (type) {
      add(name, c10::toString(*type));
    }
  }
  void add_flag(const char* name, bool value, bool by_default) {
    if (value != by_default) {
      add(name, value ? "true" : "false");
    }
  }
  /// Says only whether the function is set.
  void add_function(const char* name, bool is_given) {
    if (is_given) {
      add(name, "a function");
    }
  }
  std::string text() const { return fmt::format("{{{}}}", fmt::join(texts_, ", ")); }

 private:
  std::vector<std::string> texts_;
};

std::string text_of(const MixedPrecisionPolicy& policy) {
  const MixedPrecisionPolicy by_default;
  FieldTexts fields;
  fields.add_type("param_dtype", policy.param_dtype);
  fields.add_type("reduce_dtype", policy.reduce_dtype);
  fields.add_type("output_dtype", policy.output_dtype);
  fields.add_flag("cast_forward_inputs", policy.cast_forward_inputs,
                  by_default.cast_forward_inputs);
  fields.add_flag("restore_input_dtype", policy.restore_input_dtype,
                  by_default.restore_input_dtype);
  return fields.text();
}

std::string text_of(const OffloadPolicy& policy) {
  FieldTexts fields;
  fields.add_flag("pin_memory", policy.pin_memory, OffloadPolicy().pin_memory);
  return fields.text();
}

}  // namespace

std::string to_string(const Options& options) {
  const Options by_default;
  FieldTexts fields;
  if (const std::string policy = text_of(options.mp_policy); policy != "{}") {
    fields.add("mp_policy", policy);
  }
  if (options.offload_policy) {
    fields.add("offload_policy", text_of(*options.offload_policy));
  }
  if (options.reshard_after_forward) {
    fields.add("reshard_after_forward", *options.reshard_after_forward ? "true" : "false");
  }
  if (options.post_forward_mesh_size != by_default.post_forward_mesh_size) {
    fields.add("post_forward_mesh_size", std::to_string(options.post_forward_mesh_size));
  }
  fields.add_flag("shard_over_replicas", options.shard_over_replicas,
                  by_default.shard_over_replicas);
  fields.add_flag("may_be_unused", options.may_be_unused, by_default.may_be_unused);
  fields.add_function("shard_placement", options.shard_placement != nullptr);
  fields.add_function("parameter_mesh", options.parameter_mesh != nullptr);
  fields.add_function("all_gather_extension", options.all_gather_extension != nullptr);
  if (!options.ignored.empty()) {
    fields.add("ignored", fmt::format("{} parameter{}", options.ignored.size(),
                                      options.ignored.size() == 1 ? "" : "s"));
  }
  return fields.text();
}

std::ostream& operator<<(std::ostream& stream, const Options& options) {
  return stream << to_string(options);
}

}  // namespace tessera::fsdp
