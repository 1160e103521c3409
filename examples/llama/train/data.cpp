// Opens the training data and the held-out data of a run, and computes fingerprints of the data.

#include "examples/llama/train/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/start.h"
#include "examples/llama/texts/texts.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/batch_loader.h"
#include "tessera/data/text.h"
#include "tessera/data/token_shards.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/training/step.h"

namespace llama {

using namespace tessera;
using Json = nlohmann::json;

namespace {

/// Returns the token shards that the paths and globs in `patterns` match, sorted.
std::vector<std::string> shards_of(const char* flag, const std::vector<std::string>& globs) {
  std::vector<std::string> files = list_files(flag, globs);
  std::ranges::sort(files);
  return files;
}

/// Returns the shard files of each source of tokens. Without --weights, all shards are one source.
std::vector<std::vector<std::string>> token_files(const TrainOptions& options) {
  if (options.weights.empty()) {
    return {shards_of("--tokens", options.tokens)};
  }
  std::vector<std::vector<std::string>> sources;
  for (const std::string& glob : options.tokens) {
    sources.push_back(list_files("--tokens", {glob}));
  }
  return sources;
}

/// Returns the content of a text file, decompressed if necessary. Throws Error for a pipe, because
/// each rank reads the file.
std::string text_of(const std::string& file) {
  constexpr std::size_t kReadBytes = 1 << 20;
  const std::unique_ptr<ByteStream> stream = open_stream(file);
  std::string text;
  for (std::size_t end = 0, count = kReadBytes; count == kReadBytes; text.resize(end)) {
    text.resize(end + kReadBytes);
    count = stream->read(std::span(text).subspan(end));
    end += count;
  }
  return text;
}

/// Tokenizes the files one after another. Frees the text of a file before the next file is read.
data::TokenSourcePtr tokens_of_texts(const data::Tokenizer& tokenizer,
                                     const std::vector<std::string>& files) {
  std::vector<std::int64_t> tokens;
  for (const std::string& file : files) {
    const std::vector<std::int64_t> some = tokenizer.encode(text_of(file));
    tokens.insert(tokens.end(), some.begin(), some.end());
  }
  return data::make_token_source(tokens);
}

/// Returns the tokens that begin and end texts, read from the folder of --model or, without
/// --model, from the folder of --config.
SpecialTokens special_tokens(const TrainOptions& options, const Config& config) {
  const std::filesystem::path folder = options.model.empty()
                                           ? std::filesystem::path(options.config).parent_path()
                                           : std::filesystem::path(options.model);
  return read_special_tokens(folder, config);
}

std::vector<std::int64_t> end_tokens(const TrainOptions& options, const Config& config,
                                     data::TokenizerPtr tokenizer) {
  std::vector<std::int64_t> end;
  if (options.eos_token) {
    end = {*options.eos_token};
  } else {
    // By default, the end token is the same as in llama_tokenize.
    const std::string file = tokenizer_file(options.tokenizer, options.model);
    if (!tokenizer && !file.empty()) {
      tokenizer = data::open_tokenizer(file);
    }
    end = document_end(tokenizer.get(), special_tokens(options, config));
  }
  TESSERA_CHECK(
      !end.empty(), options.document_mask ? "--document-mask" : "--jsonl",
      ": neither the tokenizer nor the model's files define an end token; pass --eos-token ID");
  for (const std::int64_t token : end) {
    TESSERA_CHECK(token < config.vocab_size, "the end token has the id ", token,
                  ", but the model's vocabulary has ", config.vocab_size,
                  " tokens; pass a smaller --eos-token");
  }
  return end;
}

struct EdgeTokens {
  std::vector<std::int64_t> begin;
  std::vector<std::int64_t> end;
};

EdgeTokens edge_tokens(const TrainOptions& options, const Config& config,
                       const data::TokenizerPtr& tokenizer) {
  if (!options.jsonl.empty()) {
    list_files("--jsonl", options.jsonl);  // throws Error if a file is missing
    return {text_begin(*tokenizer, special_tokens(options, config)),
            end_tokens(options, config, tokenizer)};
  }
  if (options.document_mask) {
    return {{}, {end_tokens(options, config, tokenizer).back()}};
  }
  return {};
}

data::SampleSourcePtr open_prompts(const TrainOptions& options, const EdgeTokens& edges,
                                   const data::TokenizerPtr& tokenizer) {
  const std::vector<std::string> files = list_files("--jsonl", options.jsonl);
  DocumentReader reader(files, /*all_json=*/true);
  const data::JsonLines lines = [&]() -> std::optional<std::pair<std::string, std::string>> {
    std::optional<Piece> line = reader.next();
    if (!line) {
      return std::nullopt;
    }
    const PiecePlace& place = line->place;
    return std::pair(std::move(line->text), files[place.file] + ":" + std::to_string(place.line));
  };
  return data::prompt_completions(lines, *tokenizer, options.seq,
                                  {.prompt_field = options.prompt_field,
                                   .completion_field = options.completion_field,
                                   .begin = edges.begin,
                                   .end = edges.end,
                                   .truncate = options.truncate});
}

std::vector<data::WeightedSamples> open_samples(const TrainOptions& options, const Config& config,
                                                const EdgeTokens& edges,
                                                const data::TokenizerPtr& tokenizer) {
  const auto windows = [&](data::TokenSourcePtr tokens) {
    return data::token_windows(std::move(tokens), options.seq, config.vocab_size);
  };
  if (!options.jsonl.empty()) {
    return {{open_prompts(options, edges, tokenizer)}};
  }
  if (options.tokens.empty()) {
    return {{windows(tokens_of_texts(*tokenizer, options.text))}};
  }
  std::vector<data::WeightedSamples> sources;
  for (const std::vector<std::string>& files : token_files(options)) {
    const double weight = options.weights.empty() ? 1 : options.weights[sources.size()];
    sources.push_back({windows(data::open_token_shards(files)), weight});
  }
  return sources;
}

/// Returns the settings that determine the samples, except the data files.
Json samples_of(const TrainOptions& options, const EdgeTokens& edges) {
  Json result = Json::object();
  if (!edges.begin.empty()) {
    result["begin"] = edges.begin;
  }
  if (!edges.end.empty()) {
    result["end"] = edges.end;
  }
  if (options.document_mask) {
    result["document_mask"] = true;
  }
  if (!options.jsonl.empty()) {
    result["prompt"] = options.prompt_field;
    result["completion"] = options.completion_field;
    result["truncate"] = options.truncate;
  }
  return result;
}

/// The samples of a planned run: zeros for one step. The plan of a run does not depend on token
/// values.
class ZeroSamples final : public data::SampleSource {
 public:
  explicit ZeroSamples(const TrainOptions& options) : options_(options) {}
  std::int64_t size() const override { return options_.batch; }
  std::int64_t sequence() const override { return options_.seq; }
  void read(std::int64_t, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const override {
    std::ranges::fill(inputs, 0);
    std::ranges::fill(targets, 0);
  }
  bool ignores_targets() const override { return !options_.jsonl.empty(); }
  std::string description() const override { return "zeros"; }

 private:
  TrainOptions options_;
};

TrainingData planned_data(const TrainOptions& options, const Config& config) {
  data::BatchOptions batches{.batch = options.batch};
  if (options.document_mask) {
    // `document_end` is an id outside of the vocabulary, so each sample is one document.
    batches.document_end = config.vocab_size;
  }
  TrainingData data;
  data.loader = std::make_shared<data::BatchLoader>(
      std::vector<data::WeightedSamples>{{std::make_shared<ZeroSamples>(options)}}, batches);
  return data;
}

/// Returns the loader of held-out data. `flag`: the flag that names the data, for messages.
std::shared_ptr<const data::BatchLoader> held_out_loader(
    const char* flag, const TrainOptions& options, const Config& config,
    const data::BatchOptions& batches, const std::function<data::TokenSourcePtr()>& open) {
  try {
    const std::vector<data::WeightedSamples> samples = {
        {data::token_windows(open(), options.seq, config.vocab_size)}};
    return std::make_shared<data::BatchLoader>(samples, batches);
  } catch (const Error& error) {
    fail("the held-out data of ", flag, ": ", error.what());
  }
}

/// Returns the files' fingerprints as JSON: [{"name", "bytes", "sampled_crc32c"}].
Json to_json(const std::vector<data::FileFingerprint>& files) {
  Json list = Json::array();
  for (const data::FileFingerprint& file : files) {
    list.push_back({{"name", file.name}, {"bytes", file.bytes}, {"sampled_crc32c", file.sum}});
  }
  return list;
}

/// Returns the fingerprint of the tokenizer's first file. The field "beside" of the result lists
/// the fingerprints of the other files. Returns null for the byte tokenizer ("").
Json tokenizer_fingerprint(const std::string& tokenizer) {
  if (tokenizer.empty()) {
    return {};
  }
  Json files = to_json(data::fingerprints(data::tokenizer_files(tokenizer)));
  Json result = files[0];
  files.erase(0);
  result["beside"] = files;
  return result;
}

}  // namespace

std::string first_difference(const Json& saved, const Json& now, const std::string& at) {
  if (saved == now) {
    return "";
  }
  if (saved.is_object() && now.is_object()) {
    Json all = saved;
    all.update(now);
    for (const auto& [key, unused] : all.items()) {
      const std::string found = first_difference(saved.value(key, Json()), now.value(key, Json()),
                                                 at.empty() ? key : at + "." + key);
      if (!found.empty()) {
        return found;
      }
    }
  }
  if (saved.is_array() && now.is_array() && saved.size() == now.size()) {
    for (std::size_t i = 0; i < now.size(); ++i) {
      const bool has_name = now[i].is_object() && now[i].contains("name");
      const std::string index = has_name ? now[i].at("name").dump() : std::to_string(i);
      if (std::string found = first_difference(saved[i], now[i], at + "[" + index + "]");
          !found.empty()) {
        return found;
      }
    }
  }
  if (saved.is_array() && now.is_array() && saved.size() != now.size()) {
    return fmt::format("{} has {} entries instead of {}", at, now.size(), saved.size());
  }
  const auto text = [](const Json& value) {
    return value.is_null() ? std::string("left out") : value.dump();
  };
  return fmt::format("{} is {} instead of {}", at, text(now), text(saved));
}

TrainingData open_training_data(const TrainOptions& options, const Config& config) {
  if (options.planned) {
    return planned_data(options, config);
  }
  TrainingData data;
  if (!options.text.empty() || !options.jsonl.empty() || !options.eval_text.empty()) {
    // For a new model that trains on text, open_tokenizer() can return the byte tokenizer.
    const bool new_to_text = options.model.empty() && options.tokens.empty();
    data.tokenizer = open_tokenizer(options.tokenizer, options.model, config, new_to_text);
  }
  EdgeTokens edges;
  if (options.steps > 0 || options.document_mask) {
    edges = edge_tokens(options, config, data.tokenizer);
  }
  data::BatchOptions batches{.batch = options.batch};
  if (options.document_mask) {
    batches.document_end = edges.end.back();
  }
  if (!options.eval_text.empty()) {
    std::string text;
    for (const std::string& file : options.eval_text) {
      text += text_of(file);
    }
    data.eval_text = data::make_token_source(data.tokenizer->encode(text));
    data.eval_loader =
        held_out_loader("--eval-text", options, config, batches, [&] { return data.eval_text; });
  }
  if (!options.eval_tokens.empty()) {
    data.eval_loader = held_out_loader("--eval-tokens", options, config, batches, [&] {
      return data::open_token_shards(shards_of("--eval-tokens", options.eval_tokens));
    });
  }
  if (options.steps > 0) {
    data.samples = samples_of(options, edges);
    batches.shuffle = options.shuffle;
    data.loader = std::make_shared<data::BatchLoader>(
        open_samples(options, config, edges, data.tokenizer), batches);
  }
  return data;
}

Json data_fingerprint(const TrainOptions& options, const TrainingData& data) {
  Json result = {{"batch", options.batch}, {"sequence", options.seq}};
  if (options.shuffle) {
    result["shuffle"] = *options.shuffle;
  }
  result["samples"] = data.samples;
  if (!options.tokens.empty()) {
    const std::vector<std::vector<std::string>> sources = token_files(options);
    std::vector<std::string> all;
    for (const std::vector<std::string>& files : sources) {
      all.insert(all.end(), files.begin(), files.end());
    }
    for (std::size_t i = 0; i < options.weights.size(); ++i) {
      result["mixture"].push_back({{"files", sources[i].size()}, {"weight", options.weights[i]}});
    }
    result["files"] = to_json(data::fingerprints(all));
    return result;
  }
  result["files"] = to_json(data::fingerprints(
      options.text.empty() ? list_files("--jsonl", options.jsonl) : options.text));
  result["tokenizer"] = tokenizer_fingerprint(tokenizer_file(options.tokenizer, options.model));
  return result;
}

namespace {

/// Makes two fingerprints comparable: removes fields from `now` that older versions of llama_train
/// did not save, and converts `saved` to the current format.
void adapt_older_record(Json& saved, Json& now) {
  Json& samples = saved["samples"];
  samples = samples.is_null() ? Json::object() : samples;
  if (!samples.contains("end")) {
    now["samples"].erase("begin");
    if (samples.contains("eos_token")) {
      samples["end"] = Json::array({samples.at("eos_token")});
      samples.erase("eos_token");
    } else {
      now["samples"].erase("end");
    }
  }
}

}  // namespace

std::string data_change(Json saved, Json now) {
  adapt_older_record(saved, now);
  // A change between texts and token shards gets its own message. Only the fingerprint of texts has
  // the field "tokenizer".
  if (saved.contains("tokenizer") != now.contains("tokenizer")) {
    return now.contains("tokenizer") ? "text instead of tokens" : "tokens instead of text";
  }
  return first_difference(saved, now);
}

void check_same_data(const TrainOptions& options, const TrainingData& data, comm::World& world) {
  const std::vector<std::string> held_out = options.eval_text.empty()
                                                ? shards_of("--eval-tokens", options.eval_tokens)
                                                : options.eval_text;
  const Json own = {{"training", options.steps > 0 ? data_fingerprint(options, data) : Json()},
                    {"held-out", to_json(data::fingerprints(held_out))}};
  const std::vector<std::string> all = comm::texts_that_differ(*start_group(world), own.dump());
  if (all.empty()) {
    return;
  }
  const auto other = std::ranges::find_if(all, [&](auto& text) { return text != all.front(); });
  fail("the data of rank ", other - all.begin(), " differ from the data of rank 0: ",
       first_difference(Json::parse(all.front()), Json::parse(*other)),
       "; pass equal files to all ranks");
}

}  // namespace llama
