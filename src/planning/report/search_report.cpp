// A search in words and as JSON.

#include <fmt/format.h>

#include <algorithm>

#include "report/search_json.h"
#include "report/seconds_text.h"
#include "report/size_text.h"
#include "tessera/planning/report.h"

namespace tessera::planning {

using Json = nlohmann::ordered_json;

namespace {

/// Only where some layout has it.
std::string column(bool shown, const std::string& text) {
  return shown ? fmt::format(" {:>4}", text) : "";
}

std::string row(const FoundLayout& found, bool has_cp, bool has_accumulation) {
  const TrainingLayout& layout = found.layout;
  const observe::StepMetrics& metrics = found.estimate.metrics;
  return fmt::format("{} {:>5} {:>4}{}  {:<10} {:>4}{} {:>12} {:>11} {:>11} {:>7} {:>13}\n",
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
  text += fmt::format("  {:>5} {:>4}{}  {:<10} {:>4}{} {:>12} {:>11} {:>11} {:>7} {:>13}\n", "dp",
                      "tp", column(search.has_cp(), "cp"), "ac", "zero",
                      column(search.has_accumulation(), "acc."), "peak", "step", "exposed", "MFU",
                      "tokens/s");
  for (const FoundLayout& found : search.found) {
    text += row(found, search.has_cp(), search.has_accumulation());
  }
  if (search.best().fits) {
    text += "* of those that fit, none takes less memory and no more time\n";
  }
  if (search.skipped > 0) {
    text += fmt::format("{} more take more memory than one that is too large\n", search.skipped);
  }
  for (const RefusedLayout& refused : search.refused) {
    text += fmt::format("left out: dp {}, tp {}{}: {}\n", refused.layout.dp, refused.layout.tp,
                        refused.layout.cp > 1 ? fmt::format(", cp {}", refused.layout.cp) : "",
                        refused.reason);
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
  for (const RefusedLayout& refused : search.refused) {
    Json entry = json_of(refused.layout);
    entry["reason"] = refused.reason;
    json["refused"].push_back(std::move(entry));
  }
  return json;
}

}  // namespace tessera::planning
