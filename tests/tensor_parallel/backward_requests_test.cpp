// Draws random sequences of backward(), backward() with `inputs`, autograd::grad(), retained
// graphs, nested backwards, hooks and accumulation. Under tensor parallelism and FSDP, the
// gradients must equal those of one rank.

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <random>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel::requests {
namespace {

using torch::autograd::variable_list;

/// 2 ranks get uneven shards of 5 tokens and of 7 features.
constexpr std::int64_t kTokens = 5, kDim = 8, kFeatures = 7;

struct Net;

/// The backward of Tiled recomputes the MLP, and calls the MLP's backward within this backward.
struct Tiled : torch::autograd::Function<Tiled> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, Net* net);
  static variable_list backward(torch::autograd::AutogradContext* ctx,
                                const variable_list& gradients);
};

struct Net : nn::Module<Net> {
  Net() {
    gain = register_slot("gain", at::ones({kDim}));
    nn::apply_lora(*this, {.rank = 2, .alpha = 2, .targets = {"up"}});
    for (const auto& [name, slot] : named_slots()) {
      slot->get().requires_grad_();
    }
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = (*norm)(x);
    if (watch) {
      watch(h);
    }
    return ((tiled ? Tiled::apply(h, this) : mlp(h)) * *gain).square().mean();
  }
  at::Tensor mlp(const at::Tensor& h) { return (*down)(at::tanh((*up)(h))); }

  nn::Child<nn::RMSNorm> norm{*this, "norm", kDim};
  nn::Child<nn::Linear> up{*this, "up", kDim, kFeatures}, down{*this, "down", kFeatures, kDim};
  nn::Parameter gain;  ///< no plan entry matches `gain`
  bool tiled = false;
  std::function<void(const at::Tensor& hidden)> watch;
};

at::Tensor Tiled::forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, Net* net) {
  ctx->save_for_backward({x});
  ctx->saved_data["net"] = reinterpret_cast<std::int64_t>(net);
  return net->mlp(x);
}

variable_list Tiled::backward(torch::autograd::AutogradContext* ctx,
                              const variable_list& gradients) {
  auto* net = reinterpret_cast<Net*>(ctx->saved_data["net"].toInt());
  const c10::AutoGradMode grad(true);
  const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
  net->mlp(x).backward(gradients[0]);
  return {x.grad(), at::Tensor()};
}

ParallelizePlan plan() {
  return {{"norm", sequence_parallel({.sequence_dim = 0})},
          {"up", colwise_parallel()},
          {"down", rowwise_parallel({.output_layouts = Shard{0}})}};
}

/// Runs random backward calls: on a mesh, or on one rank with the batches of all dp ranks.
class Walk {
 public:
  Walk(Net& net, std::vector<int> batches, bool nests_anywhere)
      : net_(net), batches_(std::move(batches)), nests_anywhere_(nests_anywhere) {
    for (const auto& [name, slot] : net.named_slots()) {
      parameters_.push_back(slot->persistent());
      seen_.emplace_back();
    }
  }

  /// Returns all computed gradients in the order of the calls; undefined: no gradient.
  std::vector<at::Tensor> run(unsigned seed) {
    random_.seed(seed);
    add_hooks();
    for (int step = 0; step < 8; ++step) {
      net_.tiled = chance(4) && nests_anywhere_;
      if (chance(3)) {
        for (const at::Tensor& parameter : parameters_) {
          parameter.mutable_grad() = at::Tensor();
        }
      }
      request(step);
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        note(parameters_[i].grad());
        note(seen_[i]);
      }
    }
    return found_;
  }

 private:
  int draw(int options) { return static_cast<int>(random_() % static_cast<unsigned>(options)); }
  bool chance(int in) { return draw(in) == 0; }
  void note(const at::Tensor& tensor) {
    found_.push_back(tensor.defined() ? full_tensor(tensor.detach()).clone() : at::Tensor());
  }

  /// Each hook sums the gradients that it receives. A mesh can call hooks more often than one rank
  /// does, but the sums must be equal.
  void add_hooks() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto see = [this, i](const at::Tensor& gradient) {
        const c10::NoGradGuard no_grad;
        const at::Tensor whole = full_tensor(gradient.detach());
        seen_[i] = seen_[i].defined() ? seen_[i] + whole : whole.clone();
      };
      const int kind = draw(4);
      if (kind == 0) {
        parameters_[i].register_hook([see](const at::Tensor& gradient) {
          see(gradient);
          return gradient * 2;
        });
      } else if (kind == 1) {
        testing::after_accumulation(parameters_[i], [see](const at::Tensor& leaf) {
          see(leaf.grad());
          leaf.mutable_grad() = at::Tensor();
        });
      }
    }
  }

  variable_list some_parameters() {
    variable_list some;
    for (const at::Tensor& parameter : parameters_) {
      if (chance(2)) {
        some.push_back(parameter);
      }
    }
    return some.empty() ? variable_list{parameters_.front()} : some;
  }

  at::Tensor loss(int which) {
    std::vector<at::Tensor> losses;
    for (const int batch : batches_) {
      losses.push_back(net_(uniform_values({kTokens, kDim}, which + 0.1 * batch)));
    }
    return at::stack(losses).mean();
  }

  void backward(const at::Tensor& of, bool retain) {
    // The graph does not contain the parameters of a tiled MLP: `inputs` must not name them.
    switch (net_.tiled ? 0 : draw(3)) {
      case 0:
        return of.backward({}, retain);
      case 1:
        return of.backward({}, retain, false, some_parameters());
      default:
        for (const at::Tensor& gradient :
             torch::autograd::grad({of}, some_parameters(), {}, retain)) {
          note(gradient);
        }
    }
  }

  void request(int step) {
    switch (draw(4)) {
      case 0: {  // a backward within a backward
        const at::Tensor inner = loss(step + 1);
        const auto done = std::make_shared<bool>(false);
        const auto nest_at = [inner, done](const at::Tensor& tensor) {
          tensor.register_hook([inner, done](const at::Tensor& gradient) {
            if (!std::exchange(*done, true)) {
              inner.backward();
            }
            return gradient;
          });
        };
        if (chance(2)) {
          const at::Tensor outer = loss(step);
          nest_at(outer);  // the inner backward runs before the backward of all units
          return outer.backward();
        }
        net_.watch = nest_at;
        const at::Tensor outer = loss(step);
        net_.watch = nullptr;
        return outer.backward();
      }
      case 1: {  // two backwards of the same graph
        const at::Tensor of = loss(step);
        backward(of, /*retain=*/true);
        return backward(of, /*retain=*/false);
      }
      case 2:  // one backward of two graphs
        return backward(loss(step) + loss(step + 1), /*retain=*/false);
      default:
        return backward(loss(step), /*retain=*/false);
    }
  }

  Net& net_;
  std::vector<int> batches_;
  bool nests_anywhere_;
  std::mt19937 random_;
  variable_list parameters_;
  variable_list seen_;  ///< sums of the gradients that each parameter's hook received
  std::vector<at::Tensor> found_;
};

void walk(std::int64_t dp, std::int64_t tp, bool shards, unsigned seeds) {
  for (unsigned seed = 0; seed < seeds; ++seed) {
    std::vector<int> batches;
    for (int i = 0; i < dp; ++i) {
      batches.push_back(i);
    }
    Net alone;
    const std::vector<at::Tensor> expected = Walk(alone, batches, !shards).run(seed);
    RunOnMesh({dp, tp}, {"dp", "tp"}, [&](Rank&, const DeviceMesh& mesh) {
      Net net;
      if (tp > 1) {
        parallelize_module(net, mesh["tp"], plan());
      }
      if (shards) {
        fsdp::fully_shard(*net.norm, mesh["dp"]);
        fsdp::fully_shard(*net.down, mesh["dp"]);
        fsdp::fully_shard(net, mesh["dp"]);
      }
      const std::vector<int> own{static_cast<int>(mesh.local_rank("dp"))};
      EXPECT_EACH(Walk(net, own, !shards).run(seed), expected, 1e-4, 1e-6) << "seed " << seed;
    });
  }
}

TEST(BackwardRequests, HaveTheGradientsOfOneRank) {
  walk(1, 2, /*shards=*/false, 16);
  walk(2, 1, /*shards=*/true, 12);
  walk(2, 2, /*shards=*/true, 8);
}

}  // namespace
}  // namespace tessera::tensor_parallel::requests
