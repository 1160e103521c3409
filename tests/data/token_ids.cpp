// The program token_ids TOKENIZER TEXT..., for tests that compare with other libraries. Encodes
// files and decodes the tokens. Writes the ids to TEXT.ids (int64, native byte order), and the
// decoded text to TEXT.decoded.

#include <fstream>
#include <iostream>

#include "tessera/data/text.h"
#include "tessera/data/tokenizer.h"

namespace {

void encode_file(const tessera::data::Tokenizer& tokenizer, const std::string& path) {
  const auto ids = tokenizer.encode(tessera::data::read_text(path));
  std::ofstream(path + ".ids", std::ios::binary)
      .write(reinterpret_cast<const char*>(ids.data()),
             static_cast<std::streamsize>(ids.size() * sizeof(ids[0])));
  std::ofstream(path + ".decoded", std::ios::binary) << tokenizer.decode(ids);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 2) {
      std::cerr << "usage: token_ids TOKENIZER TEXT...\n";
      return 2;
    }
    const auto tokenizer = tessera::data::open_tokenizer(argv[1]);
    for (int i = 2; i < argc; ++i) {
      encode_file(*tokenizer, argv[i]);
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "token_ids: " << error.what() << '\n';
    return 1;
  }
}
