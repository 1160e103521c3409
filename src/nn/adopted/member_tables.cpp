// The classes of libtorch that register parameters or buffers themselves: which members hold them.
// A new one is a line here, and one in initial_values.cpp.

#include "adopted/member_tables.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <vector>

#include "tessera/nn/hooked.h"

namespace tessera::nn {
namespace {

using detail::ModuleMembers;

template <class M>
void add(M& module, ModuleMembers& found, std::initializer_list<SlotMember<M>> members) {
  for (const SlotMember<M>& each : members) {
    found.emplace_back(each.name,
                       [&module, member = each.member]() -> at::Tensor& { return module.*member; });
  }
}

template <class... Classes>
void add_weight_and_bias(torch::nn::Module& module, ModuleMembers& found) {
  (detail::find_members<Classes>(module, found), ...);
}

template <class... Classes>
void add_running_stats(torch::nn::Module& module, ModuleMembers& found) {
  const auto add_those_of = [&found]<class M>(M* norm) {
    if (norm != nullptr) {
      add<M>(*norm, found,
             {{"running_mean", &M::running_mean},
              {"running_var", &M::running_var},
              {"num_batches_tracked", &M::num_batches_tracked}});
    }
  };
  (add_those_of(dynamic_cast<Classes*>(&module)), ...);
}

void add_attention(torch::nn::Module& module, ModuleMembers& found) {
  using M = torch::nn::MultiheadAttentionImpl;
  if (auto* attention = dynamic_cast<M*>(&module)) {
    add<M>(*attention, found,
           {{"in_proj_weight", &M::in_proj_weight},
            {"in_proj_bias", &M::in_proj_bias},
            {"bias_k", &M::bias_k},
            {"bias_v", &M::bias_v},
            {"q_proj_weight", &M::q_proj_weight},
            {"k_proj_weight", &M::k_proj_weight},
            {"v_proj_weight", &M::v_proj_weight}});
  }
}

template <class... Cells>
void add_cells(torch::nn::Module& module, ModuleMembers& found) {
  const auto add_those_of = [&found]<class M>(M* cell) {
    if (cell != nullptr) {
      add<M>(*cell, found,
             {{"weight_ih", &M::weight_ih},
              {"weight_hh", &M::weight_hh},
              {"bias_ih", &M::bias_ih},
              {"bias_hh", &M::bias_hh}});
    }
  };
  (add_those_of(dynamic_cast<Cells*>(&module)), ...);
}

/// The weights of all layers are one list, which forward reads.
template <class M>
struct FlatWeights : torch::nn::detail::RNNImplBase<M> {
  static void add(torch::nn::Module& module, ModuleMembers& found) {
    if (auto* rnn = dynamic_cast<M*>(&module)) {
      const std::vector<std::string>& names = rnn->*(&FlatWeights::flat_weights_names_);
      for (std::size_t i = 0; i < names.size(); ++i) {
        found.emplace_back(names[i], [rnn, i]() -> at::Tensor& {
          return (rnn->*(&FlatWeights::flat_weights_))[i];
        });
      }
    }
  }
};

/// They read their parameters where libtorch has registered them.
void add_registered(torch::nn::Module& module, ModuleMembers& found) {
  if (dynamic_cast<torch::nn::ParameterListImpl*>(&module) == nullptr &&
      dynamic_cast<torch::nn::ParameterDictImpl*>(&module) == nullptr) {
    return;
  }
  for (const std::string& name : parameter_table(module).keys()) {
    found.emplace_back(name,
                       [&module, name]() -> at::Tensor& { return parameter_table(module)[name]; });
  }
}

}  // namespace

void find_in_libtorch(torch::nn::Module& module, ModuleMembers& found) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace): a list of its classes
  add_weight_and_bias<LinearImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl,
                      ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl, LayerNormImpl,
                      GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                      InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl, EmbeddingImpl,
                      EmbeddingBagImpl, PReLUImpl>(module, found);
  add_running_stats<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
                    InstanceNorm2dImpl, InstanceNorm3dImpl>(module, found);
  add_attention(module, found);
  add_cells<RNNCellImpl, LSTMCellImpl, GRUCellImpl>(module, found);
  FlatWeights<RNNImpl>::add(module, found);
  FlatWeights<LSTMImpl>::add(module, found);
  FlatWeights<GRUImpl>::add(module, found);
  add_registered(module, found);
}

}  // namespace tessera::nn
