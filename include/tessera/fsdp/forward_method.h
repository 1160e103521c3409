#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"
#include "tessera/nn/visit_tensors.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// What FSDP does around the forward of `module`'s unit, if it has one: gathers, casts `arguments`
/// and `results` in place, and lets backward find its way through them. Collective.
/// register_forward_method calls both.
void before_forward(nn::ModuleBase& module, nn::TensorList arguments);
/// The other half of before_forward(), with the tensors in the method's result. Collective.
void after_forward(nn::ModuleBase& module, nn::TensorList results);
/// In place of after_forward(), where the call has thrown. Not collective.
void abandon_forward(nn::ModuleBase& module);

/// A method other than forward that uses a unit's parameters, called as forward is: the parameters
/// are unsharded in it, and their gradients reduced in its backward. See register_forward_method.
template <class M, class Method>
class ForwardMethod {
 public:
  ForwardMethod(M& module, Method method) : module_(&module), method_(method) {}

  /// Arguments are copied. Collective, with gradients as forward. Returns what the method returns.
  template <class... Args>
  auto operator()(Args&&... args) const {
    std::tuple<std::decay_t<Args>...> arguments(std::forward<Args>(args)...);
    before_forward(*module_, nn::collect_tensors(arguments));
    const auto call = [this](auto&... values) {
      try {
        return (module_->*method_)(values...);
      } catch (...) {
        abandon_forward(*module_);
        throw;
      }
    };
    if constexpr (std::is_void_v<decltype(std::apply(call, arguments))>) {
      std::apply(call, arguments);
      after_forward(*module_, {});
    } else {
      auto result = std::apply(call, arguments);
      after_forward(*module_, nn::collect_tensors(result));
      return result;
    }
  }

 private:
  M* module_;
  Method method_;
};

/// Makes a method of a unit's module callable from outside, as FSDP2's
/// register_fsdp_forward_method:
///   const auto encode = fsdp::register_forward_method(*model, &Model::encode);
///   const at::Tensor code = encode(x);
/// Calls through the result gather; those of the method itself do not. For a module that is not a
/// unit, it just calls the method. The module must outlive it. Throws Error for a null method.
template <class M, class Method>
[[nodiscard]] ForwardMethod<M, Method> register_forward_method(M& module, Method method) {
  static_assert(std::is_member_function_pointer_v<Method>, "pass a method, such as &Model::encode");
  TESSERA_CHECK(method != nullptr, "register_forward_method: the method of a ", module.name(),
                " is null; pass a method, such as &Model::encode");
  return {module, method};
}

}  // namespace tessera::fsdp
TESSERA_API_END
