// A SentencePiece model, and a text for it.

#include "tessera/data/tokenizer.h"
#include "fuzz_input/input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  const auto path = fuzz_input::write_input("tokenizer.model", fuzz_input::text_of(bytes, size));
  fuzz_input::parse_or_refuse([&] {
    const auto tokenizer = data::sentencepiece_tokenizer(path);
    tokenizer->decode(tokenizer->encode("a bc a"));
  });
  return 0;
}
