#include "verify/same_start.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_map>

#include "compare/difference.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/detail/calls.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::observe {
namespace {

constexpr auto kMakeAnother =
    "; pass a second instance of the same class and options, to which nothing was applied";

void check_slot(const std::string& fqn, const nn::ParameterSlot& slot,
                const nn::ParameterSlot& copy) {
  TESSERA_CHECK(!tessera::is_distributed(copy.persistent()), "verify: '", fqn,
                "' of the reference is distributed", kMakeAnother);
  TESSERA_CHECK(slot.persistent().sizes() == copy.persistent().sizes(), "verify: '", fqn, "' is ",
                slot.persistent().sizes(), ", but ", copy.persistent().sizes(), " in the reference",
                kMakeAnother);
  TESSERA_CHECK(!slot.distinct_along(), "verify: '", fqn,
                "' is another parameter on each slice of a mesh (distinct_along), which no model "
                "of one rank has; verify a model without it");
}

void check_slots(const nn::NamedSlots& slots, const nn::NamedSlots& copies) {
  const auto name_of = [](const nn::NamedSlots& all, std::size_t i) {
    return i < all.size() ? "'" + all[i].first + "'" : std::string("nothing");
  };
  for (std::size_t i = 0; i < std::max(slots.size(), copies.size()); ++i) {
    TESSERA_CHECK(name_of(slots, i) == name_of(copies, i), "verify: the reference has ",
                  name_of(copies, i), " where the module has ", name_of(slots, i), kMakeAnother);
    check_slot(slots[i].first, *slots[i].second, *copies[i].second);
  }
}

void copy_values(const nn::NamedSlots& slots, const nn::NamedSlots& copies) {
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor from = slots[i].second->persistent().detach();
    const at::Tensor& to = copies[i].second->get();
    to.detach().copy_(tessera::is_distributed(from) ? DistributedTensor(from).full_tensor() : from);
    copies[i].second->set_initialized(true);
    if (to.is_leaf() && (to.is_floating_point() || to.is_complex())) {
      to.requires_grad_(slots[i].second->persistent().requires_grad());
    }
  }
}

bool has_no_memory(const nn::NamedSlots& slots) {
  return std::ranges::any_of(slots, [](const auto& item) { return item.second->get().is_meta(); });
}

void copy_modes(nn::ModuleBase& module, nn::ModuleBase& reference) {
  std::unordered_map<std::string, torch::nn::Module*> copies;
  nn::visit_modules(reference, [&](const std::string& fqn, torch::nn::Module& copy) {
    copies.emplace(fqn, &copy);
  });
  // Parents first: train() is for all below as well.
  nn::visit_modules(module, [&](const std::string& fqn, torch::nn::Module& each) {
    const auto found = copies.find(fqn);
    if (found == copies.end()) {
      return;
    }
    found->second->train(each.is_training());
    auto* to = dynamic_cast<nn::Dropout*>(found->second);
    const auto* dropout = dynamic_cast<nn::Dropout*>(&each);
    // Without a key both will take that of their name.
    if (to != nullptr && dropout != nullptr && dropout->key()) {
      to->set_key(*dropout->key());
    }
  });
}

}  // namespace

void check_reference(const nn::ModuleBase& module, const nn::ModuleBase& reference) {
  TESSERA_CHECK(&module != &reference, "verify: the module itself is passed as the reference",
                kMakeAnother);
  check_slots(module.named_slots(), reference.named_slots());
  check_slots(module.named_buffer_slots(), reference.named_buffer_slots());
}

void copy_to_reference(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh) {
  if (has_no_memory(reference.named_slots()) || has_no_memory(reference.named_buffer_slots())) {
    nn::to_empty(reference, mesh.device());
  }
  copy_values(module.named_slots(), reference.named_slots());
  copy_values(module.named_buffer_slots(), reference.named_buffer_slots());
  copy_modes(module, reference);
}

void change_last_places(nn::ModuleBase& reference, std::uint64_t draw) {
  const c10::NoGradGuard no_grad;
  for (const auto& [fqn, slot] : reference.named_slots()) {
    const at::Tensor weight = slot->get().detach();
    if (!weight.is_floating_point()) {
      continue;
    }
    const at::Tensor up = at::empty_like(weight);
    bernoulli_(up, 0.5, {.seed = draw, .stream = stream_of(fqn.c_str())});
    weight.mul_(up.mul(2).sub(1).mul(epsilon_of(weight.scalar_type())).add(1));
  }
}

DrawCounts draw_counts(const nn::ModuleBase& module) {
  DrawCounts counts{random_state(), {}};
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& each) {
    if (const auto* dropout = dynamic_cast<const nn::Dropout*>(&each)) {
      counts.dropouts.emplace_back(fqn, dropout->calls());
    }
  });
  return counts;
}

void set_draw_counts(nn::ModuleBase& module, const DrawCounts& counts, std::uint64_t ahead) {
  set_random_state({counts.state.seed, counts.state.calls + ahead});
  std::unordered_map<std::string, std::uint64_t> calls(counts.dropouts.begin(),
                                                       counts.dropouts.end());
  nn::visit_modules(module, [&](const std::string& fqn, nn::ModuleBase& each) {
    if (auto* dropout = dynamic_cast<nn::Dropout*>(&each)) {
      dropout->set_calls(calls[fqn] + ahead);
    }
  });
}

bool have_drawn(const DrawCounts& counts, const DrawCounts& set, std::uint64_t ahead) {
  return counts.state.calls != set.state.calls + ahead ||
         !std::ranges::equal(counts.dropouts, set.dropouts, [&](const auto& now, const auto& then) {
           return now.second == then.second + ahead;
         });
}

StateAside::StateAside(nn::ModuleBase& module)
    : module_(module), counts_(draw_counts(module)), batch_ranks_(nn::batch_ranks()) {
  const c10::NoGradGuard no_grad;
  for (const auto& [fqn, slot] : module.named_slots()) {
    gradients_.emplace_back(slot, slot->persistent().grad());
    nn::drop_gradient(*slot);
  }
  for (const auto& [fqn, slot] : module.named_buffer_slots()) {
    buffers_.emplace_back(slot, slot->get().detach().clone());
  }
}

StateAside::~StateAside() {
  const c10::NoGradGuard no_grad;
  for (const auto& [slot, gradient] : gradients_) {
    nn::drop_gradient(*slot);
    slot->persistent().mutable_grad() = gradient;
  }
  for (const auto& [slot, values] : buffers_) {
    slot->get().detach().copy_(values);
  }
  set_draw_counts(module_, counts_);
  nn::set_batch_ranks(batch_ranks_);
}

}  // namespace tessera::observe
