#include "tessera/fsdp/forward_method.h"

#include <memory>

#include "unit.h"

namespace tessera::fsdp {

void before_forward(nn::ModuleBase& module, nn::TensorList arguments) {
  if (const std::shared_ptr<Unit> unit = module.attached<Unit>()) {
    unit->pre_forward(arguments);
  }
}

void after_forward(nn::ModuleBase& module, nn::TensorList results) {
  if (const std::shared_ptr<Unit> unit = module.attached<Unit>()) {
    unit->post_forward(module, results);
  }
}

}  // namespace tessera::fsdp
