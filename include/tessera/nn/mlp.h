#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/export.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// What an MLP calls its Linears; by default as Hugging Face's Llama does.
struct MlpNames {
  std::string gate = "gate_proj";  ///< in a SwiGlu only
  std::string up = "up_proj", down = "down_proj";
};

/// Options of a SwiGlu and a GeluMlp.
struct MlpOptions {
  std::int64_t hidden = 0;  ///< features of the input and of the result
  std::int64_t inner = 0;   ///< between the Linears
  bool bias = false;
  /// Weights are initially normal(0, init_std), those of `down` normal(0, output_init_std), or the
  /// same where that is 0; biases zero.
  double init_std = 0.02, output_init_std = 0;
  MlpNames names{};
};

/// down(silu(gate(x)) * up(x)) (Shazeer 2020): (..., hidden) -> (..., hidden). The styles of its
/// modules for tensor parallelism are tensor_parallel::swi_glu_plan(); forward itself communicates
/// nothing.
class SwiGlu : public Module<SwiGlu> {
 public:
  explicit SwiGlu(const MlpOptions& options);
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

 private:
  MlpOptions options_;
  std::shared_ptr<Linear> gate_, up_, down_;
};

/// down(gelu(up(x))) (Hendrycks & Gimpel 2016): (..., hidden) -> (..., hidden). The styles of its
/// modules for tensor parallelism are tensor_parallel::gelu_mlp_plan(); forward itself communicates
/// nothing.
class GeluMlp : public Module<GeluMlp> {
 public:
  /// `tanh`: by GPT-2's approximation with tanh instead of the error function.
  explicit GeluMlp(const MlpOptions& options, bool tanh = true);
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

 private:
  MlpOptions options_;
  bool tanh_;
  std::shared_ptr<Linear> up_, down_;
};

}  // namespace tessera::nn
TESSERA_API_END
