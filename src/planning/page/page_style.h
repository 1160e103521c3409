#pragma once

#include <string_view>

namespace tessera::planning {

/// Beside the report's: the colours of purposes (p0 to p6, as Purpose), phases and marks.
inline constexpr std::string_view kPageStyle = R"css(
:root{--p0:#2f6fed;--p1:#8a63d2;--p2:#d9822b;--p3:#1d9a8a;--p4:#e0b13c;--p5:#58a55c;--p6:#a3acb9;
--bad:#d1453b;--band:#d1453b14}
@media (prefers-color-scheme:dark){:root{--p0:#6ea2ff;--p1:#b094f0;--p2:#eba15a;--p3:#45c2b1;
--p4:#e8c765;--p5:#80c784;--p6:#7c8797;--bad:#ff7a70;--band:#ff7a701f}}
.p0{fill:var(--p0);background:var(--p0)}.p1{fill:var(--p1);background:var(--p1)}
.p2{fill:var(--p2);background:var(--p2)}.p3{fill:var(--p3);background:var(--p3)}
.p4{fill:var(--p4);background:var(--p4)}.p5{fill:var(--p5);background:var(--p5)}
.p6{fill:var(--p6);background:var(--p6)}.bad{fill:var(--bad);background:var(--bad)}
.picture{padding:14px 16px 10px;margin:0 0 12px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:2px 0 10px;font-size:13px;color:var(--muted)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.limit{stroke:var(--bad);stroke-dasharray:5 4;fill:none}
svg text.limit-text,svg text.named{font-size:12px}
svg text.limit-text{fill:var(--bad);stroke:none}
svg text.named{fill:var(--ink);font-weight:600}
.band{fill:var(--band)}.mark{stroke:var(--ink);fill:none}
.bars g:hover rect,.spans rect:hover{opacity:.72}
.point{fill:var(--muted);opacity:.55}.point.best{fill:var(--accent);opacity:1}
.point.over{fill:none;stroke:var(--bad);opacity:.8}
.front{fill:none;stroke:var(--accent);stroke-width:1.6;opacity:.6}
.verdict.over{color:var(--bad)}
ul.advice{margin:8px 0 0;padding-left:20px;color:var(--muted)}
)css";

}  // namespace tessera::planning
