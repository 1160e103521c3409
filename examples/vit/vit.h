// A vision transformer (Dosovitskiy et al. 2021): a class token before the patches of an image,
// learned positions, normalized queries and keys (Dehghani et al. 2023), dropout. Parameter names
// and sizes are timm's. The model is written for one rank; tensor_parallel_plan() and make_model()
// define how it is split.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/nn/modules/conv.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"

namespace vit {

using namespace tessera;

/// The sizes of a model, with the names used in config.json.
struct Config {
  std::int64_t image_size = 32;  ///< height and width of an image, in pixels
  std::int64_t channels = 3;
  std::int64_t patch_size = 4;  ///< height and width of a patch; must divide image_size
  std::int64_t dim = 64;        ///< number of features of a token
  std::int64_t depth = 4;       ///< number of blocks
  std::int64_t heads = 4;       ///< attention heads; must divide dim
  std::int64_t mlp_dim = 256;
  std::int64_t classes = 10;
  double dropout = 0.1;  ///< dropout of the embeddings, and of the outputs of attention and MLP

  std::int64_t patches() const { return (image_size / patch_size) * (image_size / patch_size); }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Config, image_size, channels, patch_size, dim,
                                                depth, heads, mlp_dim, classes, dropout)

/// Reads a config.json; missing names keep their defaults. Throws Error, with the correct form, for
/// a file that is not a configuration, for unknown names, and for impossible sizes.
inline Config read_config(const std::string& path) {
  const std::string text = files::read_file(path, "a config.json", 1 << 20);
  const nlohmann::json known = Config{};
  try {
    check_strict_json(text);
  } catch (const Error& error) {
    fail(path, ": ", error.what(), "; write an object such as ", known.dump());
  }
  const nlohmann::json json = nlohmann::json::parse(text);
  for (const auto& [name, value] : json.items()) {
    TESSERA_CHECK(known.contains(name), path, ": \"", name,
                  "\" is none of the names; they are those of ", known.dump());
    const bool is_size = known[name].is_number_integer();
    TESSERA_CHECK(is_size ? value.is_number_integer() && value >= 1 && value <= 1 << 20
                          : value.is_number() && value >= 0 && value < 1,
                  path, ": \"", name, "\" is ", value.dump(), "; give ",
                  is_size ? "an integer from 1 to 1048576" : "a number of at least 0, below 1");
  }
  const Config c = json;
  TESSERA_CHECK(c.image_size % c.patch_size == 0 && c.dim % c.heads == 0, path,
                ": patch_size must divide image_size and heads dim, in ", nlohmann::json(c).dump());
  return c;
}

inline const nn::LayerNormOptions kNorm{.eps = 1e-6};

/// Embeds the patches of images: (batch, channels, height, width) -> (batch, patches, dim).
struct PatchEmbed : nn::Module<PatchEmbed> {
  explicit PatchEmbed(const Config& c)
      : proj(*this, "proj",
             torch::nn::Conv2dOptions(c.channels, c.dim, c.patch_size).stride(c.patch_size)) {}
  at::Tensor forward(const at::Tensor& images) { return proj(images).flatten(2).transpose(1, 2); }
  nn::Child<nn::Hooked<torch::nn::Conv2d>> proj;
};

/// Self-attention: (batch, tokens, dim) -> (batch, tokens, dim).
struct Attention : nn::Module<Attention> {
  explicit Attention(const Config& c)
      : heads(c.heads),
        qkv(*this, "qkv", c.dim, 3 * c.dim),
        q_norm(*this, "q_norm", c.dim / c.heads, kNorm),
        k_norm(*this, "k_norm", c.dim / c.heads, kNorm),
        proj(*this, "proj", c.dim, c.dim) {}
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> parts = qkv(x).chunk(3, -1);
    for (at::Tensor& part : parts) {  // to (batch, tokens, heads, dim / heads)
      part = part.unflatten(-1, {heads, part.size(-1) / heads});
    }
    const at::Tensor mixed =
        nn::attention(q_norm(parts[0]).transpose(1, 2), k_norm(parts[1]).transpose(1, 2),
                      parts[2].transpose(1, 2), /*causal=*/false);
    return proj(mixed.transpose(1, 2).flatten(2));
  }
  std::int64_t heads;
  nn::Child<nn::Linear> qkv;
  nn::Child<nn::LayerNorm> q_norm, k_norm;
  nn::Child<nn::Linear> proj;
};

inline nn::MlpOptions mlp_options(const Config& c) {
  return {.hidden = c.dim, .inner = c.mlp_dim, .bias = true, .names = {.up = "fc1", .down = "fc2"}};
}

struct Block : nn::Module<Block> {
  explicit Block(const Config& c)
      : norm1(*this, "norm1", c.dim, kNorm),
        attn(*this, "attn", c),
        norm2(*this, "norm2", c.dim, kNorm),
        mlp(*this, "mlp", mlp_options(c), /*tanh=*/false),
        drop1(*this, "drop1", c.dropout),
        drop2(*this, "drop2", c.dropout) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + drop1(attn(norm1(x)));
    return h + drop2(mlp(norm2(h)));
  }
  nn::Child<nn::LayerNorm> norm1;
  nn::Child<Attention> attn;
  nn::Child<nn::LayerNorm> norm2;
  nn::Child<nn::GeluMlp> mlp;
  nn::Child<nn::Dropout> drop1, drop2;
};

/// The model: maps images, (batch, channels, height, width), to logits, (batch, classes).
struct VisionTransformer : nn::Module<VisionTransformer>, tensor_parallel::DeclaresPlan {
  explicit VisionTransformer(const Config& c)
      : config(c),
        patch_embed(*this, "patch_embed", c),
        pos_drop(*this, "pos_drop", c.dropout),
        blocks(*this, "blocks"),
        norm(*this, "norm", c.dim, kNorm),
        head(*this, "head", c.dim, c.classes) {
    for (std::int64_t i = 0; i < c.depth; ++i) {
      blocks->push_back(std::make_shared<Block>(c));
    }
    cls_token = register_slot("cls_token", {1, 1, c.dim});
    pos_embed = register_slot("pos_embed", {1, 1 + c.patches(), c.dim});
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor patches = patch_embed(images);
    const at::Tensor token = cls_token->expand({patches.size(0), -1, -1});
    const at::Tensor x = blocks(pos_drop(at::cat({token, patches}, 1) + *pos_embed));
    return head(norm(x).select(1, 0));  // select() takes the class token
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(*this, {{"cls_token", nn::init::normal(0, 1e-6)},
                      {"pos_embed", nn::init::trunc_normal(0, 0.02)},
                      {"patch_embed.proj.weight", nn::init::trunc_normal(0, 0.02)},
                      {"**.qkv.weight", nn::init::trunc_normal(0, 0.02)},
                      {"**.attn.proj.weight", nn::init::trunc_normal(0, 0.02)},
                      {"head.weight", nn::init::trunc_normal(0, 0.02)},
                      {"**.bias", nn::init::zeros()}});
  }
  /// Splits heads and the MLP's features over the ranks; between blocks, tokens are split
  /// (Korthikanti et al. 2022).
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh&, const tensor_parallel::DeclaredPlanOptions& options) const override {
    using namespace tensor_parallel;
    const Placement tokens = options.sequence_parallel ? Placement(Shard{1}) : Replicate{};
    ParallelizePlan plan = joined(
        {{{"blocks.*.attn.qkv", fused_colwise_parallel({.parts = 3, .regather = options.regather})},
          {"blocks.*.attn.proj",
           rowwise_parallel({.output_layouts = tokens, .heads = config.heads})}},
         gelu_mlp_plan("blocks.*.mlp", mlp_options(config).names,
                       {.activations = tokens, .regather = options.regather}),
         {{"head", colwise_parallel()}}});
    if (options.sequence_parallel) {
      plan.emplace_back("pos_drop", sequence_parallel());
      plan.emplace_back("norm",
                        replicate_parallel());  // every rank gets all tokens, because forward
                                                // selects one of them
    }
    return plan;
  }

  Config config;
  nn::Parameter cls_token, pos_embed;
  nn::Child<PatchEmbed> patch_embed;
  nn::Child<nn::Dropout> pos_drop;
  nn::Child<nn::Sequential> blocks;
  nn::Child<nn::LayerNorm> norm;
  nn::Child<nn::Linear> head;
};

/// Creates and initializes the model on a mesh of "dp" and "tp". Each block is an FSDP unit, and a
/// rank allocates only its shards.
inline std::shared_ptr<VisionTransformer> make_model(const Config& config, const DeviceMesh& mesh,
                                                     std::uint64_t seed) {
  auto model = [&] {
    const nn::MetaDevice meta;
    return std::make_shared<VisionTransformer>(config);
  }();
  tensor_parallel::parallelize_module(*model, mesh["tp"]);
  fsdp::apply_plan(*model, mesh["dp"], fsdp::plan_units(*model, fsdp::wrap_class<Block>()));
  nn::to_empty(*model, mesh.device());
  nn::init_weights(*model, seed);
  return model;
}

}  // namespace vit
