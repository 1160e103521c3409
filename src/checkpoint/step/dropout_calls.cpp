#include "step/dropout_calls.h"

#include <string>

#include "step/objects.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::checkpoint {

nlohmann::json dropout_calls(const nn::ModuleBase& module) {
  nlohmann::json calls = nlohmann::json::object();
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& each) {
    if (const auto* dropout = dynamic_cast<const nn::Dropout*>(&each)) {
      calls[fqn] = dropout->calls();
    }
  });
  return calls;
}

void set_dropout_calls(nn::ModuleBase& module, const nlohmann::json& saved,
                       const LoadOptions& options) {
  nn::visit_modules(module, [&](const std::string& fqn, nn::ModuleBase& each) {
    auto* dropout = dynamic_cast<nn::Dropout*>(&each);
    if (dropout != nullptr && saved.contains(fqn) && !is_excluded(fqn, options)) {
      dropout->set_calls(saved.at(fqn));
    }
  });
}

}  // namespace tessera::checkpoint
