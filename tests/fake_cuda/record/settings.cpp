#include "record/record.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string_view>

namespace fake_cuda {
namespace {

constexpr std::int64_t kDevices = 8;

struct FaultKind {
  std::string_view name;
  std::optional<std::int64_t> Faults::*member;
};

constexpr std::array<FaultKind, 7> kFaultKinds = {{{"malloc", &Faults::malloc},
                                                   {"malloc-above", &Faults::malloc_above},
                                                   {"nccl", &Faults::nccl},
                                                   {"lost", &Faults::lost},
                                                   {"async", &Faults::async},
                                                   {"init", &Faults::init},
                                                   {"slow-end", &Faults::slow_end}}};

/// A wrong setting must not run like no setting.
[[noreturn]] void refuse(const std::string& setting) {
  std::fprintf(stderr, "fake CUDA: %s, see tests/fake_cuda/README.md\n", setting.c_str());
  std::exit(2);
}

std::optional<std::int64_t> to_number(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = error == std::errc{} && end == text.data() + text.size();
  return whole ? std::optional(number) : std::nullopt;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::int64_t number_of(const char* name, std::int64_t otherwise) {
  const std::string text = variable(name);
  if (text.empty()) {
    return otherwise;
  }
  const std::optional<std::int64_t> number = to_number(text);
  if (!number) {
    refuse(std::string(name) + "=" + text + " is not a number");
  }
  return *number;
}

void parse_fault(const std::string& entry, int rank, Faults& faults) {
  const std::string_view text = entry;
  const std::size_t colon = text.find(':');
  const std::size_t at = text.find('@');
  if (colon != text.npos) {
    const auto number = to_number(text.substr(colon + 1, at == text.npos ? at : at - colon - 1));
    const auto of_rank = at == text.npos ? rank : to_number(text.substr(at + 1));
    for (const FaultKind& kind : kFaultKinds) {
      if (kind.name == text.substr(0, colon) && number && of_rank) {
        if (*of_rank == rank) {
          faults.*kind.member = number;
        }
        return;
      }
    }
  }
  refuse("TESSERA_FAKE_CUDA_FAULT: " + entry + " is no fault");
}

Faults parse_faults(const std::string& text, int rank) {
  Faults faults;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    parse_fault(entry, rank, faults);
  }
  return faults;
}

Settings read_settings() {
  const auto rank = static_cast<int>(number_of("RANK", 0));
  return {.rank = rank,
          .report = variable("TESSERA_FAKE_CUDA_REPORT"),
          .devices = static_cast<int>(number_of("TESSERA_FAKE_CUDA_DEVICES", kDevices)),
          .faults = parse_faults(variable("TESSERA_FAKE_CUDA_FAULT"), rank)};
}

}  // namespace

const Settings& settings() {
  // Never destroyed: other libraries call in until the very end of the process.
  static const auto* const once = new Settings(read_settings());
  return *once;
}

}  // namespace fake_cuda
