#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <iostream>
#include <memory>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera::run {
namespace {

constexpr int kMostRanks = 4096;

class Help : public CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: tessera-run --nproc N [--nnodes M --node-rank R --rdzv HOST:PORT] -- PROGRAM "
           "ARGS...\n";
  }
};

// HOST:PORT, where an IPv6 address stands in brackets.
void set_rendezvous(Options& options, std::string_view address) {
  const auto colon = address.rfind(':');
  TESSERA_CHECK(colon != std::string_view::npos && colon > 0, "--rdzv ", address,
                " names no port: write HOST:PORT");
  const auto digits = address.substr(colon + 1);
  const auto* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, options.port);
  TESSERA_CHECK(error == std::errc() && stop == end && options.port > 0 && options.port < 65536,
                "--rdzv ", address, " has no port from 1 to 65535 after the colon");
  auto host = address.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  options.host = host;
}

void check(const Options& options, bool rendezvous_given) {
  TESSERA_CHECK(options.nproc != 0, "--nproc is missing: give the number of ranks on this node");
  TESSERA_CHECK(options.nproc >= 1 && options.nproc <= kMostRanks, "--nproc ", options.nproc,
                " is out of range: give the number of ranks on this node, 1 to ", kMostRanks);
  TESSERA_CHECK(options.nnodes >= 1, "--nnodes ", options.nnodes, " is out of range: at least 1");
  TESSERA_CHECK(options.node_rank >= 0 && options.node_rank < options.nnodes, "--node-rank ",
                options.node_rank, " is out of range: 0 to ", options.nnodes - 1, " with --nnodes ",
                options.nnodes);
  TESSERA_CHECK(options.nnodes == 1 || rendezvous_given, "--nnodes ", options.nnodes,
                " needs --rdzv HOST:PORT, a port of node 0 that every node can reach");
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv) {
  const auto* const* last = argv + argc;
  const auto* const* separator =
      std::find_if(argv, last, [](std::string_view word) { return word == "--"; });

  Options options;
  std::string rendezvous;
  CLI::App app("Runs PROGRAM as the ranks of one job and ends them all when one fails.",
               "tessera-run");
  app.formatter(std::make_shared<Help>());
  app.add_option("--nproc", options.nproc, "Ranks to start on this node");
  app.add_option("--nnodes", options.nnodes, "Nodes of the job");
  app.add_option("--node-rank", options.node_rank, "Which of the nodes this one is, from 0");
  app.add_option("--rdzv", rendezvous, "Where the ranks meet: a free port of node 0");
  try {
    app.parse(static_cast<int>(separator - argv), argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    fail(error.what(), " (tessera-run --help lists the options)");
  }
  TESSERA_CHECK(last - separator >= 2, "no program was given: tessera-run --nproc ", options.nproc,
                " -- PROGRAM ARGS...");
  options.program.assign(separator + 1, last);
  if (!rendezvous.empty()) {
    set_rendezvous(options, rendezvous);
  }
  check(options, !rendezvous.empty());
  return options;
}

}  // namespace tessera::run
