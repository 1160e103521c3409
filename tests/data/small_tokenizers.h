// Functions that return the files of tokenizers with few tokens.

#pragma once

#include <cstring>
#include <nlohmann/json.hpp>

#include "tessera/data/detail/tokenizers.h"
#include "tessera/data/tokenizer.h"
#include "testing/files.h"

namespace tessera::testing {

/// Returns a byte-level tokenizer.json with the ids 0 to 6, and the id 7 for a special token.
inline nlohmann::json ByteLevelJson() {
  return nlohmann::json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 7, "content": "<s>", "single_word": false, "lstrip": false,
                      "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": " ?\\p{L}+|\\s+"}, "behavior": "Isolated",
       "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
              "ignore_merges": false,
              "vocab": {"a": 0, "b": 1, "c": 2, "Ġ": 3, "bc": 4, "ab": 5, "abc": 6},
              "merges": ["b c", ["a", "b"]]}})");
}

/// Returns a tokenizer.json whose tokens are characters: "▁" precedes words, and characters without
/// a token become bytes. <unk> has the id 0, <0x00> the id 1.
inline nlohmann::json ByteFallbackJson() {
  nlohmann::json json = nlohmann::json::parse(R"({
    "normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "▁"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    "pre_tokenizer": null,
    "decoder": {"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
      {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
              "vocab": {"<unk>": 0, "▁": 257, "a": 258, "b": 259, "▁a": 260, "▁▁": 261},
              "merges": ["▁ a", "▁ ▁"]}})");
  for (int byte = 0; byte < 256; ++byte) {
    constexpr const char* kDigits = "0123456789ABCDEF";
    const std::string name = std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">";
    json["model"]["vocab"][name] = 1 + byte;
  }
  return json;
}

/// Returns a file in tiktoken's format with the tokens a, b, ab and " ", and no special tokens.
inline std::string TiktokenLines() {
  return "YQ== 0\nYg== 1\nYWI= 2\nIA== 3\n";
}

inline data::TokenizerPtr Open(const nlohmann::json& json) {
  const TemporaryFolder folder;
  WriteFile(folder / "tokenizer.json", json.dump());
  return data::open_tokenizer(folder / "tokenizer.json");
}

}  // namespace tessera::testing

namespace tessera::data {

/// Returns a length-delimited protobuf field of at most 127 bytes.
inline std::string Field(char number, const std::string& bytes) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(bytes.size())} + bytes;
}

/// Returns a piece of a SentencePiece model. `type` is 1 (normal), 2 (unknown) or 3 (control).
inline std::string Piece(const std::string& piece, float score, char type) {
  std::string number(4, '\0');
  std::memcpy(number.data(), &score, 4);
  return Field(1, Field(1, piece) + '\x15' + number + '\x18' + type);
}

/// Returns a SentencePiece model with "▁a", "▁b" and "c". "▁" (\xe2\x96\x81) marks a word's begin.
inline std::string SmallModel() {
  const std::string mark = "\xe2\x96\x81";
  return Piece("<unk>", 0, 2) + Piece("<s>", 0, 3) + Piece("</s>", 0, 3) +
         Piece(mark + "a", -1, 1) + Piece(mark + "b", -2, 1) + Piece("c", -3, 1);
}

}  // namespace tessera::data
