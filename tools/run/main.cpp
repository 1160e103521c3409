// tessera-run: starts the ranks of a job on this node and ends them together.

#include <exception>
#include <iostream>

#include "options.h"
#include "rank_process.h"
#include "supervisor.h"

int main(int argc, char** argv) {
  namespace run = tessera::run;
  try {
    const auto options = run::parse_options(argc, argv);
    return options ? run::Supervisor(*options).run() : 0;
  } catch (const run::CannotExecute& error) {
    std::cerr << "tessera-run: " << error.what() << '\n';
    return error.exit_code();
  } catch (const std::exception& error) {
    std::cerr << "tessera-run: " << error.what() << '\n';
    return 2;
  }
}
