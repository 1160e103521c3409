#include "record/record.h"

#include <cstdio>
#include <cstdlib>
#include <regex>
#include <sstream>
#include <stdexcept>

namespace fake_cuda {
namespace {

constexpr std::int64_t kDevices = 8;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::int64_t number_of(const char* name, std::int64_t otherwise) {
  const std::string text = variable(name);
  return text.empty() ? otherwise : std::stoll(text);
}

Faults parse_faults(const std::string& text, int rank) {
  static const std::regex form(
      "(malloc|malloc-above|nccl|lost|async|init|slow-end):([0-9]+)(@([0-9]+))?");
  Faults faults;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    std::smatch found;
    if (!std::regex_match(entry, found, form)) {
      throw std::invalid_argument("TESSERA_FAKE_CUDA_FAULT: " + entry +
                                  " is no fault of tests/fake_cuda/README.md with :NUMBER or "
                                  ":NUMBER@RANK, as in malloc:3@1");
    }
    if (!found[4].matched || std::stoi(found[4]) == rank) {
      faults[found[1]] = std::stoll(found[2]);
    }
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

Settings settings_or_end() {
  try {
    return read_settings();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fake CUDA: a setting is wrong: %s\n", error.what());
    std::exit(2);
  }
}

}  // namespace

std::optional<std::int64_t> Settings::fault(const std::string& kind) const {
  const auto found = faults.find(kind);
  return found == faults.end() ? std::nullopt : std::optional(found->second);
}

const Settings& settings() {
  // The settings are never destroyed, because libraries call the fake until the end of the process.
  static const auto* const once = new Settings(settings_or_end());
  return *once;
}

}  // namespace fake_cuda
