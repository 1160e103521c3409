#pragma once

#include <filesystem>

#include "bpe.h"
#include "tessera/data/detail/tokenizers.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// A token in a file next to the tokenizer.
struct NamedToken {
  std::optional<TokenId> id;  ///< the token's id; nullopt: the id of its text, or the next free id
  AddedToken token;           ///< the token; AddedToken::id is not set
};

/// The token that begins or ends a text.
struct TextEnd {
  std::optional<std::string> text;  ///< the token's text: bos_token or eos_token
  std::optional<bool> adds;  ///< whether texts get the token: add_bos_token or add_eos_token, or
                             ///< the default of the tokenizer's class
};

/// The contents of tokenizer_config.json. If tokenizer_config.json has no "added_tokens_decoder",
/// also the contents of special_tokens_map.json and added_tokens.json.
struct FilesBeside {
  std::vector<NamedToken> tokens;  ///< tokens of all files: first the tokens with ids, by id
  TextEnd begin, end;
  bool decides_ends = true;  ///< whether TextEnd::adds overrides the template of tokenizer.json
  bool legacy = true;  ///< SentencePiece: each part between special tokens gets a leading space
  /// add_prefix_space: whether a text gets a leading space. A SentencePiece tokenizer adds the
  /// space unless both `prefix` and `legacy` are false.
  std::optional<bool> prefix;
  std::vector<std::filesystem::path> read;  ///< the files that were read
};

/// Reads the files in the folder of a tokenizer's file. Throws Error for files of another form.
FilesBeside read_files_beside(const std::filesystem::path& tokenizer);

/// Whether the file exists. Throws Error for a broken link, as in a cleaned-up hub cache.
bool has_file(const std::filesystem::path& file);

/// Throws Error if the files next to the tokenizer give a token another id than `id`, or if `id` is
/// too large. `is_new`: the vocabulary lacks the token.
void check_id(const NamedToken& named, std::int64_t id, bool is_new);

/// hugging_face_tokenizer() and sentencepiece_tokenizer() with the contents of the files next to
/// the tokenizer. Both functions also throw Error if the files contradict the tokenizer.
TokenizerPtr json_tokenizer(const std::string& path, const FilesBeside& beside);
TokenizerPtr sentencepiece_tokenizer(const std::string& path, const FilesBeside& beside);

}  // namespace tessera::data
