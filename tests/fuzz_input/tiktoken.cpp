// Lines of tiktoken's form.

#include "fuzz_input/input.h"
#include "tessera/data/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  const auto path = fuzz_input::write_input("tokenizer.model", fuzz_input::text_of(bytes, size));
  fuzz_input::parse_or_refuse([&] { data::tiktoken_tokenizer(path); });
  return 0;
}
