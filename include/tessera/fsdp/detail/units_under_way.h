#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

class Unit;

/// The units of a model, found once, for who asks often which of them runs.
class UnitsUnderWay {
 public:
  explicit UnitsUnderWay(const nn::ModuleBase& model);
  /// As fsdp::under_way().
  std::string text() const;

 private:
  std::vector<std::shared_ptr<Unit>> units_;
};

}  // namespace tessera::fsdp
TESSERA_API_END
