#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/optim/slot_optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// The factor on the learning rate of a matrix with A rows and B columns.
enum class MuonRate : std::uint8_t {
  kOriginal,  ///< the factor sqrt(max(1, A / B)), by Keller Jordan
  /// The factor 0.2 sqrt(max(A, B)), by Moonshot AI. Use with a learning rate and a weight decay
  /// that were tuned for AdamW.
  kMatchRmsAdamW,
};

/// Options of Muon. The defaults are those of torch.optim.Muon.
struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};
  int ns_steps = 5;
  double eps = 1e-7;
  MuonRate rate = MuonRate::kOriginal;
  /// The dtype in which matrices are sent and orthogonalised (Newton-Schulz iteration).
  c10::ScalarType compute_dtype = c10::ScalarType::BFloat16;
};

/// Muon (Jordan et al. 2024): the update of a matrix is the orthogonal matrix nearest to its
/// momentum, by Newton-Schulz steps. Use Muon for the matrices of hidden layers, and AdamW for
/// other parameters (split_for_muon, OptimizerList). Like torch.optim.Muon, but for any sharding.
/// State: "momentum_buffer".
///
/// One rank orthogonalises each matrix. An all-to-all sends matrices in compute_dtype to these
/// ranks, and a second all-to-all returns the shards. step() is collective over the meshes of
/// distributed matrices that require a gradient. A matrix without a gradient on every rank is
/// skipped. Gradients that are missing only on some ranks count as zeros. Thread safety: one thread
/// at a time.
class Muon : public GroupedOptimizer<MuonOptions> {
 public:
  /// The constructor throws Error for invalid options and for parameters that are not 2-D.
  explicit Muon(std::vector<Group<MuonOptions>> groups);
  Muon(std::vector<nn::SlotPtr> parameters, MuonOptions options);
  ~Muon() override;

 private:
  class Exchange;
  void update_shards(const std::vector<ShardUpdate>& shards,
                     const GradientFactor& gradient_factor) override;
  bool updates_without_gradient(const at::Tensor& parameter) const override;
  at::Tensor direction(const ShardUpdate& shard, double factor);
  at::Tensor orthogonal(const at::Tensor& matrix, std::size_t group) const;
  void apply(const ShardUpdate& shard, const at::Tensor& orthogonal) const;

  Exchange& exchange_of(const DeviceMesh& mesh, c10::ScalarType dtype);

  std::vector<Exchange> exchanges_;
};

/// The parameters of a model that Muon updates (`matrices`), and all other parameters (`rest`).
struct MuonSplit {
  std::vector<nn::SlotPtr> matrices, rest;
};
/// Splits a model's parameters into 2-D `matrices` and `rest`. Weights of embeddings, parameters
/// tied to embeddings, and FQNs that match `rest`, such as {"lm_head.weight"}, go to
/// MuonSplit::rest, as do 3-D weights of experts. Throws Error for a pattern without a match.
MuonSplit split_for_muon(const nn::ModuleBase& module, const std::vector<std::string>& rest);

}  // namespace tessera::optim
TESSERA_API_END
