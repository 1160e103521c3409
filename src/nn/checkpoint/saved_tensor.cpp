#include "saved_tensor.h"

#include <c10/util/ArrayRef.h>

#include <sstream>

#include "tessera/core/error.h"

namespace tessera::nn::detail {

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : sizes_(tensor.sizes().vec()), dtype_(tensor.scalar_type()), device_(tensor.device()) {
  if (tessera::is_distributed(tensor)) sharding_ = sharding_spec(tensor);
}

std::string SavedTensor::text() const {
  std::ostringstream text;
  text << dtype_ << c10::IntArrayRef(sizes_) << " on " << device_;
  if (sharding_) text << ", layout " << to_string(*sharding_->layout);
  return text.str();
}

void SavedTensor::check(const at::Tensor& again, std::size_t index) const {
  const SavedTensor found(again);
  TESSERA_CHECK(found == *this, "checkpoint: the recomputation saved tensor ", index,
                " for backward as ", found.text(), ", but the forward saved it as ", text(),
                "; the checkpointed function must do the same both times: let it depend on its "
                "arguments, parameters and random numbers only");
}

const at::Tensor& RecomputedTensor::get() const {
  TESSERA_CHECK(tensor_._version() == version_, "checkpoint: a tensor of sizes ", tensor_.sizes(),
                " that backward needs was modified in place after it was saved; write to a copy");
  return tensor_;
}

}  // namespace tessera::nn::detail
