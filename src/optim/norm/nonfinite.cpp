// Shares the ranks' knowledge of gradients that are not finite: a reduction spreads the NaN of one
// rank over all, and only the sample that FSDP kept before the reduction tells its origin.
#include "norm/nonfinite.h"

#include <ATen/ops/isfinite.h>

#include <map>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/slot_keeper.h"

namespace tessera::optim {
namespace {

/// Names of parameters; the first three are shown.
class Names {
 public:
  void add(const nn::ParameterSlot& slot) {
    if (++count_ <= 3) {
      text_ += (count_ == 1 ? "" : ", ") + nn::describe(slot);
    }
  }
  std::string text() const {
    return count_ > 3 ? tessera::detail::concat(text_, " and ", count_ - 3, " more") : text_;
  }

 private:
  std::string text_;
  int count_ = 0;
};

bool is_nonfinite(const at::Tensor& gradient) {
  return gradient.defined() && !local_tensor(gradient).isfinite().all().item<bool>();
}

/// `own` of each rank, and which ranks these are.
std::map<std::string, std::vector<int>> of_all_ranks(const DeviceMesh& joint,
                                                     const std::string& own) {
  if (!joint || joint.size() == 1) {
    return {{own, {joint ? joint.world()->rank() : 0}}};
  }
  std::map<std::string, std::vector<int>> ranks;
  const auto texts = comm::gather_texts(joint.group_of_all_ranks(), joint.device(), own);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    ranks[texts[i]].push_back(joint.ranks()[i]);
  }
  return ranks;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

/// "" if no rank has names.
std::string listed(const DeviceMesh& joint, const Names& own, const char* before,
                   const char* between) {
  std::string list;
  for (const auto& [names, ranks] : of_all_ranks(joint, own.text())) {
    if (!names.empty()) {
      list += (list.empty() ? "" : "; ") + (before + ranks_text(ranks)) + between + names;
    }
  }
  return list;
}

}  // namespace

std::string nonfinite_text(const DeviceMesh& joint, const std::vector<nn::SlotPtr>& parameters) {
  Names before;
  Names now;
  for (const nn::SlotPtr& slot : parameters) {
    if (nn::brought_nonfinite(*slot)) {
      before.add(*slot);
    }
    if (is_nonfinite(slot->persistent().grad())) {
      now.add(*slot);
    }
  }
  const std::string found =
      listed(joint, before, "", " brought what is not finite to the reduction of ");
  return !found.empty() ? found : listed(joint, now, "not finite on ", " is that of ");
}

}  // namespace tessera::optim
