// What the parameters of libtorch's classes begin with: the distributions of their
// reset_parameters, with random numbers by global element.

#include <ATen/ops/zeros.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
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
#include <optional>

#include "adopted/member_tables.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {
namespace {

template <class... Classes>
bool is_any(const torch::nn::Module& module) {
  return ((dynamic_cast<const Classes*>(&module) != nullptr) || ...);
}

/// The slots of a module, by name; one that it lacks is not filled.
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
  /// Those that a load has filled stay.
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

/// 1 / sqrt(n): what libtorch's kaiming_uniform_ with a = sqrt(5) comes to for n inputs.
Initializer by_inputs(std::int64_t inputs) {
  return symmetric(inputs > 0 ? 1.0 / std::sqrt(static_cast<double>(inputs)) : 0.0);
}

/// The standard deviation of Glorot and Bengio 2010.
double xavier_deviation(at::IntArrayRef sizes) {
  const std::int64_t field = c10::multiply_integers(sizes.slice(2));
  return std::sqrt(2.0 / static_cast<double>((sizes[0] + sizes[1]) * field));
}

Initializer xavier_uniform(at::IntArrayRef sizes) {
  return symmetric(std::sqrt(3.0) * xavier_deviation(sizes));
}

/// Without communication: the rank that has the row writes it.
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

/// With the bias of its output projection, a Linear below it.
void fill_attention(const Slots& slots, const ModuleBase& holder, const InitContext& init) {
  for (const auto& [name, slot] : holder.slots()) {
    const at::IntArrayRef sizes = slot->get().sizes();
    if (name == "in_proj_bias") {
      slots.fill("in_proj_bias", init::zeros());
      const auto output = holder.named_children()["out_proj"];
      init.fill(dynamic_cast<const ModuleBase&>(*output).slot("bias"), init::zeros());
    } else if (sizes.size() == 2) {
      init.fill(slot, xavier_uniform(sizes));
    } else {  // bias_k, bias_v
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

/// If the module is one of these, its weights are uniform by the size of its state.
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
