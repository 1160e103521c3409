// model.safetensors.index.json, beside two shards that are valid.

#include "checkpoint/model_files.h"
#include "fuzz_input/input.h"
#include "fuzz_input/samples.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  static const bool written = (fuzz_input::write_shards(fuzz_input::own_folder()), true);
  static_cast<void>(written);
  fuzz_input::write_input(checkpoint::kIndexFile, fuzz_input::text_of(bytes, size));
  fuzz_input::parse_or_refuse([] { const checkpoint::ModelFiles files(fuzz_input::own_folder()); });
  return 0;
}
