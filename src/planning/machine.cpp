// Known machines, from the vendors' public data sheets, and machines described in TOML files.

#include "tessera/planning/machine.h"

#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::planning {
namespace {

/// The known machines. FLOP/s are for dense matrix products, link rates for one direction. Network
/// rates are for eight GPUs with one network card each. The `..._share` fields have their defaults,
/// measured on an H200.
const std::vector<Machine>& presets() {
  static const std::vector<Machine> list = [] {
    const auto gpu = [](const char* name, double memory, double fp8, double half, double fp32,
                        double bandwidth, double link, double network, double multiprocessors) {
      return Machine{.name = name,
                     .memory_bytes = memory,
                     .flops_half = half,
                     .flops_fp32 = fp32,
                     .memory_bandwidth = bandwidth,
                     .link_bandwidth = link,
                     .network_bandwidth = network,
                     .flops_fp8 = fp8,
                     .multiprocessors = multiprocessors};
    };
    return std::vector<Machine>{
        // NVIDIA A100 80GB SXM; DGX A100: 200 Gb/s per GPU.
        gpu("a100", 80e9, 0, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 108),
        // NVIDIA H100 SXM; DGX H100: 400 Gb/s per GPU.
        gpu("h100", 80e9, 1979e12, 989e12, 67e12, 3.35e12, 450e9, 50e9, 132),
        // NVIDIA H200 SXM; DGX H200: 400 Gb/s per GPU.
        gpu("h200", 141e9, 1979e12, 989e12, 67e12, 4.8e12, 450e9, 50e9, 132),
        // NVIDIA DGX B200 (eight GPUs have 1,440 GB, 64 TB/s, and 14.4 TB/s of NVLink), 400 Gb/s
        // per GPU.
        gpu("b200", 180e9, 4500e12, 2250e12, 75e12, 8e12, 900e9, 50e9, 148),
        // NVIDIA L40S: PCIe 4.0 x16, no NVLink; 200 Gb/s per GPU.
        gpu("l40s", 48e9, 733e12, 362e12, 91.6e12, 0.864e12, 32e9, 25e9, 142),
        // AMD Instinct MI300X: seven links of 64 GB/s; 400 Gb/s per GPU; its multiprocessors are
        // called compute units.
        gpu("mi300x", 192e9, 2615e12, 1307e12, 163.4e12, 5.3e12, 448e9, 50e9, 304)};
  }();
  return list;
}

/// The upper limit of values in bytes, above any real machine. The limit keeps computations finite.
constexpr double kMostBytes = 1e18;
constexpr std::uint64_t kMostFileBytes = 1 << 20;
constexpr std::int64_t kMostOfANode = 1 << 20;

struct Field {
  const char* name;
  double Machine::*value;
};
constexpr std::array kFields{
    Field{"memory_bytes", &Machine::memory_bytes},
    Field{"reserved_bytes", &Machine::reserved_bytes},
    Field{"flops_half", &Machine::flops_half},
    Field{"flops_fp32", &Machine::flops_fp32},
    Field{"product_share", &Machine::product_share},
    Field{"attention_share", &Machine::attention_share},
    Field{"attention_share_64", &Machine::attention_share_64},
    Field{"memory_bandwidth", &Machine::memory_bandwidth},
    Field{"memory_share", &Machine::memory_share},
    Field{"operator_latency_s", &Machine::operator_latency_s},
    Field{"link_bandwidth", &Machine::link_bandwidth},
    Field{"network_bandwidth", &Machine::network_bandwidth},
    Field{"network_share", &Machine::network_share},
    Field{"link_latency_s", &Machine::link_latency_s},
    Field{"network_latency_s", &Machine::network_latency_s},
    Field{"flops_fp8", &Machine::flops_fp8},
    Field{"fp8_share", &Machine::fp8_share},
    Field{"multiprocessors", &Machine::multiprocessors},
    Field{"collective_multiprocessors", &Machine::collective_multiprocessors}};
/// The fields of Machine that may be 0, in addition to all latencies.
constexpr std::array<std::string_view, 5> kMayBeZero{
    "reserved_bytes", "flops_fp8", "fp8_share", "multiprocessors", "collective_multiprocessors"};

const Machine* preset(const std::string& name) {
  const auto found = std::ranges::find(presets(), name, &Machine::name);
  return found == presets().end() ? nullptr : &*found;
}

std::string known_names() {
  std::string names;
  for (const Machine& machine : presets()) {
    names += (names.empty() ? "" : ", ") + machine.name;
  }
  return names;
}

bool is_share(std::string_view key) {
  return key.ends_with("_share") || key == "attention_share_64";
}

double positive(const toml::node& node, const std::string& key, const std::string& file) {
  const auto number = node.value<double>();
  TESSERA_CHECK(number && *number >= 0 && std::isfinite(*number), file, ": \"", key,
                "\" must be a finite number of at least 0");
  TESSERA_CHECK(!is_share(key) || *number <= 1, file, ": \"", key, "\" is ", *number,
                ", but a share is at most 1: write 0.7 for 70 %");
  TESSERA_CHECK(!key.ends_with("_bytes") || *number <= kMostBytes, file, ": \"", key, "\" is ",
                *number, " bytes; write at most ", kMostBytes);
  return *number;
}

std::int64_t whole(const toml::node& node, const std::string& key, const std::string& file) {
  const auto number = node.value<double>();
  TESSERA_CHECK(number && *number == std::floor(*number) && *number >= 1 && *number <= kMostOfANode,
                file, ": \"", key, "\" must be a whole number from 1 to ", kMostOfANode);
  return static_cast<std::int64_t>(*number);
}

void set_field(Machine& machine, const std::string& key, const toml::node& node,
               const std::string& file) {
  if (key == "name" || key == "like" || key == "shares_from") {
    TESSERA_CHECK(!node.value_or(std::string()).empty(), file, ": \"", key, "\" must be a name");
    return;
  }
  if (key == "ranks_per_node") {
    machine.ranks_per_node = whole(node, key, file);
    return;
  }
  const auto* const field =
      std::ranges::find(kFields, key, [](const Field& f) -> std::string { return f.name; });
  if (field == kFields.end()) {
    std::vector<std::string> names{"name", "like", "shares_from", "ranks_per_node"};
    for (const Field& known : kFields) {
      names.emplace_back(known.name);
    }
    fail(file, ": unknown key \"", key, "\"; did you mean ", nearest(key, names), "?");
  }
  machine.*field->value = positive(node, key, file);
  if (is_share(key)) {
    machine.shares_from += ", " + key + " of " + file;
  }
}

toml::table read_table(const std::string& file, const std::string& asked) {
  try {
    return toml::parse(files::read_file(file, asked, kMostFileBytes), file);
  } catch (const Error& error) {
    fail("can't read ", asked, " ", file, ": ", error.what());
  } catch (const toml::parse_error& error) {
    fail("can't read ", asked, " ", file, ": ", error.description(), " (line ",
         error.source().begin.line, ")");
  }
}

void check_complete(const Machine& machine, const std::string& file) {
  for (const Field& field : kFields) {
    const std::string_view name = field.name;
    const bool may_be_zero =
        name.ends_with("latency_s") || std::ranges::find(kMayBeZero, name) != kMayBeZero.end();
    TESSERA_CHECK(may_be_zero || machine.*field.value > 0, file, ": \"", field.name,
                  "\" is missing; add it, or start from a known machine: like = \"h200\"");
  }
  TESSERA_CHECK(machine.room() > 0, file, ": \"memory_bytes\" is ", machine.memory_bytes,
                ", but \"reserved_bytes\" is ", machine.reserved_bytes,
                ", which leaves no memory for tensors; raise memory_bytes or lower reserved_bytes");
  TESSERA_CHECK(
      machine.multiprocessors == 0 || machine.collective_multiprocessors < machine.multiprocessors,
      file, ": \"collective_multiprocessors\" is ", machine.collective_multiprocessors,
      ", which leaves none of the ", machine.multiprocessors,
      " \"multiprocessors\" for computing; write a smaller number");
}

Machine read_machine(const std::string& file, const std::string& asked) {
  const toml::table table = read_table(file, asked);
  Machine machine;
  if (const auto like = table["like"].value<std::string>()) {
    const Machine* known = preset(*like);
    TESSERA_CHECK(known != nullptr, file, ": like = \"", *like,
                  "\" is not a known machine; write one of ", known_names());
    machine = *known;
  }
  machine.name = table["name"].value_or(file);
  for (const auto& [key, node] : table) {
    set_field(machine, std::string(key.str()), node, file);
  }
  machine.shares_from = table["shares_from"].value_or(machine.shares_from);
  check_complete(machine, file);
  return machine;
}

}  // namespace

double Machine::peak_flops(c10::ScalarType type) const {
  if (c10::elementSize(type) == 1 && flops_fp8 > 0) {
    return flops_fp8;
  }
  return c10::elementSize(type) <= 2 ? flops_half : flops_fp32;
}

double Machine::product_flops(c10::ScalarType type) const {
  if (c10::elementSize(type) > 1) {
    return peak_flops(type) * product_share;
  }
  return fp8_share > 0 && flops_fp8 > 0 ? flops_fp8 * fp8_share : flops_half * product_share;
}

double Machine::attention_flops(c10::ScalarType type, std::int64_t head_size) const {
  return peak_flops(type) * (head_size <= 64 ? attention_share_64 : attention_share);
}

Machine machine_of(const std::string& name, const std::string& asked) {
  if (const Machine* known = preset(name)) {
    return *known;
  }
  TESSERA_CHECK(name.ends_with(".toml"), asked, " ", name, " is not known; pass ", known_names(),
                ", or a file NAME.toml that describes a machine");
  return read_machine(name, asked);
}

}  // namespace tessera::planning
