#include "agreement.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "below_autograd.h"
#include "distributed_impl.h"
#include "tessera/comm/communicator.h"
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

/// Throws unless every rank of the mesh says the same of a tensor. Collective.
void compare(const DeviceMesh& mesh, const std::string& text) {
  auto& group = whole_group(mesh);
  const detail::BelowAutograd guard;
  const auto device = c10::Device(mesh.device_type());
  const auto own = at::full({1}, std::bit_cast<std::int64_t>(stream_of(text.c_str())),
                            at::dtype(at::kLong).device(device));
  const auto found = own.expand({group.size()}).contiguous();
  in_order(group).all_gather(found, own)->wait();
  const auto hashes = found.cpu();
  std::vector<int> others;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (hashes.data_ptr<std::int64_t>()[rank] != hashes.data_ptr<std::int64_t>()[0]) {
      others.push_back(mesh.ranks()[static_cast<std::size_t>(rank)]);
    }
  }
  TESSERA_CHECK(others.empty(), "the ranks of ", to_string(mesh), " disagree on a tensor: on rank ",
                mesh.world()->rank(), " it is ", text, "; different from rank ", mesh.ranks()[0],
                fmt::format(" are ranks {}", fmt::join(others, ", ")),
                ": give the same sizes, type and placements everywhere");
}

}  // namespace

bool detail::checks_agreement() {
#ifdef NDEBUG
  constexpr bool kDefault = false;
#else
  constexpr bool kDefault = true;
#endif
  const char* value = std::getenv("TESSERA_DEBUG");
  if (value == nullptr || std::string_view(value).empty()) return kDefault;
  return std::string_view(value) != "0";
}

bool detail::any_rank(const DeviceMesh& mesh, bool own) {
  const BelowAutograd guard;
  const auto flag =
      at::full({1}, own ? 1 : 0, at::dtype(at::kInt).device(c10::Device(mesh.device_type())));
  in_order(whole_group(mesh)).all_reduce(flag, ReduceOp::kMax)->wait();
  return flag.item<int>() != 0;
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
