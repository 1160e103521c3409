#include "place.h"

#include <CLI/CLI.hpp>

#include "settings.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

// torchrun's, of its two rendezvous back ends.
constexpr int kC10dPort = 29400;
constexpr int kStaticPort = 29500;
constexpr int kMostNodes = 1'000'000;

// A number, or torchrun's range of an elastic job, LEAST:MOST.
void read_nnodes(const CLI::App& app, Place& place) {
  const auto setting = find_setting(app, "--nnodes", "PET_NNODES");
  if (!setting) {
    return;
  }
  const std::string& value = setting->value;
  const auto colon = value.find(':');
  const std::string most = colon == std::string::npos ? value : value.substr(colon + 1);
  place.nnodes = integer_of({most, setting->text}, 1, kMostNodes);
  place.min_nodes = integer_of({value.substr(0, colon), setting->text}, 1, kMostNodes);
  TESSERA_CHECK(place.min_nodes <= place.nnodes, setting->text,
                " has more nodes at least than at most: write LEAST:MOST");
}

// "static" where none is given, as with torchrun.
bool is_c10d(const CLI::App& app) {
  const auto setting = find_setting(app, "--rdzv-backend", "PET_RDZV_BACKEND");
  TESSERA_CHECK(!setting || setting->value == "static" || setting->value == "c10d", setting->text,
                " is no way to meet here: give static or c10d, with a port of node 0 in --rdzv");
  return setting && setting->value == "c10d";
}

std::optional<int> read_node_rank(const CLI::App& app, int nnodes) {
  const auto setting = find_setting(app, "--node-rank", "PET_NODE_RANK");
  if (!setting) {
    return nnodes > 1 && is_c10d(app) ? std::nullopt : std::optional(0);
  }
  return integer_of(*setting, 0, nnodes - 1);
}

std::string without_brackets(std::string host) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return host;
}

// HOST:PORT, where an IPv6 address stands in brackets. Port 0, the system's choice, is one that no
// other node would know.
void set_endpoint(Place& place, const Setting& setting, std::optional<int> default_port) {
  const std::string& address = setting.value;
  const auto colon = address.ends_with(']') ? std::string::npos : address.rfind(':');
  TESSERA_CHECK(colon != 0 && !address.empty(), setting.text, " names no host: write HOST:PORT");
  TESSERA_CHECK(colon != std::string::npos || default_port, setting.text,
                " names no port: write HOST:PORT");
  place.host = without_brackets(address.substr(0, colon));
  if (colon == std::string::npos) {
    place.port = *default_port;
    return;
  }
  try {
    place.port = integer_of({address.substr(colon + 1), ""}, place.nnodes == 1 ? 0 : 1, 65535);
  } catch (const Error&) {
    fail(setting.text, " has no port from 1 to 65535 after the colon");
  }
}

}  // namespace

void declare_place(CLI::App& app) {
  app.add_option("--nnodes", "Nodes of the job (1), or LEAST:MOST of them")->option_text("M");
  app.add_option("--node-rank", "Which of the nodes this one is, from 0")->option_text("R");
  app.add_option("--rdzv,--rdzv-endpoint", "Where the ranks meet: a free port of node 0")
      ->option_text("HOST:PORT");
  app.add_option("--master-addr", "The host of --rdzv alone")->option_text("HOST");
  app.add_option("--master-port", "The port of --rdzv alone (29500, with --master-addr)")
      ->option_text("PORT");
  app.add_option("--rdzv-backend", "static or c10d, which are one here")->option_text("NAME");
  app.add_option("--rdzv-conf",
                 "last_call_timeout=S: how long a job waits for more than the least of its nodes "
                 "(30); join_timeout=S: for these (--timeout)")
      ->option_text("KEY=S,...");
  app.add_option("--rdzv-id", "A name of the job that all its nodes are given")->option_text("ID");
  // With the text as an argument g++ finds two functions.
  app.add_flag("--standalone")
      ->description("A job of this node alone, whatever else is said of where to meet");
}

Place read_place(const CLI::App& app) {
  Place place;
  read_nnodes(app, place);
  const bool c10d = is_c10d(app);
  if (const auto standalone = find_switch(app, "--standalone", "PET_STANDALONE")) {
    TESSERA_CHECK(place.nnodes == 1, standalone->text, " is for one node, but --nnodes is ",
                  place.nnodes, ": leave one of them out");
    return place;
  }
  place.node_rank = read_node_rank(app, place.nnodes);
  const auto address = find_setting(app, "--master-addr", "PET_MASTER_ADDR");
  const auto port = find_setting(app, "--master-port", "PET_MASTER_PORT");
  if (const auto endpoint = find_setting(app, "--rdzv", "PET_RDZV_ENDPOINT")) {
    set_endpoint(place, *endpoint, c10d ? std::optional(kC10dPort) : std::nullopt);
  } else if (address || port) {
    TESSERA_CHECK(!address || !address->value.empty(), "--master-addr names no host: it is empty");
    place.host = address ? without_brackets(address->value) : place.host;
    place.port = port ? integer_of(*port, place.nnodes == 1 ? 0 : 1, 65535) : kStaticPort;
  } else {
    TESSERA_CHECK(place.nnodes == 1, "--nnodes ", place.nnodes,
                  " needs --rdzv HOST:PORT, a port of node 0 that every node can reach");
  }
  return place;
}

}  // namespace tessera::run
