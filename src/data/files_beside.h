#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bpe.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// A token in a file beside the tokenizer.
struct NamedToken {
  std::optional<TokenId> id;  ///< nullopt: the id of its text, or the next id
  AddedToken token;           ///< its id is not set
};

/// The contents of tokenizer_config.json and, if that has no "added_tokens_decoder", of
/// special_tokens_map.json and added_tokens.json.
struct FilesBeside {
  std::vector<NamedToken> tokens;    ///< first the tokens with ids, sorted
  std::optional<std::string> begin;  ///< the text of bos_token
  std::optional<std::string> end;    ///< the text of eos_token
  std::optional<bool> adds_begin;    ///< add_bos_token, or the default of the class
  std::optional<bool> adds_end;
  bool decides_ends = true;  ///< adds_begin and adds_end override tokenizer.json
  bool legacy = true;        ///< SentencePiece: each part between special tokens gets a space
  /// add_prefix_space: a text begins with a space. SentencePiece does unless it is false and not
  /// legacy.
  std::optional<bool> prefix;
  std::vector<std::filesystem::path> read;  ///< the files
};

/// Reads the folder of a tokenizer's file. Throws Error for files of another form.
FilesBeside read_files_beside(const std::filesystem::path& tokenizer);

/// Whether there is such a file. Throws Error for a link whose target is gone, as in a cache of the
/// hub that was cleaned.
bool has_file(const std::filesystem::path& file);

/// Adds the contents of the files beside a tokenizer to it. Throws Error if they contradict it.
void join_files_beside(BpeTokenizerParts& parts, const FilesBeside& beside);

/// hugging_face_tokenizer() and sentencepiece_tokenizer() with the files beside. Also throw Error
/// for contradictions.
TokenizerPtr json_tokenizer(const std::string& path, const FilesBeside& beside);
TokenizerPtr sentencepiece_tokenizer(const std::string& path, const FilesBeside& beside);

}  // namespace tessera::data
