// Small collectives by which ranks compare values and share decisions, on every back end. Autograd
// is disabled, so that the caller's autograd graph does not record these collectives.

#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/agreement.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

#include "group_info.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// Returns a tensor that shares the memory of `values`. at::tensor() is not used, because in a
/// MetaDevice scope at::tensor() makes a tensor without memory.
at::Tensor over(const std::int64_t* values, std::size_t count) {
  return at::from_blob(const_cast<std::int64_t*>(values), {static_cast<std::int64_t>(count)},
                       at::kLong);
}

/// Returns the device of the tensors that a collective sends: the CPU if `device` is "meta"
/// (meta_world()), because meta tensors have no memory; otherwise `device`.
c10::Device carrier(c10::Device device) {
  return device.is_meta() ? c10::Device(c10::kCPU) : device;
}

/// Returns the text `own` as an int64 tensor on `device`, padded with zero bytes to `length`. NCCL
/// copies 8-byte numbers faster than single bytes.
at::Tensor to_numbers(std::string own, std::int64_t length, c10::Device device) {
  constexpr std::int64_t kWidth = sizeof(std::int64_t);
  const std::int64_t count = tessera::detail::ceil_div(length, kWidth);
  // The tensor copies the bytes of `own`, even on a CPU, because `own` is destroyed when this
  // function returns.
  own.resize(static_cast<std::size_t>(count * kWidth));
  return at::from_blob(own.data(), {count}, at::kLong)
      .to(carrier(device), at::kLong, /*non_blocking=*/false, /*copy=*/true);
}

/// Returns the first `length` bytes of the tensor `numbers` as text. The other bytes are padding.
std::string to_text(const at::Tensor& numbers, std::int64_t length) {
  const at::Tensor host = numbers.cpu();
  return {static_cast<const char*>(host.const_data_ptr()), static_cast<std::size_t>(length)};
}

int reduce(Communicator& group, c10::Device device, int own, ReduceOp op) {
  // `own` is copied, even on a CPU, because all_reduce() writes to its tensor.
  const at::Tensor number =
      at::from_blob(&own, {1}, at::kInt)
          .to(carrier(device), at::kInt, /*non_blocking=*/false, /*copy=*/true);
  group.all_reduce(number, op)->wait();
  return number.cpu().const_data_ptr<int>()[0];
}

/// Runs `work` and returns the first line of its exception's message; "" without an exception.
std::string message_of(const std::function<void()>& work) {
  std::string message;
  try {
    work();
    return message;
    // A c10::Error is handled separately, because its what() would append a stack trace.
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  message.resize(std::min(message.find('\n'), message.size()));
  return message.empty() ? "an error without a message" : message;
}

}  // namespace

std::vector<std::vector<std::int64_t>> gather_values(Communicator& group, c10::Device device,
                                                     const std::vector<std::int64_t>& own) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor input = over(own.data(), own.size()).to(carrier(device));
  const at::Tensor output = at::empty({group.size() * input.numel()}, input.options());
  group.all_gather(output, input)->wait();
  const at::Tensor found = output.cpu();
  const auto* first = found.const_data_ptr<std::int64_t>();
  std::vector<std::vector<std::int64_t>> all;
  for (int rank = 0; rank < group.size(); ++rank, first += own.size()) {
    all.emplace_back(first, first + own.size());
  }
  return all;
}

// Gathers the lists `own` by one logical OR (any_rank()). Each rank has its own section of `flags`:
// one flag for its participation, and 64 flags for each element.
std::vector<std::vector<std::int64_t>> gather_on_hosts(Communicator& group,
                                                       const std::vector<std::int64_t>& own) {
  constexpr std::size_t kBits = 64;
  const std::size_t place = 1 + kBits * own.size();
  std::vector<std::uint8_t> flags(place * static_cast<std::size_t>(group.size()));
  std::uint8_t* mine = flags.data() + place * static_cast<std::size_t>(group.rank());
  *mine++ = 1;
  for (const std::int64_t value : own) {
    for (std::size_t bit = 0; bit < kBits; ++bit) {
      *mine++ = (static_cast<std::uint64_t>(value) >> bit) & 1U;
    }
  }
  group.any_rank(flags);
  std::vector<std::vector<std::int64_t>> all(static_cast<std::size_t>(group.size()), own);
  const std::uint8_t* theirs = flags.data();
  for (std::vector<std::int64_t>& values : all) {
    if (*theirs++ == 0) {
      theirs += place - 1;
      continue;
    }
    for (std::int64_t& value : values) {
      std::uint64_t bits = 0;
      for (std::size_t bit = 0; bit < kBits; ++bit) {
        bits |= static_cast<std::uint64_t>(*theirs++) << bit;
      }
      value = static_cast<std::int64_t>(bits);
    }
  }
  return all;
}

std::vector<std::string> gather_texts(Communicator& group, c10::Device device,
                                      const std::string& own) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto lengths = gather_values(group, device, {static_cast<std::int64_t>(own.size())});
  // All texts are padded to the length of the longest text, because an all-gather needs equal
  // sizes.
  const auto longest = std::ranges::max_element(lengths)->front();
  const at::Tensor input = to_numbers(own, longest, device);
  const at::Tensor output = at::empty({group.size(), input.numel()}, input.options());
  group.all_gather(output, input)->wait();
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    texts.push_back(to_text(output[rank], lengths[static_cast<std::size_t>(rank)].front()));
  }
  return texts;
}

std::vector<std::string> texts_that_differ(Communicator& group, const std::string& own) {
  const auto hash = static_cast<std::int64_t>(hash_of(own));
  const auto hashes = gather_on_hosts(group, {hash});
  if (std::ranges::all_of(hashes, [&](const auto& other) { return other == hashes.front(); })) {
    return {};
  }
  return gather_texts(group, c10::kCPU, own);
}

std::vector<int> ranks_that_differ(Communicator& group, c10::Device device, std::int64_t own) {
  const auto all = gather_values(group, device, {own});
  std::vector<int> others;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all.front()) {
      others.push_back(static_cast<int>(rank));
    }
  }
  return others;
}

/// The length is broadcast before the text, because the other ranks must allocate memory first.
std::string broadcast_text(Communicator& group, c10::Device device, int root,
                           const std::string& own) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto own_length = static_cast<std::int64_t>(own.size());
  const at::Tensor length =
      over(&own_length, 1).to(carrier(device), at::kLong, false, /*copy=*/true);
  group.broadcast(length, root)->wait();
  const std::int64_t count = length.cpu().const_data_ptr<std::int64_t>()[0];
  const at::Tensor numbers = to_numbers(own, count, device);
  group.broadcast(numbers, root)->wait();
  return to_text(numbers, count);
}

std::optional<Failure> first_failure(Communicator& group, c10::Device device,
                                     const std::function<void()>& work) {
  // `work` runs before autograd is disabled, so that `work` runs with the caller's autograd mode.
  const std::string own = message_of(work);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // A failed rank sends its own number; other ranks send the number of ranks. The minimum over all
  // ranks is therefore the first failed rank.
  const int first =
      reduce(group, device, own.empty() ? group.size() : group.rank(), ReduceOp::kMin);
  if (first == group.size()) {
    return std::nullopt;
  }
  return Failure{first, broadcast_text(group, device, first, own)};
}

void run_or_fail_together(Communicator& group, c10::Device device,
                          const std::function<void()>& work) {
  if (const auto failure = first_failure(group, device, work)) {
    fail(failure->message);
  }
}

}  // namespace tessera::comm
