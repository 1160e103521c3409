// Encodes files and decodes them again, for tests that compare with other libraries:
//   token_ids TOKENIZER TEXT...
// writes TEXT.ids, int64 in the machine's order, and TEXT.decoded;
//   token_ids --chat TOKENIZER LINES
// writes of each line of JSON with messages one with what the chat template makes of it.

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tessera/data/chat_template.h"
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

void render_lines(const std::string& tokenizer, const std::string& path) {
  const auto chat = tessera::data::open_chat_template(tokenizer);
  std::ifstream lines(path);
  std::string line;
  while (std::getline(lines, line)) {
    const auto [text, learnt] = chat->conversation(line, path);
    std::cout << nlohmann::json{{"prompt", chat->prompt(line, path)},
                                {"text", text},
                                {"learnt", learnt}}
              << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 2) {
      std::cerr << "usage: token_ids TOKENIZER TEXT...\n";
      return 2;
    }
    if (argc == 4 && std::string_view(argv[1]) == "--chat") {
      render_lines(argv[2], argv[3]);
      return 0;
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
