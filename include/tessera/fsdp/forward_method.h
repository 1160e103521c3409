#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// A callable for a method, other than forward, that uses the parameters of a unit. A call behaves
/// like forward: the parameters are unsharded during the call, and their gradients are reduced in
/// the backward of the call. See register_forward_method.
template <class M, class Method>
class ForwardMethod {
 public:
  ForwardMethod(M& module, Method method) : module_(&module), method_(method) {}

  /// Calls the method with copies of the arguments and returns its result. Collective, with
  /// gradients, like forward.
  template <class... Args>
  auto operator()(Args&&... args) const {
    const auto method = [this](auto&... values) { return (module_->*method_)(values...); };
    return module_->call_method(method, std::forward<Args>(args)...);
  }

 private:
  M* module_;
  Method method_;
};

/// Makes a method of a unit's module callable from outside, like FSDP2's
/// register_fsdp_forward_method:
///   const auto encode = fsdp::register_forward_method(*model, &Model::encode);
///   const at::Tensor code = encode(x);
/// Calls through the returned object gather the parameters; direct calls of the method do not.
/// Under a plan of tensor_parallel::parallelize_module the method also runs in the plan's scope, as
/// forward does. For a module that has neither a unit nor a plan, the object only calls the method.
/// The module must outlive the object. Throws Error for a null method.
template <class M, class Method>
[[nodiscard]] ForwardMethod<M, Method> register_forward_method(M& module, Method method) {
  static_assert(std::derived_from<M, nn::ModuleBase>,
                "pass the module itself, *model, and not the pointer to it");
  static_assert(std::is_member_function_pointer_v<Method>, "pass a method, such as &Model::encode");
  TESSERA_CHECK(method != nullptr, "register_forward_method: the method of a ", module.name(),
                " is null; pass a method, such as &Model::encode");
  return {module, method};
}

}  // namespace tessera::fsdp
TESSERA_API_END
