#include "agree.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// Why `work` failed; empty if it did not.
std::string failure_of(const std::function<void()>& work) {
  try {
    work();
    return "";
  } catch (const std::exception& error) {
    return std::string(error.what()).empty() ? "an error without a message" : error.what();
  }
}

/// `text` of rank `root`, on every rank. `size` is its length.
std::string broadcast_text(comm::Communicator& group, c10::DeviceType device, int root,
                           const std::string& text, std::int64_t size) {
  at::Tensor bytes = at::empty({size}, at::kByte);
  if (group.rank() == root) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  bytes = bytes.to(device);
  group.broadcast(bytes, root)->wait();
  bytes = bytes.cpu();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(size)};
}

}  // namespace

void agree(comm::Communicator& group, c10::DeviceType device, const std::function<void()>& work) {
  const auto failure = failure_of(work);
  const auto mine = static_cast<std::int64_t>(failure.size());
  const auto options = at::TensorOptions(at::kLong).device(device);
  at::Tensor sizes = at::empty({group.size()}, options);
  group.all_gather(sizes, at::full({1}, mine, options))->wait();
  sizes = sizes.cpu();
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto size = sizes.const_data_ptr<std::int64_t>()[rank];
    if (size > 0) fail(broadcast_text(group, device, rank, failure, size));
  }
}

}  // namespace tessera::checkpoint
