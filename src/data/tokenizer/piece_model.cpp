// How libtessera_sentencepiece.so is loaded: once, at the first model.

#include "tokenizer/piece_model.h"

#include <dlfcn.h>

#include "tessera/core/detail/library_beside.h"
#include "tessera/core/error.h"
#include "tessera/version.h"

namespace tessera::data {
namespace {

constexpr auto kLibrary = "libtessera_sentencepiece.so." TESSERA_SOVERSION;

/// SentencePiece is to find its own names before those of the process, which AddressSanitizer
/// refuses.
int scope_of_names() {
  const bool sanitized = dlsym(RTLD_DEFAULT, "__asan_init") != nullptr;
  return sanitized ? RTLD_LOCAL : RTLD_LOCAL | RTLD_DEEPBIND;
}

LoadPieceModel load_library() {
  const std::string path =
      detail::library_beside(reinterpret_cast<const void*>(&load_library), kLibrary);
  // Never unloaded: models that it made live as long as the program likes.
  void* const library = dlopen(path.c_str(), RTLD_NOW | scope_of_names());
  TESSERA_CHECK(library != nullptr, "a SentencePiece model (tokenizer.model) was given, but ",
                kLibrary, " cannot be loaded: ", dlerror(),
                "; install libsentencepiece-dev and build Tessera again");
  const auto function = reinterpret_cast<LoadPieceModel>(dlsym(library, kLoadPieceModel));
  TESSERA_CHECK(function != nullptr, path,
                " is of another version of Tessera; install both from one build");
  return function;
}

}  // namespace

std::unique_ptr<PieceModel> load_piece_model(const std::string& model, std::string& fault) {
  // If loading throws, the next call tries again.
  static const LoadPieceModel load = load_library();
  return std::unique_ptr<PieceModel>(load(model, fault));
}

}  // namespace tessera::data
