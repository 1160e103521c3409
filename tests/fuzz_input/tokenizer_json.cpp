// A tokenizer.json, and a text for it.

#include "fuzz_input/input.h"
#include "tessera/data/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  const auto path = fuzz_input::write_input("tokenizer.json", fuzz_input::text_of(bytes, size));
  fuzz_input::parse_or_refuse([&] {
    const auto tokenizer = data::hugging_face_tokenizer(path);
    tokenizer->decode(tokenizer->encode("a bc  a<s>1\xc3"));
  });
  return 0;
}
