#include "agreement.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "below_autograd.h"
#include "distributed_impl.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/in_order.h"
#include "tessera/dtensor/random.h"

namespace tessera {
namespace {

comm::Communicator& whole_group(const DeviceMesh& mesh) {
  std::vector<int> all(static_cast<std::size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), 0);
  return mesh.group(all);
}

std::string text_of(const DistributedTensor& tensor) {
  return detail::describe(*detail::as_distributed(tensor)->spec()) + " of " +
         c10::toString(tensor.tensor().scalar_type());
}

/// The world ranks of the mesh whose number is not that of its first one: "1, 3". Collective.
std::string ranks_that_differ(const DeviceMesh& mesh, std::uint64_t number) {
  auto& group = whole_group(mesh);
  const comm::CallerScope caller("check_agreement");
  const detail::BelowAutograd guard;
  const auto device = c10::Device(mesh.device_type());
  const auto own =
      at::full({1}, std::bit_cast<std::int64_t>(number), at::dtype(at::kLong).device(device));
  const auto found = own.expand({group.size()}).contiguous();
  in_order(group).all_gather(found, own)->wait();
  const auto hashes = found.cpu();
  std::vector<int> others;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (hashes.data_ptr<std::int64_t>()[rank] != hashes.data_ptr<std::int64_t>()[0]) {
      others.push_back(mesh.ranks()[static_cast<std::size_t>(rank)]);
    }
  }
  return fmt::format("{}", fmt::join(others, ", "));
}

/// Throws unless every rank of the mesh says the same of a tensor. Collective.
void compare(const DeviceMesh& mesh, const std::string& text) {
  const auto others = ranks_that_differ(mesh, stream_of(text.c_str()));
  TESSERA_CHECK(others.empty(), "the ranks of ", to_string(mesh), " disagree on a tensor: on rank ",
                mesh.world()->rank(), " it is ", text, "; different from rank ", mesh.ranks()[0],
                " are ranks ", others, ": give the same sizes, type and placements everywhere");
}

/// Of what a plain tensor holds.
std::uint64_t hash_of(const at::Tensor& tensor) {
  const auto host = tensor.resolve_conj().resolve_neg().cpu().contiguous();
  const std::string_view bytes(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
  return std::hash<std::string_view>{}(bytes);
}

/// As TESSERA_DEBUG says, if it does.
std::optional<bool> debugging() {
  const char* value = std::getenv("TESSERA_DEBUG");
  if (value == nullptr || std::string_view(value).empty()) return std::nullopt;
  return std::string_view(value) != "0";
}

/// The text of rank `root` of the group, cut to a line of fixed length. Collective.
std::string text_from(comm::Communicator& group, int root, const std::string& own,
                      c10::Device device) {
  constexpr std::size_t kLength = 256;
  const auto bytes = at::zeros({static_cast<std::int64_t>(kLength)}, at::kByte);
  auto* text = reinterpret_cast<char*>(bytes.mutable_data_ptr<std::uint8_t>());
  std::copy_n(own.begin(), std::min(own.find('\n'), std::min(own.size(), kLength)), text);
  const auto sent = bytes.to(device);
  in_order(group).broadcast(sent, root)->wait();
  const auto found = sent.cpu();
  const auto* first = reinterpret_cast<const char*>(found.const_data_ptr<std::uint8_t>());
  return {first, strnlen(first, kLength)};
}

/// What `work` throws, in one line; empty if nothing.
std::string failure_of(const std::function<void()>& work) {
  std::string text;
  try {
    work();
    return text;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.empty() ? "an error without a message" : text;
}

}  // namespace

bool detail::checks_agreement() {
#ifdef NDEBUG
  constexpr bool kDefault = false;
#else
  constexpr bool kDefault = true;
#endif
  return debugging().value_or(kDefault);
}

bool detail::checks_calls() {
  thread_local const bool asked = debugging().value_or(false);
  return asked;
}

bool detail::any_rank(const DeviceMesh& mesh, bool own) {
  const BelowAutograd guard;
  const auto flag =
      at::full({1}, own ? 1 : 0, at::dtype(at::kInt).device(c10::Device(mesh.device_type())));
  in_order(whole_group(mesh)).all_reduce(flag, ReduceOp::kMax)->wait();
  return flag.item<int>() != 0;
}

void detail::run_or_fail_together(const DeviceMesh& mesh, std::string_view what,
                                  const std::function<void()>& work) {
  const std::string own = failure_of(work);
  const BelowAutograd guard;
  auto& group = whole_group(mesh);
  const auto device = c10::Device(mesh.device_type());
  const auto first =
      at::full({1}, own.empty() ? group.size() : group.rank(), at::dtype(at::kInt).device(device));
  in_order(group).all_reduce(first, ReduceOp::kMin)->wait();
  const int failed = first.item<int>();
  if (failed == group.size()) return;
  const std::string theirs = text_from(group, failed, own, device);
  fail(what, " failed on rank ", mesh.ranks()[static_cast<std::size_t>(failed)],
       ", for the values of its part: ", theirs, "; mend those (an index out of range?)");
}

void detail::check_replicated(const DeviceMesh& mesh, std::string_view what,
                              const std::vector<at::Tensor>& tensors) {
  const BelowAutograd guard;
  std::uint64_t number = 0;
  for (const at::Tensor& tensor : tensors) number = number * 31 + hash_of(tensor);
  const auto others = ranks_that_differ(mesh, number);
  TESSERA_CHECK(others.empty(), what, " takes plain tensors that a ReplicationScope vouches for, ",
                "but their values differ from those on rank ", mesh.ranks()[0], " on ranks ",
                others, ": make them equal on all ranks, or distribute them");
}

DistributedTensor detail::make_agreed(const DeviceMesh& mesh,
                                      const std::function<DistributedTensor()>& make) {
  if (!checks_agreement()) return make();
  DistributedTensor made;
  std::exception_ptr error;
  try {
    made = make();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    compare(mesh, error ? "nothing: it failed" : text_of(made));
  } catch (...) {
    if (!error) throw;
  }
  if (error) std::rethrow_exception(error);
  return made;
}

void check_agreement(const DistributedTensor& tensor) {
  compare(tensor.mesh(), text_of(tensor));
}

}  // namespace tessera
