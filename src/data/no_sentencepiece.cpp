#include "tessera/core/error.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

TokenizerPtr sentencepiece_tokenizer(const std::string& path) {
  fail("cannot read the tokenizer '", path,
       "': Tessera was built without SentencePiece: install libsentencepiece-dev and build again");
}

}  // namespace tessera::data
