#include "tessera/nn/parameter.h"

#include <algorithm>

#include "tessera/nn/module.h"

namespace tessera::nn {

void ParameterSlot::set(at::Tensor tensor) {
  tensor_ = std::move(tensor);
  for (const Owner& owner : owners_) owner.module->swap_parameter(owner.name, tensor_);
}

void ParameterSlot::add_owner(ModuleBase* module, std::string name) {
  owners_.push_back({module, std::move(name)});
}

void ParameterSlot::remove_owner(const ModuleBase* module, const std::string& name) {
  std::erase_if(owners_,
                [&](const Owner& owner) { return owner.module == module && owner.name == name; });
}

const at::Tensor& Parameter::get() const {
  static const at::Tensor kUndefined;
  return slot_ == nullptr ? kUndefined : (*slot_)->get();
}

}  // namespace tessera::nn
