#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

class Unit;

/// ActiveUnits looks up the FSDP units of a model only once. Use ActiveUnits in code that often
/// calls current_unit(), such as a log of all operators.
class ActiveUnits {
 public:
  explicit ActiveUnits(const nn::ModuleBase& model);
  /// Returns the result of fsdp::current_unit() for the model.
  std::string text() const;

 private:
  std::vector<std::shared_ptr<Unit>> units_;
};

}  // namespace tessera::fsdp
TESSERA_API_END
