// The optimizer Muon. The momentum remains sharded. Orthogonalisation needs the whole matrix, so
// each matrix is sent to one rank, in the dtype MuonOptions::compute_dtype.

#include "tessera/optim/muon.h"
#include "tessera/comm/detail/scopes.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>

#include "local_shards.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/layers.h"

namespace tessera::optim {

struct SpreadMatrix {
  LayoutPtr layout = nullptr;
  std::int64_t rows = 0, columns = 0;
  friend bool operator==(const SpreadMatrix&, const SpreadMatrix&) = default;
};

/// Sends the shards of each matrix to one rank of the mesh, the matrix's owner, and sends the
/// result back. Owners are chosen so that the work is balanced. All replicas of a matrix receive
/// the result.
class MatrixExchange {
 public:
  /// Chooses the owner of each matrix. Not collective: each rank computes the same owners.
  MatrixExchange(const DeviceMesh& mesh, std::vector<SpreadMatrix> matrices);

  const std::vector<SpreadMatrix>& matrices() const { return matrices_; }

  using Work = std::function<at::Tensor(std::size_t matrix, const at::Tensor& whole)>;
  /// `locals`: this rank's shard of each matrix, of one dtype. Calls `work` for each matrix that
  /// this rank owns; `work` returns a tensor of the same sizes and dtype. Returns this rank's shard
  /// of each result. Collective over the mesh: two all-to-alls.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& locals, const Work& work) const;

 private:
  struct RankShard {
    std::vector<std::int64_t> sizes;
    std::vector<Box> boxes;
    std::int64_t numel = 0;
    bool sent = false;  ///< whether the rank sends this shard to the matrix's owner
  };
  bool sends(std::size_t matrix, std::int64_t rank) const;
  RankShard part(std::size_t matrix, std::int64_t rank) const;
  std::vector<at::Tensor> gather(const std::vector<at::Tensor>& locals) const;
  std::vector<at::Tensor> scatter(const std::vector<at::Tensor>& wholes,
                                  const std::vector<at::Tensor>& locals) const;
  at::Tensor exchange(const std::vector<std::vector<at::Tensor>>& to_ranks,
                      const std::vector<std::int64_t>& from_ranks, const at::Tensor& like) const;

  DeviceMesh mesh_;
  std::vector<SpreadMatrix> matrices_;
  std::vector<std::int64_t> owners_;  ///< for each matrix: index of its owner in mesh_
  std::int64_t self_;
  std::vector<bool> sends_;
  std::vector<std::size_t> owned_;
  /// For each matrix in owned_: the shard of each rank.
  std::vector<std::vector<RankShard>> parts_;
};

namespace {

double work_of(const SpreadMatrix& matrix) {
  const auto rows = static_cast<double>(matrix.rows);
  const auto columns = static_cast<double>(matrix.columns);
  return rows * columns * std::min(rows, columns);
}

/// Chooses owners greedily: matrices in order of decreasing work, each for the rank with the least
/// work so far. The sort is stable, so that every rank computes the same owners.
std::vector<std::int64_t> deal(const std::vector<SpreadMatrix>& matrices, std::int64_t ranks) {
  std::vector<std::size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
    return work_of(matrices[a]) > work_of(matrices[b]);
  });
  std::vector<double> loads(static_cast<std::size_t>(ranks), 0.0);
  std::vector<std::int64_t> owners(matrices.size());
  for (const std::size_t matrix : order) {
    const auto least = std::ranges::min_element(loads);
    *least += work_of(matrices[matrix]);
    owners[matrix] = least - loads.begin();
  }
  return owners;
}

at::Tensor block(const at::Tensor& tensor, const std::vector<std::int64_t>& offset,
                 const std::vector<std::int64_t>& sizes) {
  return tensor.narrow(0, offset[0], sizes[0]).narrow(1, offset[1], sizes[1]);
}

}  // namespace

MatrixExchange::MatrixExchange(const DeviceMesh& mesh, std::vector<SpreadMatrix> matrices)
    : mesh_(mesh),
      matrices_(std::move(matrices)),
      owners_(deal(matrices_, mesh.size())),
      self_(mesh.shape().index(mesh.coordinate())) {
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    sends_.push_back(sends(i, self_));
    // A rank needs the shards of other ranks only for the matrices that this rank owns.
    if (owners_[i] != self_) {
      continue;
    }
    owned_.push_back(i);
    std::vector<RankShard>& parts = parts_.emplace_back();
    for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
      parts.push_back(part(i, rank));
    }
  }
}

MatrixExchange::RankShard MatrixExchange::part(std::size_t matrix, std::int64_t rank) const {
  const SpreadMatrix& m = matrices_[matrix];
  const std::array<std::int64_t, 2> sizes{m.rows, m.columns};
  const std::vector<std::int64_t> at = mesh_.shape().coordinate(rank);
  return {local_sizes(*m.layout, sizes, at), owned_boxes(*m.layout, sizes, at),
          local_numel(*m.layout, sizes, at), sends(matrix, rank)};
}

/// Whether `rank` sends its shard of the matrix to the owner. If a mesh dimension replicates the
/// matrix, only the owner's own replica is sent.
bool MatrixExchange::sends(std::size_t matrix, std::int64_t rank) const {
  const std::vector<std::int64_t> from = mesh_.shape().coordinate(rank);
  const std::vector<std::int64_t> to = mesh_.shape().coordinate(owners_[matrix]);
  for (int d = 0; d < mesh_.ndim(); ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (matrices_[matrix].layout->sharded_dim(d) < 0 && from[i] != to[i]) {
      return false;
    }
  }
  return true;
}

/// Sends the tensors in to_ranks[r], flattened, to rank r. Returns the received elements in the
/// order of the ranks: from_ranks[r] elements from rank r.
at::Tensor MatrixExchange::exchange(const std::vector<std::vector<at::Tensor>>& to_ranks,
                                    const std::vector<std::int64_t>& from_ranks,
                                    const at::Tensor& like) const {
  // The list begins with an empty tensor, because cat() rejects an empty list and a rank can have
  // nothing to send.
  std::vector<at::Tensor> pieces{at::empty({0}, like.options())};
  std::vector<std::int64_t> counts;
  for (const std::vector<at::Tensor>& tensors : to_ranks) {
    counts.push_back(0);
    for (const at::Tensor& tensor : tensors) {
      counts.back() += tensor.numel();
      pieces.push_back(tensor.reshape({-1}));
    }
  }
  const at::Tensor input = at::cat(pieces);
  const std::int64_t total = std::accumulate(from_ranks.begin(), from_ranks.end(), std::int64_t{0});
  at::Tensor output = at::empty({total}, like.options());
  flush_pending_transfers(mesh_.group_of_all_ranks())
      .all_to_all(output, input, from_ranks, counts)
      ->wait();
  return output;
}

std::vector<at::Tensor> MatrixExchange::gather(const std::vector<at::Tensor>& locals) const {
  const auto ranks = static_cast<std::size_t>(mesh_.size());
  std::vector<std::vector<at::Tensor>> to_ranks(ranks);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    if (sends_[i]) {
      to_ranks[static_cast<std::size_t>(owners_[i])].push_back(locals[i]);
    }
  }
  std::vector<std::int64_t> from_ranks(ranks, 0);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t k = 0; k < owned_.size(); ++k) {
      if (parts_[k][rank].sent) {
        from_ranks[rank] += parts_[k][rank].numel;
      }
    }
  }
  const at::Tensor received = exchange(to_ranks, from_ranks, locals.front());
  std::vector<at::Tensor> wholes;
  for (const std::size_t i : owned_) {
    wholes.push_back(at::empty({matrices_[i].rows, matrices_[i].columns}, received.options()));
  }
  // The received elements are in the order in which they were packed: by rank, then by matrix.
  std::int64_t offset = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t k = 0; k < owned_.size(); ++k) {
      const RankShard& part = parts_[k][rank];
      if (!part.sent) {
        continue;
      }
      const at::Tensor piece = received.narrow(0, offset, part.numel).view(part.sizes);
      for (const Box& box : part.boxes) {
        block(wholes[k], box.global_offset, box.sizes)
            .copy_(block(piece, box.local_offset, box.sizes));
      }
      offset += part.numel;
    }
  }
  return wholes;
}

std::vector<at::Tensor> MatrixExchange::scatter(const std::vector<at::Tensor>& wholes,
                                                const std::vector<at::Tensor>& locals) const {
  const auto ranks = static_cast<std::size_t>(mesh_.size());
  // Each result is sent to all ranks, including ranks of other replicas of the matrix.
  std::vector<std::vector<at::Tensor>> to_ranks(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t k = 0; k < owned_.size(); ++k) {
      const RankShard& part = parts_[k][rank];
      at::Tensor piece = at::empty(part.sizes, wholes[k].options());
      for (const Box& box : part.boxes) {
        block(piece, box.local_offset, box.sizes)
            .copy_(block(wholes[k], box.global_offset, box.sizes));
      }
      to_ranks[rank].push_back(std::move(piece));
    }
  }
  std::vector<std::int64_t> from_ranks(ranks, 0);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    from_ranks[static_cast<std::size_t>(owners_[i])] += locals[i].numel();
  }
  const at::Tensor received = exchange(to_ranks, from_ranks, locals.front());
  std::vector<std::int64_t> offsets(ranks, 0);
  // offsets[r]: where the next matrix from owner r begins in `received`.
  std::exclusive_scan(from_ranks.begin(), from_ranks.end(), offsets.begin(), std::int64_t{0});
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    std::int64_t& offset = offsets[static_cast<std::size_t>(owners_[i])];
    parts.push_back(received.narrow(0, offset, locals[i].numel()).view(locals[i].sizes()));
    offset += locals[i].numel();
  }
  return parts;
}

std::vector<at::Tensor> MatrixExchange::run(const std::vector<at::Tensor>& locals,
                                            const Work& work) const {
  std::vector<at::Tensor> wholes = gather(locals);
  for (std::size_t k = 0; k < owned_.size(); ++k) {
    wholes[k] = work(owned_[k], wholes[k]).to(locals.front().scalar_type());
  }
  return scatter(wholes, locals);
}

namespace {

bool needs_exchange(const at::Tensor& parameter) {
  return tessera::is_distributed(parameter) && sharding_spec(parameter).mesh.size() > 1;
}

void check(const MuonOptions& options) {
  TESSERA_CHECK(options.lr >= 0.0 && options.weight_decay >= 0.0 && options.momentum >= 0.0 &&
                    options.momentum < 1.0 && options.eps > 0.0 && options.ns_steps >= 0 &&
                    options.ns_steps < 100,
                "Muon with lr ", options.lr, ", weight decay ", options.weight_decay, ", momentum ",
                options.momentum, ", eps ", options.eps, " and ", options.ns_steps,
                " Newton-Schulz steps is invalid; the momentum must be in [0, 1), eps above 0, the "
                "steps at most 99, and no value negative");
}

void check_matrices(const std::vector<nn::SlotPtr>& parameters) {
  for (const nn::SlotPtr& slot : parameters) {
    TESSERA_CHECK(slot->persistent().dim() == 2,
                  "Muon updates matrices only, but got a parameter of sizes ",
                  slot->persistent().sizes(), "; pass the parameter to AdamW (see split_for_muon)");
    TESSERA_CHECK(!slot->persistent().is_complex(), "Muon updates real matrices only, but ",
                  nn::describe(*slot), " is ", slot->persistent().scalar_type(),
                  "; pass it to AdamW");
  }
}

/// Returns the factor of a matrix's learning rate. The global sizes are used, because the factor
/// must not depend on the mesh.
double rate_of(const MuonOptions& options, const at::Tensor& matrix) {
  const auto rows = static_cast<double>(matrix.size(0));
  const auto columns = static_cast<double>(matrix.size(1));
  return options.rate == MuonRate::kOriginal ? std::sqrt(std::max(1.0, rows / columns))
                                             : 0.2 * std::sqrt(std::max(rows, columns));
}

/// Approximates U V^T of the singular value decomposition of a plain `matrix` by a quintic
/// Newton-Schulz iteration, as torch.optim.Muon does (after Keller Jordan). The result's singular
/// values are about 0.7 to 1.2.
at::Tensor newton_schulz(const at::Tensor& matrix, const std::array<double, 3>& coefficients,
                         int steps, double eps) {
  const auto [a, b, c] = coefficients;
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  // A matrix that is divided by its Frobenius norm has a spectral norm of at most 1, which the
  // iteration requires.
  x = x.div(x.norm().clamp_min(eps));
  for (int i = 0; i < steps; ++i) {
    const at::Tensor gram = at::mm(x, x.t());
    const at::Tensor update = at::addmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    x = at::addmm(x, update, x, /*beta=*/a);
  }
  return tall ? x.t() : x;
}

bool holds_embedding(const nn::ModuleBase* module) {
  const auto* const holder = dynamic_cast<const nn::detail::AdoptsModule*>(module);
  if (holder == nullptr) {
    return false;
  }
  const torch::nn::Module& held = holder->adopted_module();
  return dynamic_cast<const torch::nn::EmbeddingImpl*>(&held) != nullptr ||
         dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&held) != nullptr;
}

bool is_embedding(const nn::ParameterSlot& slot) {
  return std::ranges::any_of(slot.owners(), [](const nn::ParameterSlot::Owner& owner) {
    return dynamic_cast<const nn::Embedding*>(owner.module) != nullptr ||
           holds_embedding(owner.module);
  });
}

}  // namespace

/// The matrices on one mesh and of one dtype, which a step sends to their owners together.
class Muon::Exchange {
 public:
  Exchange(const DeviceMesh& mesh, c10::ScalarType dtype) : mesh_(mesh), dtype_(dtype) {}

  bool takes(const DeviceMesh& mesh, c10::ScalarType dtype) const {
    return mesh_ == mesh && dtype_ == dtype;
  }
  void add(const ShardUpdate& shard) { shards_.push_back(shard); }
  // Exchanges the matrices and updates the shards. Collective over the mesh: every rank exchanges
  // the same matrices in the same order, with or without a gradient.
  void run(Muon& muon, double factor) {
    drop_unused();
    if (shards_.empty()) {
      return;
    }
    std::vector<SpreadMatrix> matrices;
    std::vector<at::Tensor> locals;
    for (const ShardUpdate& shard : shards_) {
      const at::Tensor& parameter = muon.parameters()[shard.index]->persistent();
      matrices.push_back({sharding_spec(parameter).layout, parameter.size(0), parameter.size(1)});
      // Shards that are offloaded to the CPU are copied to the mesh's device.
      locals.push_back(muon.direction(shard, factor).to(mesh_.device()));
    }
    // The owners of the matrices are chosen again only if the list of matrices has changed.
    if (plan_ == nullptr || plan_->matrices() != matrices) {
      plan_ = std::make_unique<MatrixExchange>(mesh_, std::move(matrices));
    }
    const auto results = plan_->run(locals, [&](std::size_t i, const at::Tensor& whole) {
      return muon.orthogonal(whole, shards_[i].group);
    });
    for (std::size_t i = 0; i < results.size(); ++i) {
      muon.apply(shards_[i], results[i]);
    }
    clear();
  }
  void clear() { shards_.clear(); }
  bool empty() const { return shards_.empty(); }

 private:
  /// Removes the matrices that have no gradient on any rank, because a run in one process would not
  /// update such matrices either. Collective.
  void drop_unused() {
    std::vector<std::uint8_t> used;
    for (const ShardUpdate& shard : shards_) {
      used.push_back(shard.gradient.defined() ? 1 : 0);
    }
    comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
    const comm::PurposeScope purpose(group, "the matrices that have a gradient");
    group.any_rank(used);
    std::size_t i = 0;
    std::erase_if(shards_, [&](const ShardUpdate&) { return used[i++] == 0; });
  }

  DeviceMesh mesh_;
  c10::ScalarType dtype_;
  std::vector<ShardUpdate> shards_;
  std::unique_ptr<MatrixExchange> plan_;
};

Muon::Muon(std::vector<Group<MuonOptions>> groups)
    : GroupedOptimizer(std::move(groups), {"momentum_buffer"}, /*counts_steps=*/false) {
  for (std::size_t i = 0; i < this->groups(); ++i) {
    check(options(i));
  }
  check_matrices(parameters());
}

Muon::Muon(std::vector<nn::SlotPtr> parameters, MuonOptions options)
    : Muon(std::vector<Group<MuonOptions>>{{std::move(parameters), options}}) {}

Muon::~Muon() = default;

/// A rank without a gradient of the matrix takes part in the exchange too.
bool Muon::updates_without_gradient(const at::Tensor& parameter) const {
  return parameter.requires_grad() && needs_exchange(parameter);
}

at::Tensor Muon::direction(const ShardUpdate& shard, double factor) {
  const MuonOptions& o = options(shard.group);
  const at::Tensor& momentum = state_of(shard.index).tensors[0];
  at::Tensor gradient = shard.gradient.defined() ? shard.gradient.to(momentum.scalar_type())
                                                 : at::zeros(momentum.sizes(), momentum.options());
  if (factor != 1.0) {
    gradient = gradient * factor;
  }
  // The momentum of Muon is an average of gradients instead of a sum, as in torch.optim.Muon.
  momentum.lerp_(gradient, 1.0 - o.momentum);
  return (o.nesterov ? gradient.lerp(momentum, o.momentum) : momentum).to(o.compute_dtype);
}

at::Tensor Muon::orthogonal(const at::Tensor& matrix, std::size_t group) const {
  const MuonOptions& o = options(group);
  return newton_schulz(matrix, o.ns_coefficients, o.ns_steps, o.eps);
}

void Muon::apply(const ShardUpdate& shard, const at::Tensor& orthogonal) const {
  const MuonOptions& o = options(shard.group);
  const double rate = lr(shard.group) * rate_of(o, parameters()[shard.index]->persistent());
  const at::Tensor& parameter = shard.parameter;
  // Weight decay and update are computed in fp32 and rounded once. An fp32 shard is updated in
  // place.
  const at::Tensor wide = parameter.to(update_type(parameter.scalar_type()));
  wide.mul_(1.0 - lr(shard.group) * o.weight_decay).add_(orthogonal.to(wide.device()), -rate);
  if (!wide.is_same(parameter)) {
    parameter.copy_(wide);
  }
}

/// Returns the Exchange for a mesh and a dtype. exchanges_ is in the order of the first parameter
/// of each Exchange, which is the same on every rank.
Muon::Exchange& Muon::exchange_of(const DeviceMesh& mesh, c10::ScalarType dtype) {
  const auto found = std::ranges::find_if(
      exchanges_, [&](const Exchange& exchange) { return exchange.takes(mesh, dtype); });
  return found != exchanges_.end() ? *found : exchanges_.emplace_back(mesh, dtype);
}

void Muon::update_shards(const std::vector<ShardUpdate>& shards,
                         const GradientFactor& gradient_factor) {
  if (gradient_factor.tensor.defined()) {
    scale_gradients(shards, gradient_factor.tensor);
  }
  const double factor = gradient_factor.number;
  for (Exchange& exchange : exchanges_) {
    exchange.clear();  // clear() removes the shards that a failed step has left
  }
  for (const ShardUpdate& shard : shards) {
    const at::Tensor& parameter = parameters()[shard.index]->persistent();
    // A rank with an empty shard still takes part in the exchange, so the global size is tested.
    if (parameter.numel() == 0) {
      continue;
    }
    if (needs_exchange(parameter)) {
      exchange_of(sharding_spec(parameter).mesh, options(shard.group).compute_dtype).add(shard);
    } else {
      apply(shard, orthogonal(direction(shard, factor), shard.group));
    }
  }
  for (Exchange& exchange : exchanges_) {
    if (!exchange.empty()) {
      exchange.run(*this, factor);
    }
  }
}

/// A model does not say which layers are hidden, so a matrix's sizes, module class and name decide.
MuonSplit split_for_muon(const nn::ModuleBase& module, const std::vector<std::string>& rest) {
  const auto named = nn::detail::matched_slots(module, rest, "split_for_muon");
  MuonSplit split;
  for (const auto& [name, slot] : module.named_slots()) {
    const at::Tensor& tensor = slot->persistent();
    const bool matrix =
        tensor.dim() == 2 && !tensor.is_complex() && !named.contains(slot) && !is_embedding(*slot);
    (matrix ? split.matrices : split.rest).push_back(slot);
  }
  return split;
}

}  // namespace tessera::optim
