// A plan's table as text for people, with equal layers joined, and as JSON for programs.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <tuple>

#include "plan/plan_text.h"
#include "tessera/tensor_parallel/plan_table.h"

namespace tessera::tensor_parallel {
namespace {

using Json = nlohmann::ordered_json;

// Text.

std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  return fmt::format("[{}]", fmt::join(sizes, ", "));
}

std::string bytes_text(const PlannedParameter& parameter) {
  if (parameter.smallest_bytes == parameter.largest_bytes) {
    return std::to_string(parameter.bytes);
  }
  return fmt::format("{} ({} to {})", parameter.bytes, parameter.smallest_bytes,
                     parameter.largest_bytes);
}

std::string collective_text(const PlannedCollective& planned) {
  return fmt::format("    {} {} {}: {} call{}, {} bytes: {}\n",
                     planned.backward ? "backward" : "forward ", planned.group, planned.collective,
                     planned.traffic.calls, planned.traffic.calls == 1 ? "" : "s",
                     planned.traffic.bytes, planned.reason);
}

/// `reason` for all layers: "unit 'model.layers.3'" becomes "unit 'model.layers.*'".
std::string without_numbers(const std::string& reason) {
  std::string text;
  for (std::size_t i = 0; i < reason.size(); ++i) {
    std::size_t end = i;
    while (end < reason.size() && std::isdigit(static_cast<unsigned char>(reason[end])) != 0) {
      ++end;
    }
    const bool segment = end > i && i > 0 && reason[i - 1] == '.' && end < reason.size() &&
                         (reason[end] == '.' || reason[end] == '\'');
    text += segment ? '*' : reason[i];
    i = segment ? end - 1 : i;
  }
  return text;
}

/// Joins those of equal layers.
std::vector<PlannedCollective> merge(const std::vector<PlannedCollective>& list) {
  std::vector<PlannedCollective> merged;
  for (const PlannedCollective& planned : list) {
    const std::string reason = without_numbers(planned.reason);
    const auto same = std::ranges::find_if(merged, [&](const PlannedCollective& known) {
      return known.group == planned.group && known.collective == planned.collective &&
             known.backward == planned.backward && known.reason == reason;
    });
    if (same == merged.end()) {
      merged.push_back(planned);
      merged.back().reason = reason;
    } else {
      same->traffic.calls += planned.traffic.calls;
      same->traffic.bytes += planned.traffic.bytes;
    }
  }
  return merged;
}

using Cells = std::vector<std::string>;

/// All of a row's text except the FQN: rows with equal text may be joined.
struct RowText {
  std::vector<Cells> parameters;  ///< at least one line, of the cells after the FQN
  std::string collectives;
  friend bool operator==(const RowText&, const RowText&) = default;
};

RowText text_of(const PlanRow& row) {
  RowText text;
  for (const PlannedParameter& parameter : row.parameters) {
    text.parameters.push_back({text.parameters.empty() ? row.style : "",
                               parameter.name + (parameter.shared ? " (shared)" : ""),
                               parameter.placement, sizes_text(parameter.sizes),
                               sizes_text(parameter.local_sizes), bytes_text(parameter)});
  }
  if (text.parameters.empty()) {
    text.parameters.push_back({row.style, "", "", "", "", ""});
  }
  for (const PlannedCollective& planned : row.collectives) {
    text.collectives += collective_text(planned);
  }
  return text;
}

/// Rows of one pattern and one text.
struct Merged {
  std::string first, pattern;
  RowText text;
  int count = 0;

  std::string name() const {
    const std::string& shown = count == 1 ? first : pattern;
    return (shown.empty() ? "(root)" : shown) + (count == 1 ? "" : fmt::format(" x{}", count));
  }
};

std::vector<Merged> merge(const std::vector<PlanRow>& rows) {
  std::vector<Merged> merged;
  for (const PlanRow& row : rows) {
    RowText text = text_of(row);
    const std::string pattern = pattern_of(row.fqn);
    const auto same = std::ranges::find_if(merged, [&](const Merged& known) {
      return known.pattern == pattern && known.text == text;
    });
    if (same != merged.end()) {
      ++same->count;
    } else {
      merged.push_back({row.fqn, pattern, std::move(text), 1});
    }
  }
  return merged;
}

std::string line_of(const Cells& cells, const std::vector<std::size_t>& widths) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    line += fmt::format("{:<{}}", cells[i], i + 1 == cells.size() ? 0 : widths[i] + 2);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

const Cells& header() {
  static const Cells cells{"module", "style",        "parameter", "placement",
                           "sizes",  "on this rank", "bytes"};
  return cells;
}

/// The lines of a row's parameters; the FQN stands in the first.
std::vector<Cells> lines_of(const Merged& row) {
  std::vector<Cells> lines;
  for (const Cells& cells : row.text.parameters) {
    lines.push_back({lines.empty() ? row.name() : ""});
    lines.back().insert(lines.back().end(), cells.begin(), cells.end());
  }
  return lines;
}

std::vector<std::size_t> widths_of(const std::vector<Merged>& rows) {
  std::vector<std::size_t> widths;
  for (const std::string& cell : header()) {
    widths.push_back(cell.size());
  }
  for (const Merged& row : rows) {
    for (const Cells& line : lines_of(row)) {
      for (std::size_t i = 0; i < line.size(); ++i) {
        widths[i] = std::max(widths[i], line[i].size());
      }
    }
  }
  return widths;
}

// Sums.

std::int64_t total_bytes(const PlanTable& table) {
  std::int64_t bytes = 0;
  for (const PlanRow& row : table.rows) {
    for (const PlannedParameter& parameter : row.parameters) {
      bytes += parameter.shared ? 0 : parameter.bytes;
    }
  }
  return bytes;
}

/// All collectives, by direction, group and kind.
std::string totals_text(const PlanTable& table) {
  std::map<std::tuple<bool, std::string, std::string>, comm::Traffic> sums;
  const auto add = [&sums](const std::vector<PlannedCollective>& list) {
    for (const PlannedCollective& planned : list) {
      comm::Traffic& sum = sums[{planned.backward, planned.group, planned.collective}];
      sum.calls += planned.traffic.calls;
      sum.bytes += planned.traffic.bytes;
    }
  };
  for (const PlanRow& row : table.rows) {
    add(row.collectives);
  }
  add(table.elsewhere);
  std::string text;
  for (const auto& [key, sum] : sums) {
    const auto& [backward, group, collective] = key;
    text += collective_text({group, collective, backward, "in all", sum});
  }
  return text;
}

// JSON.

Json json_of(const std::vector<PlannedCollective>& list) {
  Json array = Json::array();
  for (const PlannedCollective& planned : list) {
    array.push_back({{"group", planned.group},
                     {"collective", planned.collective},
                     {"backward", planned.backward},
                     {"reason", planned.reason},
                     {"calls", planned.traffic.calls},
                     {"bytes", planned.traffic.bytes}});
  }
  return array;
}

Json json_of(const PlannedParameter& parameter) {
  return {{"name", parameter.name},
          {"placement", parameter.placement},
          {"sizes", parameter.sizes},
          {"local_sizes", parameter.local_sizes},
          {"bytes", parameter.bytes},
          {"smallest_bytes", parameter.smallest_bytes},
          {"largest_bytes", parameter.largest_bytes},
          {"shared", parameter.shared}};
}

}  // namespace

std::string to_string(const PlanTable& table) {
  const std::vector<Merged> rows = merge(table.rows);
  const std::vector<std::size_t> widths = widths_of(rows);
  std::string text = fmt::format("tensor parallelism on {}, rank {}\n", table.mesh, table.rank) +
                     line_of(header(), widths);
  for (const Merged& row : rows) {
    for (const Cells& line : lines_of(row)) {
      text += line_of(line, widths);
    }
    text += row.text.collectives;
  }
  if (!table.elsewhere.empty()) {
    text += "outside of styles\n";
    for (const PlannedCollective& planned : merge(table.elsewhere)) {
      text += collective_text(planned);
    }
  }
  return text + fmt::format("total: {} bytes of parameters\n", total_bytes(table)) +
         totals_text(table);
}

std::ostream& operator<<(std::ostream& stream, const PlanTable& table) {
  return stream << to_string(table);
}

std::string to_json(const PlanTable& table) {
  Json rows = Json::array();
  for (const PlanRow& row : table.rows) {
    Json parameters = Json::array();
    for (const PlannedParameter& parameter : row.parameters) {
      parameters.push_back(json_of(parameter));
    }
    rows.push_back({{"fqn", row.fqn},
                    {"style", row.style},
                    {"parameters", parameters},
                    {"collectives", json_of(row.collectives)}});
  }
  const Json object{{"mesh", table.mesh},
                    {"rank", table.rank},
                    {"recorded", table.recorded},
                    {"rows", rows},
                    {"elsewhere", json_of(table.elsewhere)}};
  return object.dump(1);
}

}  // namespace tessera::tensor_parallel
