#include "agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "below_autograd.h"
#include "distributed_impl.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"

namespace tessera {

bool detail::checks_agreement() {
  static const bool checks = [] {
    const char* value = std::getenv("TESSERA_DEBUG");
    return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
  }();
  return checks;
}

void check_agreement(const DistributedTensor& tensor) {
  const auto& mesh = tensor.mesh();
  const auto text = detail::describe(*detail::as_distributed(tensor)->spec()) + " of " +
                    c10::toString(tensor.tensor().scalar_type());
  std::vector<int> all(static_cast<std::size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), 0);
  auto& group = mesh.group(all);

  detail::BelowAutograd guard;
  const auto device = c10::Device(mesh.device_type());
  const auto own = at::full({1}, std::bit_cast<std::int64_t>(stream_of(text.c_str())),
                            at::dtype(at::kLong).device(device));
  const auto found = at::empty({group.size()}, own.options());
  group.all_gather(found, own)->wait();
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

}  // namespace tessera
