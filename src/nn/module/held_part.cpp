// Parameters of libtorch's modules are members of their classes, and a swap has to reach them: a
// table of the classes finds them.

#include "tessera/nn/detail/held_part.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/internals/detail/tensor_identity.h"
#include "tessera/nn/hooked.h"

namespace tessera::nn {
namespace {

using Members = std::vector<std::pair<std::string, at::Tensor*>>;

template <class M>
void add_if(torch::nn::Module& module, Members& members) {
  if (auto* found = dynamic_cast<M*>(&module)) {
    for (const SlotMember<M>& slot : kSlotMembers<M>) {
      members.emplace_back(slot.name, &(found->*slot.member));
    }
  }
}

template <class... Classes>
void add_weight_and_bias(torch::nn::Module& module, Members& members) {
  (add_if<Classes>(module, members), ...);
}

void add_attention(torch::nn::Module& module, Members& members) {
  auto* found = dynamic_cast<torch::nn::MultiheadAttentionImpl*>(&module);
  if (found == nullptr) {
    return;
  }
  for (const auto& [name, member] :
       {std::pair("in_proj_weight", &found->in_proj_weight),
        std::pair("in_proj_bias", &found->in_proj_bias), std::pair("bias_k", &found->bias_k),
        std::pair("bias_v", &found->bias_v), std::pair("q_proj_weight", &found->q_proj_weight),
        std::pair("k_proj_weight", &found->k_proj_weight),
        std::pair("v_proj_weight", &found->v_proj_weight)}) {
    members.emplace_back(name, member);
  }
}

template <class Cell>
void add_cell(torch::nn::Module& module, Members& members) {
  if (auto* found = dynamic_cast<Cell*>(&module)) {
    for (const auto& [name, member] :
         {std::pair("weight_ih", &found->weight_ih), std::pair("weight_hh", &found->weight_hh),
          std::pair("bias_ih", &found->bias_ih), std::pair("bias_hh", &found->bias_hh)}) {
      members.emplace_back(name, member);
    }
  }
}

/// libtorch's classes with parameters, from which its modules are built. A class is in the table
/// once, and none derives from another in it.
Members members_of(torch::nn::Module& module) {
  using namespace torch::nn;
  Members members;
  add_weight_and_bias<LinearImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl,
                      ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl, LayerNormImpl,
                      GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                      InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl, EmbeddingImpl,
                      EmbeddingBagImpl, PReLUImpl>(module, members);
  add_attention(module, members);
  add_cell<RNNCellImpl>(module, members);
  add_cell<LSTMCellImpl>(module, members);
  add_cell<GRUCellImpl>(module, members);
  return members;
}

}  // namespace

HeldPart::HeldPart(std::shared_ptr<torch::nn::Module> module, Maker& maker)
    : ModuleBase(module->name()), module_(std::move(module)) {
  maker.fill(*this, *module_);
}

void HeldPart::Maker::fill(ModuleBase& holder, torch::nn::Module& module) {
  for (const auto& [name, member] : members_of(module)) {
    // The module of an nn::Hooked has had those of its kSlotMembers.
    if (!member->defined() || holder.named_parameters(/*recurse=*/false).contains(name)) {
      continue;
    }
    const auto [tied, is_new] = slots_.try_emplace(tessera::detail::identity_of(*member));
    holder.bind_slot(name, *member);
    if (is_new) {
      tied->second = holder.slot(name);
    } else {
      holder.tie_slot(name, tied->second);
    }
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->parameters().empty()) {
      holder.register_module(child.key(), part_of(child.value()));
    }
  }
}

std::shared_ptr<ModuleBase> HeldPart::Maker::part_of(
    const std::shared_ptr<torch::nn::Module>& module) {
  if (auto ours = std::dynamic_pointer_cast<ModuleBase>(module)) {
    return ours;  // has slots and hooks
  }
  if (const auto found = parts_.find(module.get()); found != parts_.end()) {
    return found->second;
  }
  auto part = std::make_shared<HeldPart>(module, *this);
  parts_.emplace(module.get(), part);
  return part;
}

}  // namespace tessera::nn
