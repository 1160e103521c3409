// A tensor that is only held, not read: every operator on it reaches the library's fallback, by a
// key that no other tensor has (lent_keys.h). No public function makes a tensor without any
// backend's key.
//
// No version differs.
//
// Canary: PlaceholderTensorCanary.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <utility>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

class PlaceholderTensor : public c10::TensorImpl {
 public:
  /// Has the sizes, type and device of `like`, for messages, which tell them.
  explicit PlaceholderTensor(const at::Tensor& like);

  /// Throws what is wrong with reading it.
  [[noreturn]] virtual void refuse() const = 0;

  // What Tensor::data() does, with which some optimizers begin.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion&,
                                                         bool) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&&,
                                                         bool) const override;
};

template <class Impl, class... Arguments>
at::Tensor make_placeholder(Arguments&&... arguments) {
  return at::Tensor(c10::make_intrusive<Impl>(std::forward<Arguments>(arguments)...));
}

}  // namespace tessera::detail
TESSERA_API_END
