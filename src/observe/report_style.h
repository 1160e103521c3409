// Apart from page.cpp, which would be mostly this otherwise.
#pragma once

#include <string_view>

namespace tessera::observe {

/// The report's style sheet: one column of cards, light or dark as the reader's system is.
inline constexpr std::string_view kReportStyle = R"css(
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1a1f27;--muted:#647084;
--rule:#e3e7ed;--grid:#edf0f4;--accent:#2f6fed;--bar:#dbe7ff}
@media (prefers-color-scheme:dark){:root{--page:#11151b;--card:#191f27;--ink:#e4e8ee;
--muted:#97a3b4;--rule:#2b333e;--grid:#252c36;--accent:#6ea2ff;--bar:#24406f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1180px;margin:0 auto;padding:36px 24px 56px}
header{margin-bottom:24px}
h1{margin:0;font-size:25px;font-weight:650;letter-spacing:-.01em;line-height:1.25}
header p{margin:6px 0 0;color:var(--muted)}
h2{margin:34px 0 12px;font-size:16px;font-weight:650}
h3{margin:0 0 6px;font-size:14px;font-weight:600}
h3 span,h2 span{color:var(--muted);font-weight:400;margin-left:6px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tile{padding:13px 16px}
.tile b{display:block;font-size:21px;font-weight:600;letter-spacing:-.01em;line-height:1.3}
.tile span{color:var(--muted);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:12px}
.chart{padding:14px 14px 8px}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--muted);font-size:11.5px}
.grid{stroke:var(--grid)}.axis{stroke:var(--rule)}
.curve,.raw{fill:none;stroke:var(--accent);stroke-width:1.9;stroke-linejoin:round}
.raw{stroke-width:1;opacity:.32}.dot{fill:var(--accent)}
.hover rect{fill:transparent}
.hover circle{fill:var(--accent);stroke:var(--card);stroke-width:1.5;opacity:0;pointer-events:none}
.hover:hover circle{opacity:1}.hover:hover rect{fill:var(--accent);fill-opacity:.07}
.scroll{overflow:auto;max-height:560px}
table{width:100%;border-collapse:collapse;font-size:13.5px}
th,td{padding:7px 16px;text-align:left;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{position:sticky;top:0;background:var(--card);color:var(--muted);font-weight:500;
box-shadow:inset 0 -1px var(--rule)}
tbody tr:hover td{background:var(--grid)}
tr:last-child td{border-bottom:0}
.total td{font-weight:600;box-shadow:inset 0 1px var(--rule)}
td.n,th.n{text-align:right}
td.wide{width:34%}
.share{display:block;height:9px;border-radius:5px;background:var(--accent);min-width:2px;opacity:.75}
code,pre,td.name{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
font-size:12.5px}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:0 28px;margin:0;
padding:9px 18px}
dl div{display:flex;justify-content:space-between;gap:18px;padding:5px 0;
border-bottom:1px solid var(--grid);font-size:13.5px}
dt{color:var(--muted);white-space:nowrap}
dd{margin:0;text-align:right;overflow-wrap:anywhere}
pre{margin:0;padding:16px 18px;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6}
.empty{margin:0;padding:20px 16px;color:var(--muted)}
footer{margin-top:34px;color:var(--muted);font-size:13px}
@media (max-width:560px){main{padding:20px 12px}.charts{grid-template-columns:1fr}}
)css";

}  // namespace tessera::observe
