#include "tessera/planning/report.h"
#include "tessera/observe/detail/memory.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tessera/observe/detail/metrics_output.h"
#include "tessera/observe/metrics.h"

namespace tessera::planning {

namespace {

/// Formats a size for tables: "61.2 GiB".
std::string size_text(std::int64_t bytes) {
  return observe::bytes_text(static_cast<double>(bytes));
}

/// Formats a time for tables: "14.982 s", or "1.802 ms" for short times.
std::string seconds_text(double seconds) {
  return seconds < 0.01 && seconds > 0 ? fmt::format("{:.3f} ms", 1e3 * seconds)
                                       : fmt::format("{:.3f} s", seconds);
}

using Json = nlohmann::ordered_json;

std::string column(bool shown, const std::string& text) {
  return shown ? fmt::format(" {:>4}", text) : "";
}

std::string row(const FoundLayout& found, bool has_cp, bool has_accumulation) {
  const TrainingLayout& layout = found.layout;
  const observe::StepMetrics& metrics = found.estimate.metrics;
  return fmt::format("{} {:>5} {:>4}{}  {:<12} {:>4}{} {:>12} {:>11} {:>11} {:>7} {:>13}\n",
                     found.frontier ? '*' : ' ', layout.dp, layout.tp,
                     column(has_cp, std::to_string(layout.cp)), layout.ac, layout.zero,
                     column(has_accumulation, std::to_string(layout.accumulate)),
                     size_text(found.estimate.peak_bytes),
                     found.fits ? seconds_text(metrics.step_time_s) : "too large",
                     found.fits ? seconds_text(found.estimate.exposed_s) : "",
                     found.fits ? fmt::format("{:.1f} %", metrics.mfu.value_or(0)) : "",
                     found.fits ? fmt::format("{:.0f}", metrics.tokens_per_s) : "");
}

std::string heading(const Search& search) {
  const auto fit = std::ranges::count_if(search.found, &FoundLayout::fits);
  const std::string room =
      fmt::format("the {} that tensors can have of a {}", size_text(search.space.machine.room()),
                  search.space.machine.name);
  const std::string batch = fmt::format(
      "{} ranks, batch {}{}", search.space.ranks, search.space.batch,
      search.space.sequence > 0 ? fmt::format(", sequences of {}", search.space.sequence) : "");
  return fit == 0
             ? fmt::format("{}: no layout fits {}; the least is {}.\n", batch, room,
                           size_text(search.best().estimate.peak_bytes))
             : fmt::format("{}: {} of {} layouts fit {}.\n", batch, fit,
                           search.found.size() + static_cast<std::size_t>(search.skipped), room);
}

Json json_of(const TrainingLayout& layout) {
  return {{"dp", layout.dp}, {"tp", layout.tp},     {"cp", layout.cp},
          {"ac", layout.ac}, {"zero", layout.zero}, {"accumulate", layout.accumulate}};
}

Json json_of(const FoundLayout& found) {
  const Estimate& estimate = found.estimate;
  Json json = json_of(found.layout);
  json.update({{"peak_bytes", estimate.peak_bytes},
               {"peak_moment", estimate.peak_moment},
               {"step_time_s", estimate.metrics.step_time_s},
               {"exposed_s", estimate.exposed_s},
               {"tokens_per_s", estimate.metrics.tokens_per_s},
               {"mfu", estimate.metrics.mfu.value_or(0)},
               {"fits", found.fits},
               {"frontier", found.frontier}});
  return json;
}

}  // namespace

std::string to_text(const Search& search) {
  std::string text = heading(search);
  const bool has_cp =
      std::ranges::any_of(search.found, [](const FoundLayout& each) { return each.layout.cp > 1; });
  const bool has_accumulation = std::ranges::any_of(
      search.found, [](const FoundLayout& each) { return each.layout.accumulate > 1; });
  text += fmt::format("  {:>5} {:>4}{}  {:<12} {:>4}{} {:>12} {:>11} {:>11} {:>7} {:>13}\n", "dp",
                      "tp", column(has_cp, "cp"), "ac", "zero", column(has_accumulation, "acc."),
                      "peak", "step", "exposed", "MFU", "tokens/s");
  for (const FoundLayout& found : search.found) {
    text += row(found, has_cp, has_accumulation);
  }
  if (search.best().fits) {
    text += "* no layout that fits takes less memory in the same or less time\n";
  }
  if (search.skipped > 0) {
    text += fmt::format("{} layouts that need more memory were skipped\n", search.skipped);
  }
  for (const auto& [layout, reason] : search.refused) {
    text += fmt::format("left out: dp {}, tp {}{}: {}\n", layout.dp, layout.tp,
                        layout.cp > 1 ? fmt::format(", cp {}", layout.cp) : "", reason);
  }
  return text;
}

Json json_of(const Search& search) {
  Json json = {{"gpus", search.space.ranks},
               {"gpu", search.space.machine.name},
               {"room_bytes", search.space.machine.room()},
               {"layouts", Json::array()},
               {"refused", Json::array()},
               {"skipped", search.skipped}};
  for (const FoundLayout& found : search.found) {
    json["layouts"].push_back(json_of(found));
  }
  for (const auto& [layout, reason] : search.refused) {
    Json entry = json_of(layout);
    entry["reason"] = reason;
    json["refused"].push_back(std::move(entry));
  }
  return json;
}

using observe::MemoryKind;
using Json = nlohmann::ordered_json;

namespace {

std::int64_t bytes_of(const observe::BytesByKind& bytes, MemoryKind kind) {
  return bytes[static_cast<std::size_t>(kind)];
}

Json json_of_memory(const observe::StepMemory& memory) {
  Json live;
  for (std::size_t i = 0; i < observe::kMemoryKinds; ++i) {
    live[to_string(static_cast<MemoryKind>(i))] = memory.at_peak[i];
  }
  return {{"parameters_bytes", bytes_of(memory.most, MemoryKind::kParameters)},
          {"gradients_bytes", bytes_of(memory.most, MemoryKind::kGradients)},
          {"optimizer_bytes", bytes_of(memory.most, MemoryKind::kOptimizer)},
          {"activations_bytes", bytes_of(memory.most, MemoryKind::kActivations)},
          {"peak_bytes", memory.peak_bytes},
          {"peak_moment", memory.peak_moment},
          {"live_at_peak", live}};
}

using Use = std::pair<std::string, OperatorUse>;
std::vector<Use> longest_first(const StepTime& time) {
  std::vector<Use> uses(time.operators.begin(), time.operators.end());
  std::ranges::sort(uses, std::greater<>(), [](const Use& use) { return use.second.seconds; });
  return uses;
}

Json json_of(const StepTime& time) {
  Json rows = Json::array();
  for (const auto& [name, use] : longest_first(time)) {
    rows.push_back({{"name", name},
                    {"calls", use.calls},
                    {"bytes", use.bytes},
                    {"flops", use.flops},
                    {"seconds", use.seconds}});
  }
  return rows;
}

/// Returns the memory peak of each part of a step (MomentMemory) as JSON, in the order of parts.
Json json_of_moments(const observe::StepMemory& memory) {
  Json moments = Json::array();
  for (const observe::MomentMemory& moment : memory.moments) {
    Json live = Json::object();
    for (std::size_t i = 0; i < observe::kMemoryKinds; ++i) {
      if (moment.live[i] > 0) {
        live[to_string(static_cast<MemoryKind>(i))] = moment.live[i];
      }
    }
    moments.push_back({{"name", moment.name}, {"bytes", moment.bytes}, {"live", live}});
  }
  return moments;
}

/// Returns a step's time chart as JSON: for each row, a list of [what, begin, end].
Json json_of_spans(const StepTime& time) {
  Json rows = Json::object();
  for (const Span& span : time.spans) {
    rows[span.row].push_back({span.what, span.begin, span.end});
  }
  return rows;
}

Json json_of(const RankPlan& rank) {
  Json json = json_of_memory(rank.memory);
  // The metrics of the report have the JSON format of observe::to_json().
  const Json metrics = Json::parse(observe::to_json(rank.metrics));
  json["comm"] = metrics.at("comm");
  for (const char* key : {"step_time_s", "tokens_per_s", "tflops", "mfu", "mfu_causal"}) {
    json[key] = rank.time ? metrics.at(key) : Json();
  }
  json["flops"] = rank.time ? Json(rank.time->flops) : Json();
  json["exposed_s"] = rank.time ? Json(rank.time->exposed) : Json();
  json["communication_s"] = rank.time ? Json(rank.time->communication) : Json();
  json["operators"] = rank.time ? json_of(*rank.time) : Json();
  return json;
}

std::string coordinate_text(const RunPlan& plan, const RankPlan& rank) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < rank.coordinate.size(); ++i) {
    parts.push_back(fmt::format("{}={}", plan.mesh.names()[i], rank.coordinate[i]));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string memory_text(const RankPlan& rank) {
  const observe::StepMemory& memory = rank.memory;
  std::string text;
  for (const MemoryKind kind :
       {MemoryKind::kParameters, MemoryKind::kGradients, MemoryKind::kOptimizer,
        MemoryKind::kActivations, MemoryKind::kGathered}) {
    text +=
        fmt::format("  {:<22} {:>12}\n", to_string(kind), size_text(bytes_of(memory.most, kind)));
  }
  text += fmt::format("  {:<22} {:>12}   in {}: ", "peak", size_text(memory.peak_bytes),
                      memory.peak_moment);
  std::vector<std::string> live;
  for (std::size_t i = 0; i < observe::kMemoryKinds; ++i) {
    if (memory.at_peak[i] > 0) {
      live.push_back(fmt::format("{} {}", to_string(static_cast<MemoryKind>(i)),
                                 size_text(memory.at_peak[i])));
    }
  }
  return text + fmt::format("{}\n", fmt::join(live, ", "));
}

std::string comm_text(const RankPlan& rank) {
  std::string text = "  sent in a step\n";
  for (const auto& [key, traffic] : rank.metrics.comm) {
    text += fmt::format("    {:<14} {:<16} {:>7} calls {:>12}\n", key.first, key.second,
                        traffic.calls, size_text(traffic.bytes));
  }
  return rank.metrics.comm.empty() ? "" : text;
}

/// Formats a table of the operators that take the most time in a step.
std::string operators_text(const StepTime& time) {
  constexpr std::size_t kLines = 8;
  std::vector<Use> uses = longest_first(time);
  uses.resize(std::min(uses.size(), kLines));
  std::string text;
  for (const auto& [name, use] : uses) {
    text += fmt::format("    {:<60} {:>6} calls {:>12} {:>10}\n", name, use.calls,
                        size_text(static_cast<std::int64_t>(use.bytes)), seconds_text(use.seconds));
  }
  return text;
}

std::string time_text(const RankPlan& rank) {
  if (!rank.time) {
    return "";
  }
  std::string text = fmt::format("  step {}, of which operators {}", seconds_text(rank.time->total),
                                 seconds_text(rank.time->compute));
  if (rank.metrics.mfu) {
    text += fmt::format("; MFU {:.1f} %, {:.0f} tokens/s", *rank.metrics.mfu,
                        rank.metrics.tokens_per_s);
  }
  text += '\n';
  for (const auto& [group, seconds] : rank.time->communication) {
    const auto exposed = rank.time->exposed.find(group);
    text += fmt::format("    {:<14} {} of collectives, {} exposed\n", group, seconds_text(seconds),
                        seconds_text(exposed == rank.time->exposed.end() ? 0 : exposed->second));
  }
  return text + operators_text(*rank.time);
}

/// Formats a rate for tables: "989 TFLOP/s", "4.8 TB/s", "50 GB/s".
std::string rate_text(double rate, const char* unit) {
  constexpr std::array kPrefixes{"", "k", "M", "G", "T"};
  std::size_t thousands = 0;
  for (; rate >= 1000 && thousands + 1 < kPrefixes.size(); ++thousands) {
    rate /= 1000;
  }
  return fmt::format("{:.4g} {}{}", rate, kPrefixes[thousands], unit);
}

/// Returns a text that says where a machine's `..._share` values were measured.
std::string sources_text(const Machine& machine) {
  const std::string fp8 = machine.flops_fp8 > 0 && machine.fp8_share == 0
                              ? ", products in 8 bits (planned as fast as in 16 bits)"
                              : "";
  const std::string taken =
      machine.multiprocessors > 0
          ? fmt::format(" (which take {:.0f} of {:.0f} multiprocessors from products that overlap)",
                        machine.collective_multiprocessors, machine.multiprocessors)
          : "";
  return fmt::format(
      "These shares of products, attention with heads of 64 and other operators were measured on: "
      "{}. Not measured: attention with larger heads{}, collectives{}. A plan leaves out the time "
      "for which ranks wait for the slowest rank, so a step on several GPUs or nodes takes longer "
      "than planned.\n",
      machine.shares_from, fp8, taken);
}

/// Returns a text that says on which assumptions the predicted times are based.
std::string assumptions_text(const Machine& machine, c10::ScalarType type) {
  return fmt::format(
             "Predicted, not measured. A {}: products at {:.0f} %, attention at {:.0f} % (heads of "
             "64: {:.0f} %) of {} ({}), other operators at {:.0f} % of {} and {:.0f} us at least, "
             "collectives at {:.0f} % of {} in a node and {} between nodes.\n",
             machine.name, 100 * machine.product_share, 100 * machine.attention_share,
             100 * machine.attention_share_64, rate_text(machine.peak_flops(type), "FLOP/s"),
             c10::toString(type), 100 * machine.memory_share,
             rate_text(machine.memory_bandwidth, "B/s"), machine.operator_latency_s * 1e6,
             100 * machine.network_share, rate_text(machine.link_bandwidth, "B/s"),
             rate_text(machine.network_bandwidth, "B/s")) +
         sources_text(machine);
}

/// Returns advice on how to reduce a kind of memory. A program can give its own advice instead.
std::string remedy(const RunPlan& plan, MemoryKind kind) {
  if (plan.options.remedy) {
    return plan.options.remedy(kind);
  }
  switch (kind) {
    case MemoryKind::kParameters:
    case MemoryKind::kOptimizer:
    case MemoryKind::kGradients:
      return "more ranks that shard parameters, or offloading";
    case MemoryKind::kGathered:
      return "smaller FSDP units, resharded after forward";
    case MemoryKind::kReduced:
      return "smaller FSDP units, or a narrower type of reduction";
    case MemoryKind::kActivations:
      return "activation checkpointing, smaller micro-batches, or more tensor parallelism";
    default:
      return "smaller micro-batches, or more tensor parallelism";
  }
}

/// Returns a line for each large part of the memory peak, largest part first. Each line has advice
/// on how to reduce the part.
std::vector<std::string> advice(const RunPlan& plan) {
  std::vector<std::pair<std::int64_t, MemoryKind>> parts;
  const observe::StepMemory& memory = plan.largest().memory;
  for (std::size_t i = 0; i < observe::kMemoryKinds; ++i) {
    const auto kind = static_cast<MemoryKind>(i);
    if (memory.at_peak[i] > memory.peak_bytes / 20 && !plan.on_host(kind)) {
      parts.emplace_back(memory.at_peak[i], kind);
    }
  }
  std::ranges::sort(parts, std::greater<>());
  std::vector<std::string> lines;
  for (const auto& [bytes, kind] : parts) {
    lines.push_back(
        fmt::format("{} take {}: try {}", to_string(kind), size_text(bytes), remedy(plan, kind)));
  }
  return lines;
}

std::string verdict(const RunPlan& plan) {
  if (!plan.options.machine) {
    return "";
  }
  const std::int64_t room = plan.options.machine->room();
  const std::int64_t peak = plan.largest().memory.peak_bytes;
  const std::string of_device = fmt::format("the {} that tensors can have of a {}", size_text(room),
                                            plan.options.machine->name);
  if (plan.fits()) {
    return fmt::format("It fits: {} of {}.", size_text(peak), of_device);
  }
  return fmt::format("It does not fit: {} is {} more than {}.", size_text(peak),
                     size_text(peak - room), of_device);
}

}  // namespace

std::string to_json(const RunPlan& plan, const std::optional<Search>& search) {
  Json mesh;
  for (std::size_t i = 0; i < plan.mesh.names().size(); ++i) {
    mesh[plan.mesh.names()[i]] = plan.mesh.sizes()[i];
  }
  const std::optional<Machine>& machine = plan.options.machine;
  Json json = {{"mesh", mesh},
               {"ranks", plan.mesh.numel()},
               {"device", plan.options.device},
               {"gpu", machine ? Json(machine->name) : Json()},
               {"room_bytes", machine ? Json(machine->room()) : Json()},
               {"offload", plan.options.offload},
               {"fits", machine ? Json(plan.fits()) : Json()},
               {"verdict", verdict(plan)},
               {"advice", plan.fits() ? std::vector<std::string>{} : advice(plan)}};
  json.update(json_of(plan.largest()));
  json["kinds"] = Json::array();
  for (const RankPlan& rank : plan.ranks) {
    Json kind = {
        {"rank", rank.kind.first}, {"ranks", rank.kind.count}, {"coordinate", rank.coordinate}};
    kind.update(json_of(rank));
    kind["moments"] = json_of_moments(rank.memory);
    kind["spans"] =
        rank.time && &rank == &plan.largest() ? json_of_spans(*rank.time) : Json(nullptr);
    json["kinds"].push_back(std::move(kind));
  }
  if (search) {
    json["search"] = json_of(*search);
  }
  return json.dump(1);
}

std::string to_text(const RunPlan& plan) {
  std::string text;
  for (const RankPlan& rank : plan.ranks) {
    text += fmt::format("rank {} ({}), one of {} alike\n{}{}{}", rank.kind.first,
                        coordinate_text(plan, rank), rank.kind.count, memory_text(rank),
                        comm_text(rank), time_text(rank));
  }
  if (plan.options.machine) {
    text += assumptions_text(*plan.options.machine, plan.options.type) + verdict(plan) + "\n";
  }
  for (const std::string& line : plan.fits() ? std::vector<std::string>{} : advice(plan)) {
    text += "  " + line + "\n";
  }
  return text;
}

}  // namespace tessera::planning
