#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bpe.h"
#include "tessera/data/detail/tokenizers.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// A token in a file next to the tokenizer.
struct NamedToken {
  std::optional<TokenId> id;  ///< nullopt: the id of its text, or the next free id
  AddedToken token;           ///< the token; AddedToken::id is not set
};

/// The contents of tokenizer_config.json; if it has no "added_tokens_decoder", also those of
/// special_tokens_map.json and added_tokens.json.
struct FilesBeside {
  std::vector<NamedToken> tokens;    ///< tokens of all files; those with ids come first, sorted
  std::optional<std::string> begin;  ///< the text of bos_token
  std::optional<std::string> end;    ///< the text of eos_token
  std::optional<bool> adds_begin;    ///< value of add_bos_token, or the class's default
  std::optional<bool> adds_end;
  bool decides_ends = true;  ///< adds_begin and adds_end override tokenizer.json
  bool legacy = true;        ///< SentencePiece: each part between special tokens gets a space
  /// add_prefix_space: whether a text is given a leading space. SentencePiece adds it unless this
  /// is false and legacy is false.
  std::optional<bool> prefix;
  std::vector<std::filesystem::path> read;  ///< the files that were read
};

/// Reads the files in the folder of a tokenizer's file. Throws Error for files of another form.
FilesBeside read_files_beside(const std::filesystem::path& tokenizer);

/// Whether the file exists. Throws Error for a broken link, as in a cleaned-up hub cache.
bool has_file(const std::filesystem::path& file);

/// Adds the contents of the files next to a tokenizer to the tokenizer. Throws Error if they
/// contradict it.
void join_files_beside(BpeTokenizerParts& parts, const FilesBeside& beside);

/// Like hugging_face_tokenizer() and sentencepiece_tokenizer(), with the files next to the
/// tokenizer. Also throw Error if they contradict the tokenizer.
TokenizerPtr json_tokenizer(const std::string& path, const FilesBeside& beside);
TokenizerPtr sentencepiece_tokenizer(const std::string& path, const FilesBeside& beside);

}  // namespace tessera::data
