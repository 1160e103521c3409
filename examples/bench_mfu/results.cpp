#include "examples/bench_mfu/results.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace bench {

using nlohmann::ordered_json;

namespace {

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json();
}

std::string percent(const std::optional<double>& share) {
  return share ? fmt::format("{:.1f} %", *share) : "-";
}

std::string gib(const std::optional<std::int64_t>& bytes) {
  return bytes ? fmt::format("{:.3g}", static_cast<double>(*bytes) / (1 << 30)) : "-";
}

std::string tera(const std::optional<double>& flops) {
  return flops ? fmt::format("{:.3g}", *flops / 1e12) : "-";
}

std::string mesh_text(const Trial& trial) {
  const Degrees& mesh = trial.mesh;
  return mesh.cp == 1 ? fmt::format("{}x{}", mesh.dp, mesh.tp)
                      : fmt::format("{}x{}x{}", mesh.dp, mesh.cp, mesh.tp);
}

std::string escaped(const std::string& text) {
  std::string html;
  for (const char c : text) {
    html += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  }
  return html;
}

constexpr std::string_view kStyle = R"css(
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1a1f27;--muted:#647084;
--rule:#e3e7ed;--a:#2f6fed;--b:#7aa5f7;--c:#2a9d6f}
@media (prefers-color-scheme:dark){:root{--page:#11151b;--card:#191f27;--ink:#e4e8ee;
--muted:#97a3b4;--rule:#2b333e;--a:#6ea2ff;--b:#3d68b3;--c:#4fc597}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1180px;margin:0 auto;padding:36px 24px}
h1{margin:0 0 4px;font-size:25px;font-weight:650}
p{margin:0 0 18px;color:var(--muted)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;overflow:auto}
table{width:100%;border-collapse:collapse;font-size:13.5px}
th,td{padding:8px 14px;text-align:left;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{color:var(--muted);font-weight:500}
tr:last-child td{border-bottom:0}
.n{text-align:right}
.error{white-space:normal}
.bars{width:38%;min-width:260px}
.bars div{display:flex;align-items:center;gap:8px;font-size:12px;line-height:1.35}
.bars i{display:block;height:8px;border-radius:4px;min-width:2px}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin:0 6px 0 14px}
.a{background:var(--a)}.b{background:var(--b)}.c{background:var(--c)}
)css";

std::string bar(const char* kind, const std::optional<double>& share, double longest) {
  if (!share) {
    return "";
  }
  return fmt::format("<div><i class=\"{}\" style=\"width:{:.1f}%\"></i>{}</div>", kind,
                     80 * *share / longest, percent(share));
}

std::string row(const Result& result, double longest) {
  const Trial& trial = result.trial;
  const Figures& figures = result.figures;
  std::string html = fmt::format(
      "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td>"
      "<td class=\"n\">{}</td>",
      escaped(trial.shape()), mesh_text(trial), trial.ac, trial.batch, trial.seq);
  if (!result.error.empty()) {
    return html +
           fmt::format("<td class=\"error\" colspan=\"5\">{}</td></tr>\n", escaped(result.error));
  }
  return html +
         fmt::format(
             "<td class=\"bars\">{}{}{}</td><td class=\"n\">{}</td><td class=\"n\">{:.0f}</td>"
             "<td class=\"n\">{}</td><td class=\"n\">{}</td></tr>\n",
             bar("a", figures.mfu, longest), bar("b", figures.mfu_causal, longest),
             bar("c", figures.hfu, longest), tera(figures.peak_flops), figures.tokens_per_s,
             gib(figures.active_bytes), gib(figures.reserved_bytes));
}

double longest_bar(const std::vector<Result>& results) {
  double longest = 1;
  for (const Result& result : results) {
    longest = std::max({longest, result.figures.mfu.value_or(0), result.figures.hfu.value_or(0)});
  }
  return longest;
}

}  // namespace

std::string to_table(const std::vector<Result>& results) {
  constexpr auto kFormat =
      "{:<16} {:>6} {:>10} {:>6} {:>6} {:>10} {:>8} {:>8} {:>8} {:>12} {:>11} {:>13}\n";
  std::string text = fmt::format(kFormat, "model", "mesh", "ac", "batch", "seq", "tokens/s", "MFU",
                                 "causal", "HFU", "peak TFLOP/s", "active GiB", "reserved GiB");
  for (const Result& result : results) {
    const Trial& trial = result.trial;
    const Figures& figures = result.figures;
    if (!result.error.empty()) {
      text += fmt::format("{:<16} {:>6} {:>10} {:>6} {:>6}   {}\n", trial.shape(), mesh_text(trial),
                          trial.ac, trial.batch, trial.seq, result.error);
      continue;
    }
    text += fmt::format(kFormat, trial.shape(), mesh_text(trial), trial.ac, trial.batch, trial.seq,
                        fmt::format("{:.0f}", figures.tokens_per_s), percent(figures.mfu),
                        percent(figures.mfu_causal), percent(figures.hfu), tera(figures.peak_flops),
                        gib(figures.active_bytes), gib(figures.reserved_bytes));
  }
  return text;
}

std::string peers_text(const std::vector<Result>& results) {
  std::string text;
  for (const Result& result : results) {
    for (const PeerFigures& peer : result.peers) {
      std::string speed = fmt::format("{:.0f} tokens/s", peer.tokens_per_s);
      if (result.error.empty()) {
        speed += fmt::format("; ours is {:.2f} times as fast",
                             result.figures.tokens_per_s / peer.tokens_per_s);
      }
      text +=
          fmt::format("PyTorch {}, {} {} {}: {}\n", peer.name, result.trial.shape(),
                      result.trial.ac, result.trial.batch, peer.error.empty() ? speed : peer.error);
    }
  }
  return text;
}

ordered_json json_of(const std::vector<PeerFigures>& peers) {
  ordered_json json = ordered_json::object();
  for (const PeerFigures& peer : peers) {
    json[peer.name] = peer.error.empty() ? ordered_json{{"step_time_s", peer.step_time_s},
                                                        {"tokens_per_s", peer.tokens_per_s}}
                                         : ordered_json{{"error", peer.error}};
  }
  return json;
}

std::string to_json(const std::vector<Result>& results) {
  ordered_json runs = ordered_json::array();
  for (const Result& result : results) {
    const Trial& trial = result.trial;
    const Figures& figures = result.figures;
    const bool ran = result.error.empty();
    runs.push_back({{"model", trial.shape()},
                    {"ac", trial.ac},
                    {"batch", trial.batch},
                    {"seq", trial.seq},
                    {"dp", trial.mesh.dp},
                    {"cp", trial.mesh.cp},
                    {"tp", trial.mesh.tp},
                    {"step_time_s", ran ? ordered_json(figures.step_time_s) : ordered_json()},
                    {"tokens_per_s", ran ? ordered_json(figures.tokens_per_s) : ordered_json()},
                    {"peak_flops", or_null(figures.peak_flops)},
                    {"mfu", or_null(figures.mfu)},
                    {"mfu_causal", or_null(figures.mfu_causal)},
                    {"hfu", or_null(figures.hfu)},
                    {"active_bytes", or_null(figures.active_bytes)},
                    {"reserved_bytes", ran ? ordered_json(figures.reserved_bytes) : ordered_json()},
                    {"peer", json_of(result.peers)},
                    {"error", ran ? ordered_json() : ordered_json(result.error)}});
  }
  // A message may hold any bytes.
  return ordered_json{{"runs", runs}}.dump(2, ' ', false, ordered_json::error_handler_t::replace) +
         "\n";
}

std::string to_html(const std::vector<Result>& results, const BenchOptions& options) {
  std::string rows;
  const double longest = longest_bar(results);
  for (const Result& result : results) {
    rows += row(result, longest);
  }
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>bench_mfu</title>"
      "<style>{}</style></head><body><main>\n<h1>Model FLOPs utilization</h1>\n"
      "<p>{}; the share of a rank's peak, medians of {} steps"
      "<span class=\"key\"><i class=\"a\"></i>MFU<i class=\"b\"></i>MFU, causal"
      "<i class=\"c\"></i>HFU</span></p>\n"
      "<div class=\"card\"><table><thead><tr><th>model</th><th>dp (x cp) x tp</th><th>ac</th>"
      "<th class=\"n\">batch</th><th class=\"n\">tokens a sequence</th><th>share of the "
      "peak</th><th class=\"n\">peak TFLOP/s</th><th "
      "class=\"n\">tokens/s</th>"
      "<th class=\"n\">active GiB</th><th class=\"n\">reserved GiB</th></tr></thead>\n"
      "<tbody>{}</tbody></table></div>\n</main></body></html>\n",
      kStyle, options.device, options.steps - options.warmup, rows);
}

}  // namespace bench
