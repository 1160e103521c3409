#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/core/placement.h"

namespace tessera::fuzz {

/// Draws the options of a fuzz case. A decision depends only on the seed and the decision's name.
/// Fixing a decision in `fixed` therefore does not change other decisions.
class Choices {
 public:
  /// Maps decision names to labels of options. The label "" stands for a decision's simplest
  /// option, and the name kOthers for all decisions that the map does not contain.
  using Labels = std::map<std::string, std::string>;
  static constexpr const char* kOthers = "*";
  /// An option of a decision, drawn with a probability proportional to `weight`.
  struct Option {
    std::string label;
    int weight = 1;
  };

  explicit Choices(std::uint64_t seed, Labels fixed = {});

  /// Draws one of `options` and returns its index. options[0] must be the simplest option. Throws
  /// Error if `fixed` has an unknown label for this decision.
  std::size_t pick(const std::string& name, const std::vector<Option>& options);
  /// Like pick(), but returns the drawn index as a value of the enum E.
  template <class E>
  E pick_as(const std::string& name, const std::vector<Option>& options) {
    return static_cast<E>(pick(name, options));
  }
  /// Draws one of `values`. values[0] must be the simplest value.
  std::int64_t number(const std::string& name, const std::vector<std::int64_t>& values);
  bool chance(const std::string& name, int percent);

  /// The decisions whose option is not the simplest. The seed and these labels reproduce the case.
  const Labels& made() const { return made_; }

 private:
  std::uint64_t seed_;
  Labels fixed_;
  Labels made_;
};

std::string to_string(const Choices::Labels& labels, const char* separator = ", ");

enum class NormKind { kNone, kRms, kLayer, kLayerWithoutBias, kScale, kStockLayer };
enum class LinearKind { kOwn, kStock };
enum class DropoutKind { kNone, kModule, kFunction, kStock };
enum class Activation {
  kGelu,
  kRelu,
  kCentred,         ///< kCentred: subtracts the mean of the features
  kRandomMultiply,  ///< kRandomMultiply: multiplies by at::rand_like()
};

enum class Rotary { kNone, kFunction, kByHand };
/// An attention mask whose values depend only on sizes. On a mesh, too, the mask is a plain tensor.
enum class Mask {
  kNone,
  kWindow,  ///< kWindow: a bool mask of (sequence, sequence)
  kSlopes,  ///< kSlopes: a bias of (heads, sequence, sequence)
};

struct AttentionSpec {
  std::int64_t key_value_heads = 0;
  bool fused = false;  ///< `fused`: one projection for queries, keys and values
  bool bias = false;
  bool causal = false;
  bool by_hand = false;  ///< `by_hand`: without scaled_dot_product_attention
  bool gain = false;     ///< `gain`: multiplies each head by a parameter
  bool adapter = false;  ///< `adapter`: LoRA of the query projection
  NormKind query_key_norm = NormKind::kNone;
  bool dropout = false;
  Rotary rotary = Rotary::kNone;
  Mask mask = Mask::kNone;
};

enum class MlpKind {
  kPlain,
  kGated,
  kGatedFusedKernel,
  kFusedWeight,
  kExperts,  ///< an nn::MixtureOfExperts
};

/// An operator along the MLP's hidden dimension, which tensor parallelism may shard.
enum class Along { kNone, kSoftmax, kCumsum, kExchangedHalves };

struct ExpertsSpec {
  std::int64_t experts = 4, top_k = 2;
  bool sigmoid = false;         ///< `sigmoid`: router scores are sigmoids
  bool not_normalized = false;  ///< `not_normalized`: a token's top-k weights may not add up to 1
  bool selection_bias = false;
  bool shared = false;  ///< `shared`: a shared expert also gets every token
};

struct MlpSpec {
  MlpKind kind = MlpKind::kPlain;
  ExpertsSpec experts{};
  std::int64_t inner = 0;
  bool bias = false;
  LinearKind linear = LinearKind::kOwn;
  Activation activation = Activation::kGelu;
  Along along = Along::kNone;
  bool inner_bias = false;  ///< `inner_bias`: a parameter of the MLP, not of a child
  bool auxiliary_loss = false;
  NormKind middle_norm = NormKind::kNone;
  DropoutKind dropout = DropoutKind::kNone;
  bool adapter = false;          ///< `adapter`: LoRA of the last projection
  bool calls_forward = false;    ///< `calls_forward`: calls module->forward(x), not module(x)
  bool checkpoint_call = false;  ///< `checkpoint_call`: nn::checkpoint calls the MLP
  bool skips_empty = false;      ///< `skips_empty`: a rank without tokens skips the MLP
};

enum class ResidualScale { kNone, kVector, kScalar };

struct ModelSpec {
  std::int64_t vocabulary = 0, heads = 0, head_dim = 0, depth = 0;
  bool folded = false;    ///< `folded`: activations are (batch * sequence, features)
  bool position = false;  ///< `position`: adds a learned position embedding
  bool repeated = false;  ///< `repeated`: the first block runs twice
  bool tied = false;
  NormKind norm = NormKind::kNone;
  NormKind final_norm = NormKind::kNone;
  DropoutKind dropout = DropoutKind::kNone;
  ResidualScale residual_scale = ResidualScale::kNone;
  bool padding_mask = false;  ///< `padding_mask`: masks some token ids in attention
  bool attention = true, mlp = true;
  AttentionSpec attend{};
  MlpSpec feed{};

  std::int64_t dim() const { return heads * head_dim; }
};

enum class StyleKind {
  kColwise,
  kRowwise,
  kSequence,
  kReplicate,
  kPrepareInput,
  kPrepareOutput,
  kFusedColwise,
};

struct StyleSpec {
  StyleKind kind = StyleKind::kColwise;
  Placement output = Replicate{};
  bool local = false;
  bool takes_part = false;  ///< kRowwise: whether a plain input is this rank's shard
  std::int64_t dim = 1;     ///< kSequence: the tensor dimension to shard
  std::int64_t parts = 1;   ///< kFusedColwise: number of equal parts of the output
};

struct PlanEntry {
  std::string pattern;
  StyleSpec style;
};

struct MeshSpec {
  std::int64_t replicas = 1, data = 1, tensor = 1;
  bool tensor_first = false;
  std::int64_t experts = 1;
  bool experts_on_tensor = false;  ///< `experts_on_tensor`: experts are also split over tp

  int ranks() const { return static_cast<int>(replicas * data * tensor); }
};

enum class DataParallel { kFullyShard, kReplicate, kNone };
enum class Units { kRoot, kBlocks, kHalves };
enum class ShardPlacement { kDefault, kLast, kReplicateVectors };
enum class Reshard { kDefault, kAlways, kNever };
enum class Accumulate { kReduceEach, kReduceLast, kOverlapped, kKeepUnsharded, kAllReduceLast };

struct FsdpSpec {
  DataParallel kind = DataParallel::kFullyShard;
  Units units = Units::kRoot;
  Reshard reshard = Reshard::kDefault;
  ShardPlacement placement = ShardPlacement::kDefault;
  std::int64_t post_forward = 1;
  bool offload = false, before_tensor_parallel = false;
  bool prefetch = false;
};

enum class Frozen { kNone, kEmbedding, kNorms, kAllButAdapters, kFirstBlock, kBiases };
enum class Checkpointing { kNone, kBlocks, kSelective, kHalves };
enum class Init { kBeforeWrapping, kMeta, kMetaUnfilled, kMetaWithoutStorage, kOtherSeeds };
enum class OptimizerKind { kSgd, kAdamW, kStockSgd, kStockAdamW };
enum class Loss { kSquares, kCrossEntropy, kLossParallel };

struct TrainSpec {
  std::int64_t batch = 0, sequence = 0, micro_batches = 1;
  Init init = Init::kBeforeWrapping;
  Frozen frozen = Frozen::kNone;
  Checkpointing checkpointing = Checkpointing::kNone;
  OptimizerKind optimizer = OptimizerKind::kSgd;
  Accumulate accumulate = Accumulate::kReduceEach;
  Loss loss = Loss::kSquares;
  bool loss_in_forward = false;
  bool clip = false;
  bool evaluate = false;  ///< `evaluate`: evaluates after each step
};

/// An error that a test of the fuzzer plants in a run. Randomly drawn cases have none.
enum class Planted { kNone, kWrongGradient };

/// A fuzz case. When a case runs on one rank, only `model` and `train` are used.
struct Case {
  std::uint64_t seed = 0;
  ModelSpec model;
  MeshSpec mesh;
  std::vector<PlanEntry> plan;
  FsdpSpec fsdp;
  TrainSpec train;
  Planted planted = Planted::kNone;
};

Case draw_case(std::uint64_t seed, Choices& choices);

/// The result of a case. kEqual, kNotComparable and kRefused (error in the first step) are correct.
/// kNoOracle: the model failed on one rank. Other verdicts are library errors.
enum class Verdict {
  kEqual,
  kRefused,
  /// training on one rank diverges, or flipped last bits of the initial weights change the results
  /// at least half as much as the mesh does
  kNotComparable,
  kRefusedLate,
  kDifferent,
  kHung,
  kCrashed,
  kNoOracle
};

std::string to_string(Verdict verdict);
Verdict verdict_of(const std::string& text);
inline bool is_fault(Verdict verdict) {
  return verdict > Verdict::kNotComparable;
}

struct Outcome {
  Verdict verdict = Verdict::kEqual;
  std::string what;  ///< the error, or the first differences
};

/// Trains a case in fp64 on its mesh (each rank is a thread) and on one rank, and compares losses,
/// gradient norms and parameters. A collective longer than `timeout` counts as a hang. After three
/// times `timeout`, the process ends.
Outcome run_case(const Case& c, std::chrono::seconds timeout);

}  // namespace tessera::fuzz
