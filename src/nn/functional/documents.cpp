#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"
#include "tessera/nn/causal_attention.h"

namespace tessera::nn {
namespace {

/// Page-locked for a GPU, so that nobody waits for the copy.
at::Tensor copied_to(const std::vector<std::int64_t>& numbers, c10::Device device) {
  const at::Tensor host =
      at::empty({std::ssize(numbers)}, at::dtype(at::kInt).pinned_memory(device.is_cuda()));
  std::ranges::transform(numbers, host.mutable_data_ptr<std::int32_t>(),
                         [](std::int64_t number) { return static_cast<std::int32_t>(number); });
  return host.to(host.options().device(device).pinned_memory(false), /*non_blocking=*/true);
}

}  // namespace

Documents::Documents(const at::Tensor& positions, c10::Device device) {
  TESSERA_CHECK(positions.dim() == 2 && positions.scalar_type() == at::kLong,
                "documents were said by positions of sizes ", positions.sizes(), " in ",
                positions.scalar_type(), "; give (batch, tokens) in int64");
  batch_ = positions.size(0);
  tokens_ = positions.size(1);
  const at::Tensor host = positions.cpu().contiguous();
  const auto* position = host.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < host.numel(); ++i) {
    if (i % tokens_ == 0 || position[i] == 0) {
      offsets_.push_back(i);
    }
  }
  offsets_.push_back(host.numel());
  for (const std::int64_t length : lengths()) {
    longest_ = std::max(longest_, length);
  }
  // A call in inference mode may make it for training, too.
  const c10::InferenceMode ordinary(false);
  device_offsets_ = copied_to(offsets_, device);
}

std::vector<std::int64_t> Documents::lengths() const {
  std::vector<std::int64_t> lengths(offsets_.size());
  std::adjacent_difference(offsets_.begin(), offsets_.end(), lengths.begin());
  return {lengths.begin() + 1, lengths.end()};
}

void Documents::check_sequences(std::int64_t batch, std::int64_t tokens) const {
  TESSERA_CHECK(batch == batch_ && tokens == tokens_, "attention of ", batch, " sequences of ",
                tokens, " tokens was given documents of ", batch_, " sequences of ", tokens_,
                "; make them of the positions of these sequences");
}

at::Tensor Documents::mask(std::int64_t window) const {
  const c10::Device device = device_offsets_.device();
  std::vector<std::int64_t> of_tokens;
  std::int64_t document = 0;
  for (const std::int64_t length : lengths()) {
    of_tokens.insert(of_tokens.end(), static_cast<std::size_t>(length), document++);
  }
  const at::Tensor ids =
      at::tensor(of_tokens, at::dtype(at::kLong)).view({batch_, tokens_}).to(device);
  return ids.unsqueeze(2)
      .eq(ids.unsqueeze(1))
      .logical_and_(causal_mask(tokens_, window, device))
      .unsqueeze(1);
}

}  // namespace tessera::nn
