// The models of the cases: written for one rank, in the ways that users write them.

#include "fuzz/model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>

#include "tessera/nn/checkpoint.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/initialization.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::fuzz {

Block::Block(const ModelSpec& spec) : spec_(spec.feed) {
  const auto add = [&](const char* name, Layer made) {
    if (made.module != nullptr) {
      register_module(name, made.module);
    }
    return made;
  };
  if (spec.attention) {
    norm1_ = add("norm1", norm_layer(spec.norm, spec.dim()));
    attention_ = register_module("attention", std::make_shared<Attention>(spec));
    dropout1_ = add("dropout1", dropout_layer(spec.dropout));
  }
  if (spec.mlp) {
    norm2_ = add("norm2", norm_layer(spec.norm, spec.dim()));
    mlp_ = register_module("mlp", std::make_shared<Mlp>(spec));
    dropout2_ = add("dropout2", dropout_layer(spec.dropout));
  }
  if (spec.residual_scale == ResidualScale::kVector) {
    scale_ = register_slot("scale", {spec.dim()});
  } else if (spec.residual_scale == ResidualScale::kScalar) {
    scale_ = register_slot("scale", {1});
  } else if (spec.residual_scale == ResidualScale::kStray) {
    stray_ = register_parameter("stray", at::ones({spec.dim()}, c10::kDouble));
  }
}

std::vector<nn::ModuleBase*> Block::halves() const {
  std::vector<nn::ModuleBase*> halves;
  if (attention_ != nullptr) {
    halves.push_back(attention_.get());
  }
  if (mlp_ != nullptr) {
    halves.push_back(mlp_.get());
  }
  return halves;
}

at::Tensor Block::scaled(const at::Tensor& x) const {
  if (stray_.defined()) {
    return x * stray_;
  }
  return scale_.defined() ? x * *scale_ : x;
}

std::vector<at::Tensor> Block::feed(const at::Tensor& x) {
  const auto call = [mlp = mlp_, directly = spec_.calls_forward](const at::Tensor& input) {
    return directly ? mlp->forward(input) : (*mlp)(input);
  };
  return spec_.checkpoint_call ? nn::checkpoint(call, x) : call(x);
}

std::vector<at::Tensor> Block::forward(const at::Tensor& x, const TokenSizes& sizes) {
  at::Tensor h = x;
  if (attention_ != nullptr) {
    h = h + scaled(dropout1_((*attention_)(norm1_(h), sizes)));
  }
  const bool skipped = spec_.skips_empty && sizes.batch == 0;
  if (mlp_ == nullptr || skipped) {
    return {h};
  }
  std::vector<at::Tensor> results = feed(norm2_(h));
  results[0] = h + scaled(dropout2_(results[0]));
  return results;
}

Net::Net(const ModelSpec& spec, Loss loss) : spec_(spec), loss_(loss) {
  const std::int64_t dim = spec.dim();
  const auto embed =
      register_module("embed", std::make_shared<nn::Embedding>(spec.vocabulary, dim));
  embed_ = layer(embed);
  const auto add = [&](const char* name, Layer made) {
    if (made.module != nullptr) {
      register_module(name, made.module);
    }
    return made;
  };
  if (spec.position) {
    position_ = add("position", position_layer(dim));
  }
  dropout_ = add("dropout", dropout_layer(spec.dropout));
  const auto list = register_module("blocks", std::make_shared<nn::ModuleList>());
  for (std::int64_t i = 0; i < spec.depth; ++i) {
    blocks_.push_back(list->push_back(std::make_shared<Block>(spec)));
  }
  norm_ = add("norm", norm_layer(spec.final_norm, dim));
  if (spec.part_scale != PartScale::kNone) {
    scale_ = add("scale", part_scale_layer(spec.part_scale, dim));
  }
  head_ = register_module(
      "head", std::make_shared<nn::Linear>(dim, spec.vocabulary, nn::LinearOptions{.bias = false}));
  if (spec.tied) {
    head_->tie_slot("weight", embed->weight.slot());
  }
}

at::Tensor Net::embedded(const at::Tensor& tokens) {
  const at::Tensor ids = spec_.folded ? tokens.flatten() : tokens;
  at::Tensor x = dropout_(position_(embed_(ids)));
  if (spec_.token_mix == TokenMix::kRunningMean) {
    const at::Tensor positions = at::arange(1, tokens.size(1) + 1, c10::kDouble);
    x = x + x.cumsum(1) / positions.unsqueeze(1);
  } else if (spec_.token_mix == TokenMix::kRoll) {
    x = x + x.roll(1, 1) * 0.5;
  }
  if (spec_.padding_mask) {
    x = at::where(ids.remainder(3).eq(0).unsqueeze(-1), x * 0.5, x);
  }
  return x;
}

std::vector<at::Tensor> Net::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  const TokenSizes sizes{tokens.size(0), tokens.size(1)};
  at::Tensor x = embedded(tokens), auxiliary;
  const auto run = [&](Block& block) {
    const std::vector<at::Tensor> results = block(x, sizes);
    x = results.front();
    if (results.size() > 1) {
      auxiliary = auxiliary.defined() ? auxiliary + results[1] : results[1];
    }
  };
  for (const auto& block : blocks_) {
    run(*block);
  }
  if (spec_.repeated) {
    run(*blocks_.front());
  }
  const at::Tensor logits = (*head_)(scale_(norm_(x)));
  if (targets.defined()) {
    return {sum_of_losses({logits, auxiliary}, targets, loss_)};
  }
  return {logits, auxiliary};
}

at::Tensor sum_of_losses(const std::vector<at::Tensor>& outputs, const at::Tensor& targets,
                         Loss loss) {
  const std::int64_t tokens = targets.numel();
  const at::Tensor logits = outputs[0].view({tokens, outputs[0].size(-1)});
  at::Tensor sum;
  if (loss == Loss::kSquares || tokens == 0) {
    sum = logits.square().sum();
  } else if (loss == Loss::kLossParallel) {
    sum = tensor_parallel::cross_entropy(logits, targets) * tokens;
  } else {
    sum = at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  }
  return outputs[1].defined() ? sum + outputs[1] * 0.1 : sum;
}

void Net::reset_parameters(const nn::InitContext& init) {
  for (const auto& [name, slot] : named_slots()) {
    // Vectors are scales for the most part: around one, so that what they scale does not vanish.
    const bool vector = slot->get().dim() == 1;
    init.fill(slot, vector ? nn::init::uniform(0.5, 1.5) : nn::init::uniform(-0.6, 0.6));
  }
}

}  // namespace tessera::fuzz
