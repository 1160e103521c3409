#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/core/placement.h"

namespace tessera::fuzz {

/// The decisions that make a case. Each is drawn from the seed and its name, independently of the
/// others. So a case can be drawn again with some decisions set while the others stay.
class Choices {
 public:
  /// The labels of decisions by name; "" is the simplest option. With the name kOthers all other
  /// decisions are the simplest.
  using Labels = std::map<std::string, std::string>;
  static constexpr const char* kOthers = "*";
  /// An option of a decision. The weight is proportional to its probability.
  struct Option {
    std::string label;
    int weight = 1;
  };

  explicit Choices(std::uint64_t seed, Labels fixed = {});

  /// Returns the index of the drawn option. The first option must be the simplest. Throws Error if
  /// the name is fixed to a label that is not an option.
  std::size_t pick(const std::string& name, const std::vector<Option>& options);
  /// The same as an enumeration whose values are numbered as the options are.
  template <class E>
  E pick_as(const std::string& name, const std::vector<Option>& options) {
    return static_cast<E>(pick(name, options));
  }
  /// One of `values`; the first is the simplest.
  std::int64_t number(const std::string& name, const std::vector<std::int64_t>& values);
  bool chance(const std::string& name, int percent);

  /// The drawn options that are not the simplest. They describe the case completely.
  const Labels& made() const { return made_; }

 private:
  std::uint64_t seed_;
  Labels fixed_;
  Labels made_;
};

/// "name=label, name=label".
std::string to_string(const Choices::Labels& labels, const char* separator = ", ");

enum class NormKind { kNone, kRms, kLayer, kLayerWithoutBias, kScale, kStockLayer };
enum class LinearKind { kOwn, kStock };
enum class DropoutKind { kNone, kModule, kFunction, kStock };
enum class Activation {
  kGelu,
  kRelu,
  kCentred,         ///< reads the whole feature dimension and has no parameter
  kRandomMultiply,  ///< noise by at::rand_like
};

enum class Rotary { kNone, kFunction, kByHand };
/// A mask that depends on sizes only, and is plain on every mesh.
enum class Mask {
  kNone,
  kWindow,  ///< (sequence, sequence) of bool
  kSlopes,  ///< (heads, sequence, sequence), added
};

struct AttentionSpec {
  std::int64_t key_value_heads = 0;
  bool fused = false;  ///< one projection for queries, keys and values
  bool bias = false;
  bool causal = false;
  bool by_hand = false;  ///< softmax of products instead of scaled_dot_product_attention
  bool gain = false;     ///< a parameter of the module itself with a number for each head
  bool adapter = false;  ///< low-rank, added to the projection of queries
  NormKind query_key_norm = NormKind::kNone;
  bool dropout = false;  ///< dropout of attention weights
  Rotary rotary = Rotary::kNone;
  Mask mask = Mask::kNone;
};

enum class MlpKind {
  kPlain,
  kGated,
  kGatedFusedKernel,
  kFusedWeight,
  kExperts,  ///< two of four for each token, their weights stacked
};

/// An operator that reads the whole last dimension, which a column-wise projection splits.
enum class Along { kNone, kSoftmax, kCumsum, kExchangedHalves };

struct MlpSpec {
  MlpKind kind = MlpKind::kPlain;
  std::int64_t inner = 0;
  bool bias = false;
  LinearKind linear = LinearKind::kOwn;
  Activation activation = Activation::kGelu;
  Along along = Along::kNone;   ///< the operator after the activation
  bool inner_bias = false;      ///< a parameter of the module itself, between the projections
  bool auxiliary_loss = false;  ///< of the inner features, or of the router
  NormKind middle_norm = NormKind::kNone;
  DropoutKind dropout = DropoutKind::kNone;
  bool adapter = false;          ///< added to the last projection
  bool calls_forward = false;    ///< module->forward(x) in place of (*module)(x)
  bool checkpoint_call = false;  ///< nn::checkpoint around the call, in the block's forward
  bool skips_empty = false;      ///< the MLP is skipped on a rank without tokens
};

enum class ResidualScale { kNone, kVector, kScalar };

struct ModelSpec {
  std::int64_t vocabulary = 0, heads = 0, head_dim = 0, depth = 0;
  bool folded =
      false;  ///< activations are (tokens, features) in place of (batch, sequence, features)
  bool position = false;  ///< a learned position embedding, a module with its own parameter
  bool repeated = false;  ///< the first block runs twice
  bool tied = false;
  NormKind norm = NormKind::kNone;
  NormKind final_norm = NormKind::kNone;
  DropoutKind dropout = DropoutKind::kNone;
  ResidualScale residual_scale = ResidualScale::kNone;
  bool padding_mask = false;  ///< a mask of the token ids, which are plain
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
  kExperts,  ///< a user's own style
};

struct StyleSpec {
  StyleKind kind = StyleKind::kColwise;
  Placement output = Replicate{};
  bool local = false;
  bool takes_part = false;  ///< for kRowwise: its plain input is the local part of the features
  std::int64_t dim = 1;     ///< for kSequence, and for kExperts: 0: whole experts
  std::int64_t parts = 1;   ///< for kFusedColwise
};

struct PlanEntry {
  std::string pattern;
  StyleSpec style;
};

struct MeshSpec {
  std::int64_t replicas = 1, data = 1, tensor = 1;
  bool tensor_first = false;

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
  bool evaluate = false;  ///< a forward in evaluation mode between the steps
};

/// A fault that the tests of the search put into a case. It is never drawn.
enum class Planted { kNone, kWrongGradient };

/// A case: the computation and its distribution. The run on one rank reads only the model and the
/// training.
struct Case {
  std::uint64_t seed = 0;
  ModelSpec model;
  MeshSpec mesh;
  std::vector<PlanEntry> plan;
  FsdpSpec fsdp;
  TrainSpec train;
  Planted planted = Planted::kNone;
};

/// Draws a case. The same choices give the same case on every machine.
Case draw_case(std::uint64_t seed, Choices& choices);

/// What became of a case. The first two are as it should be, the others are faults of the library;
/// kNoOracle is one of the generator: the model doesn't run on one rank.
enum class Verdict {
  kEqual,
  kRefused,
  kNotComparable,  ///< rounding decides: training gets out of hand, or one rank with flipped last
                   ///< bits is as different from itself
  kRefusedLate,
  kDifferent,
  kHung,
  kCrashed,
  kNoOracle
};

std::string to_string(Verdict verdict);
/// The opposite; throws Error for other texts.
Verdict verdict_of(const std::string& text);
inline bool is_fault(Verdict verdict) {
  return verdict > Verdict::kNotComparable;
}

struct Outcome {
  Verdict verdict = Verdict::kEqual;
  std::string what;  ///< one line: the error, or the first differences
};

/// Trains the case's model on its ranks, as threads, and on one rank in the same precision (fp64),
/// and compares the losses, the norms of the gradients and the parameters. A collective that takes
/// `timeout` is a hang; ranks that run for thrice that end the process.
Outcome run_case(const Case& c, std::chrono::seconds timeout);

}  // namespace tessera::fuzz
