// manifest.json, without its checksum, which no mutation would meet: it is added here.

#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <cstdlib>
#include <span>

#include "fuzz_input/input.h"
#include "tessera/core/detail/crc32c.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  std::string text = fuzz_input::text_of(bytes, size);
  const std::uint32_t sum = detail::crc32c(std::as_bytes(std::span(text)));
  text += fmt::format(",\"crc32c\":\"{:08x}\"}}\n", sum);
  fuzz_input::parse_or_refuse([&] {
    const std::string again = to_text(checkpoint::parse_manifest(text, "manifest.json"));
    // What is written of it says the same.
    if (to_text(checkpoint::parse_manifest(again, "manifest.json")) != again) {
      std::abort();
    }
  });
  return 0;
}
