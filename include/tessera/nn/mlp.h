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

/// Names of the Linears in an MLP. The default names are those of Hugging Face's Llama.
struct MlpNames {
  std::string gate = "gate_proj";  ///< name of the gate's Linear; used by SwiGlu only
  std::string up = "up_proj", down = "down_proj";
};

/// Options of a SwiGlu and a GeluMlp.
struct MlpOptions {
  std::int64_t hidden = 0;  ///< number of features of the input and of the result
  std::int64_t inner = 0;   ///< number of features between the Linears
  bool bias = false;
  /// Weights are initialised from normal(0, init_std), the weight of `down` from normal(0,
  /// output_init_std); if output_init_std is 0, init_std applies to `down` too. Biases start at
  /// zero.
  double init_std = 0.02, output_init_std = 0;
  MlpNames names{};
};

/// down(silu(gate(x)) * up(x)) (Shazeer 2020): (..., hidden) -> (..., hidden).
/// tensor_parallel::swi_glu_plan() has the parallel styles of its modules; forward itself does not
/// communicate.
class SwiGlu : public Module<SwiGlu> {
 public:
  explicit SwiGlu(const MlpOptions& options);
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

 private:
  MlpOptions options_;
  std::shared_ptr<Linear> gate_, up_, down_;
};

/// down(gelu(up(x))) (Hendrycks & Gimpel 2016): (..., hidden) -> (..., hidden).
/// tensor_parallel::gelu_mlp_plan() has the parallel styles of its modules; forward itself does not
/// communicate.
class GeluMlp : public Module<GeluMlp> {
 public:
  /// `tanh`: whether to use GPT-2's tanh approximation of GELU instead of the error function.
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
