// Encoding on one thread: bench_tokenizer TOKENIZER TEXT ROUNDS prints, a line a round, MB for each
// second of the processor, which other work on the machine hardly changes, and the number of
// tokens. bench_tokenizer.py runs it beside the `tokenizers` package.

#include <cstdlib>
#include <ctime>
#include <iostream>

#include "tessera/core/error.h"
#include "tessera/data/text.h"
#include "tessera/data/tokenizer.h"

namespace {

void run(int argc, char** argv) {
  TESSERA_CHECK(argc == 4, "usage: bench_tokenizer TOKENIZER TEXT ROUNDS");
  const auto tokenizer = tessera::data::open_tokenizer(argv[1]);
  const std::string text = tessera::data::read_text(argv[2]);
  for (int round = 0; round < std::atoi(argv[3]); ++round) {
    const std::clock_t start = std::clock();
    const std::size_t count = tokenizer->encode(text).size();
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    std::cout << static_cast<double>(text.size()) / 1e6 / seconds << ' ' << count << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_tokenizer: " << error.what() << '\n';
    return 1;
  }
}
