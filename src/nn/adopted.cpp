// Wraps libtorch modules so that their parameters are in slots (nn::ParameterSlot). A new tensor in
// a slot also replaces the module's references: the class member and the parameter table's entry.

#include "tessera/nn/detail/adopted_module.h"

#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
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
#include <torch/nn/modules/transformer.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

namespace {

/// Returns libtorch's parameter table of `module`. The table is a protected member, so a derived
/// class is needed to access the table.
torch::OrderedDict<std::string, at::Tensor>& parameter_table(torch::nn::Module& module) {
  struct Derived : torch::nn::Module {
    static auto table() { return &Derived::parameters_; }
  };
  return module.*Derived::table();
}

/// Initial value of a running statistic of a libtorch norm: 1 for "running_var", 0 for others.
double first_of_statistic(const std::string& name) {
  return name == "running_var" ? 1.0 : 0.0;
}

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

/// Finds the weights of RNN, LSTM and GRU. Their forward reads the weights of all layers from one
/// list.
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

bool has_tensors(const torch::nn::Module& module) {
  return !module.parameters().empty() || !module.buffers().empty();
}

auto find_member(const detail::ModuleMembers& members, const std::string& name,
                 const at::Tensor& tensor) {
  return std::ranges::find_if(members, [&](const auto& each) {
    return each.first == name && each.second().is_same(tensor);
  });
}

[[noreturn]] void fail_unknown_member(const detail::ModuleMembers& members, const std::string& name,
                                      const std::string& fqn, const torch::nn::Module& module) {
  const bool assigned =
      std::ranges::any_of(members, [&](const auto& each) { return each.first == name; });
  TESSERA_CHECK(!assigned, "member '", name, "' of a ", module.name(),
                " was assigned another tensor, so forward does not read parameter '", fqn,
                "'; to share a parameter, leave out the assignment and call tie_slot(\"", name,
                "\", other.slot(...)) on the result of nn::adopt");
  fail("parameter '", fqn, "' of a ", module.name(),
       " is read through a member that nn::adopt does not know and cannot replace with a shard; "
       "name the member in nn::kSlotMembers of the class and call nn::adopt<Class>(module), or "
       "derive the class from nn::Module");
}

struct Taken {
  std::mutex mutex;
  std::unordered_set<const torch::nn::Module*> modules;
};

/// The set of adopted modules. Never destroyed, because a module can outlive static objects.
Taken& taken() {
  static auto* const all = new Taken;
  return *all;
}

}  // namespace

std::shared_ptr<const void> detail::claim_module(const torch::nn::Module& module) {
  const std::lock_guard lock(taken().mutex);
  TESSERA_CHECK(taken().modules.insert(&module).second, "nn::adopt was given a ", module.name(),
                " that was adopted before; use the result of the first call");
  return {&module, [](const torch::nn::Module* own) {
            const std::lock_guard unlisting(taken().mutex);
            taken().modules.erase(own);
          }};
}

AdoptedModule::AdoptedModule(std::shared_ptr<torch::nn::Module> module, const std::string& fqn,
                             Maker& maker)
    : ModuleBase(module->name()), module_(std::move(module)) {
  maker.fill(*this, *module_, fqn);
}

void AdoptedModule::train(bool on) {
  ModuleBase::train(on);
  module_->train(on);
}

void AdoptedModule::Maker::fill(ModuleBase& holder, torch::nn::Module& module,
                                const std::string& fqn) {
  add_parameters(holder, module, fqn);
  add_buffers(holder, module, fqn);
  for (const auto& child : module.named_children()) {
    if (has_tensors(*child.value())) {
      holder.register_module(child.key(),
                             part_of(child.value(), detail::join_fqn(fqn, child.key())));
    }
  }
}

detail::ModuleMembers AdoptedModule::Maker::tensors_of(torch::nn::Module& module) const {
  detail::ModuleMembers found;
  find_in_libtorch(module, found);
  for (const detail::FindMembers find : classes_) {
    find(module, found);
  }
  return found;
}

/// A parameter slot gets the module's tensor itself, not a copy. An optimizer that was made before
/// adopt() therefore trains the parameter until the parameter is sharded.
void AdoptedModule::Maker::add_parameters(ModuleBase& holder, torch::nn::Module& module,
                                          const std::string& fqn) {
  const detail::ModuleMembers members = tensors_of(module);
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    const std::string& name = parameter.key();
    const at::Tensor& tensor = parameter.value();
    const auto found = find_member(members, name, tensor);
    if (found == members.end()) {
      fail_unknown_member(members, name, detail::join_fqn(fqn, name), module);
    }
    const auto [tied, is_new] = slots_.try_emplace(tessera::detail::identity_of(tensor));
    if (is_new) {
      tied->second = std::make_shared<ParameterSlot>(tensor, !tensor.is_meta());
    }
    holder.add_slot(name, tied->second,
                    [&module, name, member = found->second](const at::Tensor& swapped) {
                      parameter_table(module)[name] = swapped;
                      member() = swapped;
                    });
  }
}

/// A buffer slot gets the module's buffer tensor itself, because forward writes to the buffer in
/// place. Running statistics on the meta device are replaced by initialized tensors.
void AdoptedModule::Maker::add_buffers(ModuleBase& holder, torch::nn::Module& module,
                                       const std::string& fqn) {
  const detail::ModuleMembers members = tensors_of(module);
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    const std::string& name = buffer.key();
    at::Tensor tensor = buffer.value();
    if (tensor.is_meta()) {
      const auto found = find_member(members, name, tensor);
      TESSERA_CHECK(found != members.end(), "buffer '", detail::join_fqn(fqn, name), "' of a ",
                    module.name(),
                    " would be on the meta device, and nothing could fill the buffer later; "
                    "construct the module outside the MetaDevice scope");
      tensor = at::zeros(tensor.sizes(), at::dtype(tensor.scalar_type()).device(at::kCPU))
                   .fill_(first_of_statistic(name));
      found->second() = tensor;
    }
    holder.register_buffer(name, tensor);
  }
}

std::shared_ptr<ModuleBase> AdoptedModule::Maker::part_of(
    const std::shared_ptr<torch::nn::Module>& module, const std::string& fqn) {
  if (auto ours = std::dynamic_pointer_cast<ModuleBase>(module)) {
    return ours;  // a ModuleBase already has slots and hooks
  }
  if (const auto found = parts_.find(module.get()); found != parts_.end()) {
    return found->second;
  }
  auto part = std::make_shared<AdoptedModule>(module, fqn, *this);
  parts_.emplace(module.get(), part);
  return part;
}

// Initial values for the parameters of libtorch's module classes. Distributions are those of
// reset_parameters(); random numbers depend on the global element index.

namespace {

template <class... Classes>
bool is_any(const torch::nn::Module& module) {
  return ((dynamic_cast<const Classes*>(&module) != nullptr) || ...);
}

class Slots {
 public:
  Slots(const ModuleBase& holder, const InitContext& init) : holder_(holder), init_(init) {}

  void fill(const char* name, const Initializer& initializer) const {
    const auto found = std::ranges::find(holder_.slots(), name, &NamedSlots::value_type::first);
    if (found != holder_.slots().end()) {
      init_.fill(found->second, initializer);
    }
  }
  void fill_all(const Initializer& initializer) const {
    for (const auto& [name, slot] : holder_.slots()) {
      init_.fill(slot, initializer);
    }
  }
  /// Resets a norm's running statistics, except statistics that a checkpoint or weights file has
  /// filled.
  void reset_statistics() const {
    for (const auto& statistic : holder_.named_buffers(/*recurse=*/false)) {
      const at::Tensor& tensor = statistic.value();
      const Parameter loaded(std::make_shared<ParameterSlot>(tensor, /*initialized=*/true));
      const auto options = at::dtype(tensor.scalar_type()).device(at::kCPU);
      init_.set_buffer(
          loaded, at::zeros(tensor.sizes(), options).fill_(first_of_statistic(statistic.key())));
      tensor.copy_(*loaded);
    }
  }
  at::IntArrayRef sizes(const char* name) const { return holder_.slot(name)->get().sizes(); }

 private:
  const ModuleBase& holder_;
  const InitContext& init_;
};

Initializer symmetric(double bound) {
  return init::uniform(-bound, bound);
}

Initializer by_inputs(std::int64_t inputs) {
  return symmetric(inputs > 0 ? 1.0 / std::sqrt(static_cast<double>(inputs)) : 0.0);
}

/// Returns the standard deviation of Xavier initialisation (Glorot and Bengio 2010).
double xavier_deviation(at::IntArrayRef sizes) {
  const std::int64_t field = c10::multiply_integers(sizes.slice(2));
  return std::sqrt(2.0 / static_cast<double>((sizes[0] + sizes[1]) * field));
}

Initializer xavier_uniform(at::IntArrayRef sizes) {
  return symmetric(std::sqrt(3.0) * xavier_deviation(sizes));
}

/// Sets a row of `tensor` to zero without communication: only the ranks with elements of this row
/// write.
void zero_row(const at::Tensor& tensor, std::int64_t row) {
  const at::Tensor local = local_tensor(tensor).detach();
  if (!tessera::is_distributed(tensor)) {
    local.select(0, row).zero_();
    return;
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  const auto rows = global_indices(*spec.layout, 0, tensor.size(0), spec.mesh.coordinate());
  if (const auto found = std::ranges::find(rows, row); found != rows.end()) {
    local.select(0, found - rows.begin()).zero_();
  }
}

void fill_embedding(const Slots& slots, std::optional<std::int64_t> padding) {
  slots.fill("weight", [padding](const at::Tensor& tensor, RandomKey key) {
    normal_(tensor, 0.0, 1.0, key);
    if (padding) {
      zero_row(tensor, *padding);
    }
  });
}

void fill_norm(const Slots& slots) {
  slots.fill("weight", init::ones());
  slots.fill("bias", init::zeros());
  slots.reset_statistics();
}

void fill_linear(const Slots& slots, const torch::nn::Module& module) {
  const at::IntArrayRef sizes = slots.sizes("weight");
  std::int64_t inputs = sizes[1];
  if (!is_any<torch::nn::BilinearImpl>(module)) {
    inputs = c10::multiply_integers(sizes.slice(1));
  }
  slots.fill("weight", by_inputs(inputs));
  slots.fill("bias", by_inputs(inputs));
}

void fill_attention(const Slots& slots, const ModuleBase& holder, const InitContext& init) {
  for (const auto& [name, slot] : holder.slots()) {
    const at::IntArrayRef sizes = slot->get().sizes();
    if (name == "in_proj_bias") {
      slots.fill("in_proj_bias", init::zeros());
      const auto output = holder.named_children()["out_proj"];
      init.fill(dynamic_cast<const ModuleBase&>(*output).slot("bias"), init::zeros());
    } else if (sizes.size() == 2) {
      init.fill(slot, xavier_uniform(sizes));
    } else {  // initialises bias_k and bias_v of attention
      init.fill(slot, init::normal(0.0, xavier_deviation(sizes)));
    }
  }
}

void fill_transformer(const ModuleBase& holder, const InitContext& init) {
  for (const auto& [name, slot] : holder.named_slots()) {
    if (slot->get().dim() > 1) {
      init.fill(slot, xavier_uniform(slot->get().sizes()));
    }
  }
}

template <class... Classes>
void fill_recurrent(const Slots& slots, const torch::nn::Module& module) {
  std::int64_t size = 0;
  const auto note = [&size](const auto* found) {
    if (found != nullptr) {
      size = found->options_base.hidden_size();
    }
  };
  (note(dynamic_cast<const Classes*>(&module)), ...);
  if (size > 0) {
    slots.fill_all(by_inputs(size));
  }
}

}  // namespace

void detail::reset_adopted(const torch::nn::Module& module, const ModuleBase& holder,
                           const InitContext& init) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace): a list of its classes
  const Slots slots(holder, init);
  if (is_any<LinearImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
             ConvTranspose2dImpl, ConvTranspose3dImpl>(module)) {
    fill_linear(slots, module);
  } else if (is_any<LayerNormImpl, GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                    InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl>(module)) {
    fill_norm(slots);
  } else if (const auto* embedding = dynamic_cast<const EmbeddingImpl*>(&module)) {
    fill_embedding(slots, embedding->options.padding_idx());
  } else if (const auto* bag = dynamic_cast<const EmbeddingBagImpl*>(&module)) {
    fill_embedding(slots, bag->options.padding_idx());
  } else if (const auto* prelu = dynamic_cast<const PReLUImpl*>(&module)) {
    slots.fill("weight", init::constant(prelu->options.init()));
  } else if (is_any<MultiheadAttentionImpl>(module)) {
    fill_attention(slots, holder, init);
  } else if (is_any<TransformerImpl>(module)) {
    fill_transformer(holder, init);
  } else {
    fill_recurrent<RNNCellImpl, LSTMCellImpl, GRUCellImpl, RNNImpl, LSTMImpl, GRUImpl>(slots,
                                                                                       module);
  }
}

}  // namespace tessera::nn
