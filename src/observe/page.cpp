// Each function returns a piece of HTML.
#include "tessera/observe/page.h"

#include <fmt/format.h>

#include "report_style.h"
#include "tessera/core/atomic_file.h"
#include "tessera/observe/text.h"

namespace tessera::observe {

std::string html_section(const std::string& heading, const std::string& body,
                         const std::string& note) {
  const std::string aside = note.empty() ? "" : fmt::format("<span>{}</span>", note);
  return fmt::format("<section><h2>{}{}</h2>\n{}</section>\n", heading, aside, body);
}

std::string html_tile(const std::string& value, const std::string& label) {
  return fmt::format("<div class=\"card tile\"><b>{}</b><span>{}</span></div>\n", value, label);
}

/// The title of a cell has the exact number of bytes.
std::string traffic_table(const comm::TrafficTable& comm) {
  const auto sum = comm::total(comm);
  if (sum.calls == 0) {
    return "<div class=\"card\"><p class=\"empty\">None: one rank.</p></div>\n";
  }
  std::string rows;
  for (const auto& [key, traffic] : comm) {
    // Where nothing is sent nothing has a share.
    const double share =
        sum.bytes == 0 ? 0
                       : 100 * static_cast<double>(traffic.bytes) / static_cast<double>(sum.bytes);
    rows += fmt::format(
        "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\" "
        "title=\"{} bytes\">{}</td><td class=\"wide\"><span class=\"share\" "
        "style=\"width:{:.1f}%\" "
        "title=\"{:.1f} %\"></span></td></tr>\n",
        escape_html(key.first), escape_html(key.second), traffic.calls,
        bytes_text(static_cast<double>(traffic.bytes) / static_cast<double>(traffic.calls)),
        grouped(static_cast<double>(traffic.bytes)), bytes_text(static_cast<double>(traffic.bytes)),
        share, share);
  }
  rows += fmt::format(
      "<tr class=\"total\"><td>total</td><td></td><td class=\"n\">{}</td><td></td><td class=\"n\" "
      "title=\"{} bytes\">{}</td><td></td></tr>\n",
      sum.calls, grouped(static_cast<double>(sum.bytes)),
      bytes_text(static_cast<double>(sum.bytes)));
  return "<div class=\"card scroll\"><table><thead><tr><th>mesh dimension</th><th>collective</th>"
         "<th class=\"n\">calls</th><th class=\"n\">per call</th><th class=\"n\">per step</th>"
         "<th>share of bytes</th></tr></thead><tbody>\n" +
         rows + "</tbody></table></div>\n";
}

std::string html_list(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string html;
  for (const auto& [name, value] : items) {
    html +=
        fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escape_html(name), escape_html(value));
  }
  return "<dl class=\"card\">\n" + html + "</dl>\n";
}

void write_page(const std::string& title, const std::string& body,
                const std::filesystem::path& path, std::string_view style) {
  // A full disk leaves an older page as it was.
  files::write_file(
      path, fmt::format("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
                        "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
                        "<title>{}</title>\n<style>{}{}</style></head>\n<body><main>\n{}"
                        "<footer>Written by Tessera.</footer>\n</main></body></html>\n",
                        escape_html(title), kReportStyle, style, body));
}

}  // namespace tessera::observe
