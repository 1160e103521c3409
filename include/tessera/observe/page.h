// Pages in the form of the report: one HTML file with everything in it, so that it can be mailed or
// kept. What is HTML is made by the caller, who escapes what comes from outside (escape_html).
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A heading with what belongs to it; `note` stands behind the heading. All are HTML.
std::string html_section(const std::string& heading, const std::string& body,
                         const std::string& note = "");
/// A figure in large letters; both are HTML. They stand in a div of the class "tiles".
std::string html_tile(const std::string& value, const std::string& label);
/// Calls and bytes by mesh dimension and collective, with their shares.
std::string traffic_table(const comm::TrafficTable& comm);
/// Names with values, which are escaped.
std::string html_list(const std::vector<std::pair<std::string, std::string>>& items);

/// Writes a page whole or not at all. `body`: HTML; `style`: rules beside those of the report.
/// Throws Error with the system's reason.
void write_page(const std::string& title, const std::string& body,
                const std::filesystem::path& path, std::string_view style = "");

}  // namespace tessera::observe
TESSERA_API_END
