// Samples and batches of training data. BatchLoader has no state: a batch depends only on the step
// number and the data, so a resumed run reads the same batches.

#include "tessera/data/batch_loader.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/data/text.h"

namespace tessera::data {
namespace {

/// The value of a target that cross_entropy ignores: the default of its ignore_index.
constexpr std::int64_t kIgnoredTarget = -100;

/// The number of tokens that are compared with the vocabulary size before the first step. Later
/// tokens are compared when a sample is read.
constexpr std::int64_t kCheckedAtStart = std::int64_t{1} << 26;
/// The number of tokens that are read and checked together, small enough for the CPU's cache.
constexpr std::int64_t kCheckedAtOnce = std::int64_t{1} << 16;

class TokenWindows final : public SampleSource {
 public:
  TokenWindows(TokenSourcePtr tokens, std::int64_t sequence, std::int64_t vocabulary)
      : tokens_(std::move(tokens)), sequence_(sequence), vocabulary_(vocabulary) {
    TESSERA_CHECK(sequence > 0 && vocabulary > 0, "the sequence length ", sequence,
                  " and the vocabulary size ", vocabulary, " must be positive");
    check_start();
  }

  // Samples overlap by one token: the last target of a sample is the first input of the next.
  std::int64_t size() const override {
    return std::max<std::int64_t>(tokens_->size() - 1, 0) / sequence_;
  }

  std::int64_t sequence() const override { return sequence_; }

  void read(std::int64_t index, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const override {
    std::vector<std::int64_t> sample(static_cast<std::size_t>(sequence_) + 1);
    const std::int64_t begin = index * sequence_;
    tokens_->read(begin, sample);
    check_vocabulary(begin, sample);
    std::copy(sample.begin(), sample.end() - 1, inputs.begin());
    std::copy(sample.begin() + 1, sample.end(), targets.begin());
  }

  std::string description() const override {
    return std::to_string(tokens_->size()) + " tokens, which is " + std::to_string(size()) +
           (size() == 1 ? " sample of " : " samples of ") + std::to_string(sequence_) + " tokens";
  }

 private:
  /// Checks the first tokens of the data at construction, because most wrong tokenizers are then
  /// detected before the first training step.
  void check_start() const {
    const std::int64_t end = std::min(tokens_->size(), kCheckedAtStart);
    std::vector<std::int64_t> piece;
    for (std::int64_t begin = 0; begin < end; begin += kCheckedAtOnce) {
      piece.resize(static_cast<std::size_t>(std::min(kCheckedAtOnce, end - begin)));
      tokens_->read(begin, piece);
      check_vocabulary(begin, piece);
    }
  }

  /// Throws Error for a token outside the vocabulary. A GPU would report the error only at a later
  /// operator. `begin`: index of the first token, for messages.
  void check_vocabulary(std::int64_t begin, std::span<const std::int64_t> tokens) const {
    const auto outside = [this](std::int64_t token) { return token < 0 || token >= vocabulary_; };
    const auto bad = std::find_if(tokens.begin(), tokens.end(), outside);
    TESSERA_CHECK(bad == tokens.end(), "token ", *bad, " at position ",
                  begin + (bad - tokens.begin()), " of the data is outside the vocabulary of ",
                  vocabulary_, " tokens; tokenize the data with the tokenizer of the model");
  }

  TokenSourcePtr tokens_;
  std::int64_t sequence_, vocabulary_;
};

}  // namespace

SampleSourcePtr token_windows(TokenSourcePtr tokens, std::int64_t sequence,
                              std::int64_t vocabulary) {
  return std::make_shared<TokenWindows>(std::move(tokens), sequence, vocabulary);
}

namespace {

struct Sample {
  std::vector<std::int64_t> tokens;
  std::vector<bool> learned;
};

std::size_t common_tokens(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

/// Returns how many of `tokens` are completely in `prefix`, which is the beginning of their text.
std::size_t tokens_before(std::string_view prefix, const std::vector<std::int64_t>& tokens,
                          const Tokenizer& tokenizer) {
  const std::vector<std::int64_t> alone = tokenizer.encode(prefix);
  std::size_t count = common_tokens(alone, tokens);
  if (count == alone.size()) {
    return count;
  }
  // The last tokens of `prefix` depend on the text after `prefix`, so the lengths of decoded texts
  // are compared. The loop stops at a special token, which decodes to no text.
  const auto bytes_of = [&](std::size_t first) {
    return tokenizer.decode({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first)})
        .size();
  };
  const std::size_t end = tokenizer.decode(alone).size();
  for (std::size_t bytes = bytes_of(count); count < tokens.size(); ++count) {
    const std::size_t next = bytes_of(count + 1);
    if (next == bytes || next > end) {
      break;
    }
    bytes = next;
  }
  return count;
}

class PromptCompletions final : public SampleSource {
 public:
  PromptCompletions(const JsonLines& lines, const Tokenizer& tokenizer, std::int64_t sequence,
                    PromptOptions options)
      : sequence_(sequence), options_(std::move(options)) {
    TESSERA_CHECK(sequence > 0, "the sequence length ", sequence, " must be positive");
    TESSERA_CHECK(!options_.end.empty(),
                  "PromptOptions::end is empty; pass the token that ends a completion");
    while (const auto line = lines()) {
      add(line->first, tokenizer, line->second);
    }
    TESSERA_CHECK(!begins_.empty(),
                  "the data for fine-tuning have no JSON object; write one JSON object per line");
  }

  std::int64_t size() const override { return static_cast<std::int64_t>(begins_.size()); }
  std::int64_t sequence() const override { return sequence_; }
  bool ignores_targets() const override { return true; }

  void read(std::int64_t index, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const override {
    const auto number = static_cast<std::size_t>(index);
    const std::size_t begin = begins_.at(number);
    const std::size_t end = number + 1 < begins_.size() ? begins_[number + 1] : tokens_.size();
    std::ranges::fill(inputs, options_.end.back());
    std::ranges::fill(targets, kIgnoredTarget);
    for (std::size_t i = 0; begin + i + 1 < end; ++i) {
      inputs[i] = tokens_[begin + i];
      targets[i] = learned_[begin + i + 1] ? tokens_[begin + i + 1] : kIgnoredTarget;
    }
  }

  std::string description() const override {
    return std::to_string(size()) + " prompts with completions";
  }

 private:
  /// Makes a sample of `tokens`. The first `prompt` tokens, which are the prompt, are not targets.
  static Sample sample_of(std::vector<std::int64_t> tokens, std::size_t prompt) {
    std::vector<bool> learned(tokens.size(), true);
    std::fill_n(learned.begin(), std::min(prompt, learned.size()), false);
    return {std::move(tokens), std::move(learned)};
  }

  Sample encode(const Tokenizer& tokenizer, const std::string& prompt,
                const std::string& completion, std::size_t room) const {
    std::vector<std::int64_t> first = tokenizer.encode(prompt);
    std::vector<std::int64_t> all = tokenizer.encode(prompt + completion);
    if (common_tokens(first, all) < first.size()) {
      all = first;
      const std::vector<std::int64_t> rest = tokenizer.encode(completion);
      all.insert(all.end(), rest.begin(), rest.end());
    }
    all.insert(all.begin(), options_.begin.begin(), options_.begin.end());
    all.insert(all.end(), options_.end.begin(), options_.end.end());
    std::size_t length = options_.begin.size() + first.size();
    cut_prompt(all, length, room);
    return sample_of(std::move(all), length);
  }

  /// Shortens a prompt at its beginning, until the whole completion fits into the sample or one
  /// token of the prompt remains. The begin tokens are not cut.
  void cut_prompt(std::vector<std::int64_t>& tokens, std::size_t& prompt, std::size_t room) const {
    const std::size_t fixed = options_.begin.size();
    if (!options_.truncate || prompt < room || room <= fixed + 1) {
      return;
    }
    const std::size_t completion = tokens.size() - prompt;
    const std::size_t kept = std::max(room - std::min(completion, room), fixed + 1);
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(fixed);
    tokens.erase(begin, begin + static_cast<std::ptrdiff_t>(prompt - kept));
    prompt = kept;
  }

  Sample encode_conversation(const Tokenizer& tokenizer, const std::vector<std::string>& prompts,
                             const std::vector<std::string>& completions) const {
    std::string text;
    // The byte ranges of completions in `text`. The tokens of completions are targets.
    std::vector<std::pair<std::size_t, std::size_t>> learned;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      text += prompts[i];
      learned.emplace_back(text.size(), text.size() + completions[i].size());
      text += completions[i];
    }
    Sample sample{tokenizer.encode(text), {}};
    sample.learned.resize(sample.tokens.size());
    const auto token_at = [&](std::size_t byte) {
      return tokens_before(std::string_view(text).substr(0, byte), sample.tokens, tokenizer);
    };
    for (const auto& [begin, end] : learned) {
      const std::size_t last = token_at(end);
      for (std::size_t i = token_at(begin); i < last; ++i) {
        sample.learned[i] = true;
      }
    }
    return sample;
  }

  static std::string kind_of(const JsonTexts& value) {
    return value.is_list ? "a list of " + std::to_string(value.texts.size()) : "a string";
  }

  void add(const std::string& line, const Tokenizer& tokenizer, const std::string& origin) {
    const auto room = static_cast<std::size_t>(sequence_) + 1;
    const std::vector<JsonTexts> fields =
        json_text_lists(line, {options_.prompt_field, options_.completion_field}, origin);
    const JsonTexts& prompt = fields[0];
    const JsonTexts& completion = fields[1];
    TESSERA_CHECK(
        prompt.is_list == completion.is_list && prompt.texts.size() == completion.texts.size(),
        origin, ": the prompt is ", kind_of(prompt), ", and the completion is ",
        kind_of(completion), "; pass two strings, or two lists of equal length");
    Sample sample = prompt.is_list
                        ? encode_conversation(tokenizer, prompt.texts, completion.texts)
                        : encode(tokenizer, prompt.texts.front(), completion.texts.front(), room);
    const std::size_t size = sample.tokens.size();
    TESSERA_CHECK(options_.truncate || size <= room, origin, ": the sample has ", size,
                  " tokens, but a sequence and the last target together have ", room,
                  " tokens; use longer sequences, or set PromptOptions::truncate (--truncate)");
    // The first token of a sample is never a target, because no token precedes the first token.
    if (!sample.learned.empty()) {
      sample.learned[0] = false;
    }
    const auto first = std::find(sample.learned.begin(), sample.learned.end(), true);
    const auto before = static_cast<std::size_t>(first - sample.learned.begin());
    TESSERA_CHECK(before < std::min(size, room), origin, ": the prompt has ", before, " of ", size,
                  " tokens of the sample, which leaves no token to learn in a sequence of ",
                  sequence_, " tokens; use longer sequences, or remove the line");
    sample.tokens.resize(std::min(size, room));
    sample.learned.resize(sample.tokens.size());
    begins_.push_back(tokens_.size());
    tokens_.insert(tokens_.end(), sample.tokens.begin(), sample.tokens.end());
    learned_.insert(learned_.end(), sample.learned.begin(), sample.learned.end());
  }

  std::int64_t sequence_;
  PromptOptions options_;
  std::vector<std::uint32_t> tokens_;
  std::vector<bool> learned_;        ///< whether each token in tokens_ is a target
  std::vector<std::size_t> begins_;  ///< index in tokens_ at which each sample begins
};

}  // namespace

SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options) {
  return std::make_shared<PromptCompletions>(lines, tokenizer, sequence, options);
}

namespace {

/// Returns a hash in which each bit of the result depends on all bits of `value`: the finalizer of
/// splitmix64 (Steele et al. 2014).
std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

/// A pseudo-random permutation of [0, count) without a table: a Feistel network (Luby & Rackoff
/// 1988) over the next power of four, applied again while the value is >= count.
class Permutation {
 public:
  Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t number)
      : count_(static_cast<std::uint64_t>(count)) {
    while (half_bits_ < 31 && (std::uint64_t{1} << (2 * half_bits_)) < count_) {
      ++half_bits_;
    }
    std::uint64_t key = mix(mix(seed) ^ number);
    for (std::uint64_t& round : keys_) {
      round = key = mix(key);
    }
  }

  std::int64_t operator()(std::int64_t index) const {
    auto value = static_cast<std::uint64_t>(index);
    do {
      value = encipher(value);
    } while (value >= count_);
    return static_cast<std::int64_t>(value);
  }

 private:
  std::uint64_t encipher(std::uint64_t value) const {
    const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & mask;
    for (const std::uint64_t key : keys_) {
      left = std::exchange(right, left ^ (mix(right ^ key) & mask));
    }
    return (left << half_bits_) | right;
  }

  std::uint64_t count_;
  int half_bits_ = 1;
  std::array<std::uint64_t, 4> keys_;
};

/// Fractions are integers, in units of 1 / kUnits. The product of two fractions fits into int64.
constexpr double kUnits = std::int64_t{1} << 30;

/// Returns round(n * part / all), exact and without overflow for any n.
std::int64_t dealt(std::int64_t n, std::int64_t part, std::int64_t all) {
  return n / all * part + (n % all * part + all / 2) / all;
}

}  // namespace

/// The order of samples from weighted sources, which are the leaves of a binary tree. Of a node's
/// first n samples, the first child gets round(n p) for its share p of the node's weight.
class Mixture {
 public:
  /// All `weights` must be > 0. Fractions are stored as integers, to round equally on all machines.
  explicit Mixture(const std::vector<double>& weights) : sums_{0} {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (const double weight : weights) {
      const auto share = static_cast<std::int64_t>(std::llround(weight / total * kUnits));
      sums_.push_back(sums_.back() + std::max<std::int64_t>(share, 1));
    }
  }

  struct Place {
    std::size_t source;
    std::int64_t index;
  };
  Place operator()(std::int64_t n) const {
    Node at = root();
    while (at.last - at.first > 1) {
      const Node half = first_half(at);
      const std::int64_t before = dealt(n, weight(half), weight(at));
      if (dealt(n + 1, weight(half), weight(at)) > before) {
        at = half;
        n = before;
      } else {
        at.first = half.last;
        n -= before;
      }
    }
    return {at.first, n};
  }

  /// Returns an upper bound on one source's samples among `samples` consecutive samples: at each
  /// level of the tree, ceil(m p) of a node's m samples for a child with the share p.
  std::int64_t most(std::size_t source, std::int64_t samples) const {
    Node at = root();
    while (at.last - at.first > 1) {
      const std::int64_t all = weight(at);
      const Node half = first_half(at);
      source < half.last ? void(at = half) : void(at.first = half.last);
      samples = samples / all * weight(at) + (samples % all * weight(at) + all - 1) / all;
    }
    return samples;
  }

 private:
  /// A node of the binary tree of sources, which contains the sources [first, last).
  struct Node {
    std::size_t first, last;
  };
  Node root() const { return {0, sums_.size() - 1}; }
  static Node first_half(Node at) { return {at.first, (at.first + at.last) / 2}; }
  std::int64_t weight(Node at) const { return sums_[at.last] - sums_[at.first]; }

  std::vector<std::int64_t> sums_;  ///< cumulative fractions of the sources, in units of 2^-30
};

namespace {

std::vector<double> weights_of(const std::vector<WeightedSamples>& sources) {
  std::vector<double> weights;
  for (const WeightedSamples& source : sources) {
    TESSERA_CHECK(source.weight > 0 && std::isfinite(source.weight), "a data source has weight ",
                  source.weight, "; a weight must be positive and finite");
    weights.push_back(source.weight);
  }
  return weights;
}

/// Sets the position of each token in its document. The target of a document's end token would
/// belong to the next document, so this target becomes -100.
void part_documents(std::int64_t end, std::span<const std::int64_t> inputs,
                    std::span<std::int64_t> targets, std::span<std::int64_t> positions) {
  std::int64_t position = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    positions[i] = position++;
    if (inputs[i] == end) {
      targets[i] = kIgnoredTarget;
      position = 0;
    }
  }
}

}  // namespace

std::vector<RowRange> rows_of_rank(std::int64_t batch, std::int64_t micro_batches,
                                   std::int64_t rank, std::int64_t ranks) {
  TESSERA_CHECK(
      micro_batches > 0 && rank >= 0 && rank < ranks && batch % (micro_batches * ranks) == 0,
      "rank ", rank, " of ", ranks, " ranks, a batch of ", batch, " and ", micro_batches,
      " micro-batches were passed; ranks times micro-batches must divide the batch");
  const std::int64_t count = batch / micro_batches / ranks;
  std::vector<RowRange> rows;
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    const std::int64_t first = (i * ranks + rank) * count;
    rows.push_back({first, first + count});
  }
  return rows;
}

BatchLoader::BatchLoader(std::vector<WeightedSamples> sources, const BatchOptions& options)
    : sources_(std::move(sources)), options_(options) {
  TESSERA_CHECK(options.batch > 0 && !sources_.empty(), "batches of ", options.batch,
                " samples and ", sources_.size(), " sources were passed; both must be positive");
  sequence_ = sources_.front().samples->sequence();
  mixture_ = std::make_shared<Mixture>(weights_of(sources_));
  check_sizes();
}

void BatchLoader::check_sizes() const {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const SampleSource& source = *sources_[i].samples;
    TESSERA_CHECK(source.sequence() == sequence_, "data sources have sequences of ",
                  source.sequence(), " and ", sequence_, " tokens; use one length for all sources");
    const std::int64_t most = mixture_->most(i, options_.batch);
    const bool alone = sources_.size() == 1;
    TESSERA_CHECK(source.size() >= most, alone ? "the data have " : "a data source has ",
                  source.description(), ", but a batch of ", options_.batch, " samples needs ",
                  most, " from ", alone ? "the data" : "this source",
                  "; use more data, a smaller batch or a shorter sequence");
  }
}

BatchLoader::Batch BatchLoader::load(std::int64_t step, const std::vector<RowRange>& ranges,
                                     bool pinned) const {
  TESSERA_CHECK(step >= 0, "step ", step, " was passed; steps count from 0");
  std::int64_t rows = 0;
  for (const auto [first, last] : ranges) {
    TESSERA_CHECK(first >= 0 && first <= last && last <= options_.batch, "rows [", first, ", ",
                  last, ") of step ", step, " were passed, but a batch has rows [0, ",
                  options_.batch, ")");
    rows += last - first;
  }
  const auto tensor = [&] {
    return at::empty({rows, sequence_}, at::dtype(at::kLong).pinned_memory(pinned));
  };
  Batch result{tensor(), tensor(), options_.document_end ? tensor() : at::Tensor()};
  result.host_positions = result.positions;
  std::int64_t i = 0;
  for (const auto [first, last] : ranges) {
    for (std::int64_t row = first; row < last; ++row) {
      read_row(step * options_.batch + row, result, i++);
    }
  }
  return result;
}

void BatchLoader::read_row(std::int64_t n, const Batch& batch, std::int64_t i) const {
  const auto row = [&](const at::Tensor& all) {
    return std::span(all.mutable_data_ptr<std::int64_t>() + i * sequence_,
                     static_cast<std::size_t>(sequence_));
  };
  const Place from = place(n);
  from.source->read(from.sample, row(batch.inputs), row(batch.targets));
  if (options_.document_end) {
    part_documents(*options_.document_end, row(batch.inputs), row(batch.targets),
                   row(batch.positions));
  }
}

/// Returns the source and the index of sample `n`. After its last sample, a source starts again.
BatchLoader::Place BatchLoader::place(std::int64_t n) const {
  const Mixture::Place at = (*mixture_)(n);
  const SampleSource* source = sources_[at.source].samples.get();
  const std::int64_t sample = at.index % source->size();
  if (!options_.shuffle) {
    return {source, sample};
  }
  // The source's index is added to the seed, so that sources of equal size get different orders.
  const std::uint64_t seed = *options_.shuffle + at.source * 0x9e3779b97f4a7c15;
  const auto pass = static_cast<std::uint64_t>(at.index / source->size());
  return {source, Permutation(source->size(), seed, pass)(sample)};
}

std::int64_t BatchLoader::samples() const {
  std::int64_t sum = 0;
  for (const WeightedSamples& source : sources_) {
    sum += source.samples->size();
  }
  return sum;
}

bool BatchLoader::ignores_targets() const {
  return options_.document_end || std::ranges::any_of(sources_, [](const WeightedSamples& source) {
           return source.samples->ignores_targets();
         });
}

/// The pinned tensors can be freed before the copies to the GPU end, because the allocator of
/// pinned memory waits for the copies.
BatchLoader::Batch BatchLoader::Batch::to(c10::Device device) const {
  const auto copy = [device](const at::Tensor& host) {
    return host.defined() ? host.to(host.options().device(device).pinned_memory(false),
                                    /*non_blocking=*/true)
                          : host;
  };
  return {copy(inputs), copy(targets), copy(positions), host_positions};
}

BatchLoader::Batch BatchLoader::Batch::rows(std::int64_t first, std::int64_t count) const {
  const auto part = [&](const at::Tensor& all) {
    return all.defined() ? all.narrow(0, first, count) : all;
  };
  return {part(inputs), part(targets), part(positions), part(host_positions)};
}

PrefetchLoader::PrefetchLoader(std::shared_ptr<const BatchLoader> loader,
                               std::vector<RowRange> ranges, bool pinned, bool background)
    : loader_(std::move(loader)),
      ranges_(std::move(ranges)),
      pinned_(pinned),
      background_(background) {}

void PrefetchLoader::begin(std::int64_t step) {
  step_ = step;
  // The background thread needs the calling thread's GPU; otherwise page-locked memory would create
  // another CUDA context on the first GPU. A DeviceGuard without an index does not change the
  // current GPU.
  const c10::Device device = pinned_ ? c10::DeviceGuard(c10::Device(c10::kCUDA)).original_device()
                                     : c10::Device(c10::kCPU);
  // The task copies loader_ and ranges_, because the PrefetchLoader can be moved during the task.
  batch_ = std::async(background_ ? std::launch::async : std::launch::deferred,
                      [loader = loader_, ranges = ranges_, pinned = pinned_, step, device] {
                        const c10::DeviceGuard guard(device);
                        return loader->load(step, ranges, pinned);
                      });
  if (!background_) {
    batch_.wait();  // without a background thread, wait() loads the batch here
  }
}

BatchLoader::Batch PrefetchLoader::load(std::int64_t step) {
  RECORD_USER_SCOPE("load batch");
  if (step != step_) {
    begin(step);
  }
  // If get() throws an exception, the next load() must load this step again.
  step_ = -1;
  BatchLoader::Batch batch = batch_.get();
  begin(step + 1);
  return batch;
}

}  // namespace tessera::data
