#include "texts_on_first.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <numeric>

#include "tessera/comm/agreement.h"

namespace tessera::observe {

std::vector<std::string> texts_on_first(comm::Communicator& hosts, const std::string& own) {
  const auto ranks = static_cast<std::size_t>(hosts.size());
  const auto length = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> sent(ranks), received(ranks);
  sent.front() = length;
  const auto lengths = comm::gather_values(hosts, c10::kCPU, {length});
  for (std::size_t rank = 0; rank < ranks && hosts.rank() == 0; ++rank) {
    received[rank] = lengths[rank].front();
  }
  const at::Tensor input =
      at::from_blob(const_cast<char*>(own.data()), {length}, at::dtype(at::kByte)).clone();
  const at::Tensor output = at::empty(
      {std::accumulate(received.begin(), received.end(), std::int64_t{0})}, at::dtype(at::kByte));
  hosts.all_to_all(output, input, received, sent)->wait();
  std::vector<std::string> texts;
  const auto* next = reinterpret_cast<const char*>(output.const_data_ptr());
  for (std::size_t rank = 0; rank < ranks && hosts.rank() == 0; ++rank) {
    texts.emplace_back(next, static_cast<std::size_t>(received[rank]));
    next += received[rank];
  }
  return texts;
}

}  // namespace tessera::observe
