#include "torchrun_only.h"

#include <CLI/CLI.hpp>

#include "settings.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

struct TorchrunOnly {
  const char* names;
  const char* variable;
  bool has_value;
  const char* advice;
};

constexpr TorchrunOnly kAll[] = {
    {"--module,-m", "PET_MODULE", false,
     "tessera-run starts programs: write python3 -m MODULE behind the options"},
    {"--run-path", "PET_RUN_PATH", false,
     "tessera-run starts programs: write python3 SCRIPT behind the options"},
    {"--rdzv-conf", "PET_RDZV_CONF", true,
     "ranks meet without such settings: leave it out, and give --timeout SECONDS for how long they "
     "wait"},
    {"--local-addr", "PET_LOCAL_ADDR", true,
     "ranks find this node's address by that of node 0: leave it out, or set GLOO_SOCKET_IFNAME to "
     "the network interface"},
    {"--signals-to-handle", "PET_SIGNALS_TO_HANDLE", true,
     "every signal that ends a job and SIGUSR1 and SIGUSR2 reach the ranks: leave it out"},
    {"--numa-binding", nullptr, true, "leave it out, and start the program by numactl"},
    {"--virtual-local-rank", "PET_VIRTUAL_LOCAL_RANK", false,
     "a rank takes the GPU of its LOCAL_RANK: leave it out"},
    {"--role", "PET_ROLE", true, "all ranks have one role: leave it out"},
    {"--event-log-handler", "PET_EVENT_LOG_HANDLER", true,
     "it names a part of Python's torch: leave it out"},
    {"--logs-specs", nullptr, true, "it names a part of Python's torch: leave it out"},
    {"--log-line-prefix-template", "PET_LOG_LINE_PREFIX_TEMPLATE", true,
     "the lines of a rank begin with [rank N]: leave it out"},
    {"--print-completion", nullptr, true, "leave it out; tessera-run --help lists the options"},
    {"--duplicate-stdout-filters", "PET_DUPLICATE_STDOUT_FILTERS", true,
     "leave it out, and search the files that --tee writes"},
    {"--duplicate-stderr-filters", "PET_DUPLICATE_STDERR_FILTERS", true,
     "leave it out, and search the files that --tee writes"},
};

std::string first_name(const TorchrunOnly& option) {
  const std::string names = option.names;
  return names.substr(0, names.find(','));
}

}  // namespace

void declare_torchrun_only(CLI::App& app) {
  for (const auto& option : kAll) {
    (option.has_value ? app.add_option(option.names) : app.add_flag(option.names))->group("");
  }
}

void refuse_torchrun_only(const CLI::App& app) {
  for (const auto& option : kAll) {
    const auto setting = option.has_value ? find_setting(app, first_name(option), option.variable)
                                          : find_switch(app, first_name(option), option.variable);
    TESSERA_CHECK(!setting, setting->text, " is torchrun's alone; ", option.advice);
  }
}

}  // namespace tessera::run
