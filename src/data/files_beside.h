#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bpe.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// A token that a file beside the tokenizer's names.
struct NamedToken {
  std::optional<TokenId> id;  ///< none: that of its text, or the next
  AddedToken token;           ///< its id is not set
};

/// What transformers reads beside a tokenizer's file: tokenizer_config.json and, where that has no
/// "added_tokens_decoder", special_tokens_map.json and added_tokens.json.
struct FilesBeside {
  std::vector<NamedToken> tokens;    ///< those with ids first, by these
  std::optional<std::string> begin;  ///< the text of bos_token
  std::optional<std::string> end;    ///< that of eos_token
  std::optional<bool> adds_begin;    ///< add_bos_token, or what the class takes for it
  std::optional<bool> adds_end;
  bool decides_ends = true;  ///< adds_begin and adds_end win over what the tokenizer's file says
  bool legacy = true;        ///< for SentencePiece: each part between special tokens gets a space
  /// add_prefix_space: a text begins with a space. SentencePiece does unless it is false and not
  /// legacy.
  std::optional<bool> prefix;
  std::vector<std::filesystem::path> read;  ///< the files that were
};

/// Reads the folder that a tokenizer's file is in. Throws Error for files that can't be read so.
FilesBeside read_files_beside(const std::filesystem::path& tokenizer);

/// Whether there is such a file. Throws Error for a link whose target is gone, as in a cache of the
/// hub that was cleaned.
bool has_file(const std::filesystem::path& file);

/// Adds the contents of the files beside a tokenizer to it. Throws Error if they contradict it.
void join_files_beside(BpeTokenizerParts& parts, const FilesBeside& beside);

/// hugging_face_tokenizer() with what is beside the file. Throws Error too where the two contradict
/// each other.
TokenizerPtr json_tokenizer(const std::string& path, const FilesBeside& beside);
/// The same of sentencepiece_tokenizer().
TokenizerPtr sentencepiece_tokenizer(const std::string& path, const FilesBeside& beside);

}  // namespace tessera::data
