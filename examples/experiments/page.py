"""The report of an experiment: report.json, and report.html with everything in it."""
import html
import json
import math
import pathlib
import re

import chart
import results
import verdict
from experiment import check
from jobs import write_whole

# The style of llama_train's own reports, so that they look alike.
STYLE = pathlib.Path(__file__).resolve().parents[2] / "src/observe/report_style.h"
# Hues that are told apart in light and in dark, also by those who don't see red and green apart.
HUES_LIGHT = ("#2f6fed", "#e0701a", "#1c9a6c", "#b5379b", "#8a6d00", "#0e93b8", "#c93a3a", "#6b5bd6")
HUES_DARK = ("#6ea2ff", "#f39a4e", "#4fcb9c", "#e47fd0", "#d6b43c", "#4cc4e6", "#f57f7f", "#a99bff")
OWN_STYLE = """
.curve{stroke:var(--h)}.first{stroke-width:6;opacity:.34}.second{stroke-dasharray:5 3}
.allowed{fill:none;stroke:var(--muted);stroke-width:1.3;stroke-dasharray:2 4}
.legend{display:flex;flex-wrap:wrap;gap:5px 20px;margin:0 0 12px;font-size:13.5px}
.key{display:inline-block;width:18px;height:0;border-top:3px solid var(--h);vertical-align:middle;margin-right:7px}
.key.first{border-top-width:7px}.key.second{border-top-style:dashed}
.key.allowed{border-top:2px dotted var(--muted)}
.chip{display:inline-block;padding:1px 9px;border-radius:9px;font-size:12.5px;background:var(--grid);color:var(--muted)}
.good{background:var(--good);color:var(--good-ink)}.bad{background:var(--bad);color:var(--bad-ink)}
td small{color:var(--muted);font-size:12px;margin-left:6px}
td.bar{min-width:86px}td.bar .share{height:5px;margin-top:3px}
.dense td,.dense th{padding-left:11px;padding-right:11px}
.part td{background:var(--page);color:var(--muted);font-weight:600}
.tall{max-height:none}th{white-space:nowrap}.text{padding:12px 18px;margin:0}.text p{margin:0 0 8px}
td.why{white-space:normal;min-width:300px}
"""


def colours(hues, good, good_ink, bad, bad_ink):
    rules = "".join(f".h{i}{{--h:{hue}}}" for i, hue in enumerate(hues))
    return rules + f":root{{--good:{good};--good-ink:{good_ink};--bad:{bad};--bad-ink:{bad_ink}}}"


def style():
    found = re.search(r'R"css\((.*)\)css"', STYLE.read_text(encoding="utf-8"), re.S) if STYLE.exists() else None
    check(found, f"the style of reports is not in {STYLE}; run the script from its checkout")
    return (found[1] + OWN_STYLE + colours(HUES_LIGHT, "#dcf3e6", "#14603f", "#fde0df", "#96231f") +
            "@media (prefers-color-scheme:dark){" +
            colours(HUES_DARK, "#173a2b", "#7fdcb0", "#4a2022", "#ff9f9a") + "}")


def bytes_text(count):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.{0 if unit == 'B' or count >= 100 else 1 if count >= 10 else 2}f} {unit}"
        count /= 1024


def time_text(seconds):
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def section(heading, body, note=""):
    return f"<section><h2>{heading}{f'<span>{note}</span>' if note else ''}</h2>\n{body}</section>\n"


def tile(value, label):
    return f'<div class="card tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>\n'


def key(number):
    kind = "first" if number == 0 else "second" if number >= chart.MOST_HUES else ""
    return f'<span class="key h{number % chart.MOST_HUES} {kind}"></span>'


def parts_of(report):
    """Runs that compute the same, together, in the file's order."""
    parts = {}
    for row in report["runs"]:
        parts.setdefault((row["part"], row["seed"]), []).append(row)
    return list(parts.values())


def part_name(report, rows):
    values = [f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in zip(report["separate"], rows[0]["part"])]
    return ", ".join(values + ([f"seed {rows[0]['seed']}"] if len(report["seeds"]) > 1 else []))


def tiles(report):
    rows = [row for row in report["runs"] if "curves" in row]
    right = sum(row["as_expected"] for row in report["runs"])
    text = tile(f"{right} of {len(report['runs'])}", "runs as expected")
    shares = [row[figure]["share"] for row in rows if row["verdict"] for figure in verdict.FIGURES]
    if shares:
        text += tile(results.share_text(max(shares)) if max(shares) else "bit-equal",
                     "largest share of what is allowed" if max(shares) else "loss and gradient norm")
    if rows and len(parts_of(report)) == 1:
        fastest = min(rows, key=lambda row: row["step_time_s"]["median"])
        smallest = min(rows, key=lambda row: row["memory_bytes"])
        text += tile(time_text(fastest["step_time_s"]["median"]), f"shortest step: {fastest['name']}")
        text += tile(bytes_text(smallest["memory_bytes"]), f"least memory: {smallest['name']}")
    return f'<div class="tiles">\n{text}</div>\n'


def figure(title, note, drawing):
    return f'<figure class="card chart" style="margin:0"><h3>{title}<span>{note}</span></h3>{drawing}</figure>\n'


def difference_curves(rows, name):
    """The curve of each run's difference from its reference, and what is allowed: the largest, where runs have several rules."""
    base = rows[0]["curves"][name]
    curves = [chart.Curve(row["name"], number, [None if a is None or b is None else abs(a - b)
                                                for a, b in zip(row["curves"][name], base)])
              for number, row in enumerate(rows) if number and row["verdict"]]
    limits = [row["allowed"][name] for row in rows if row["verdict"]]
    return curves + [chart.Curve("allowed", -1, list(limit)) for limit in sorted(set(map(tuple, limits)))]


def charts(rows):
    """The charts of one part: its first run is the others' reference."""
    drawn = [(number, row) for number, row in enumerate(rows) if "curves" in row]
    legend = "".join(f"<span>{key(number)}{html.escape(row['name'])}</span>" for number, row in drawn)
    cards = ""
    for name, title, unit in (("loss", "Loss", "nats per token"), ("grad_norm", "Gradient norm", "before clipping")):
        curves = [chart.Curve(row["name"], number, row["curves"][name]) for number, row in drawn]
        cards += figure(title, unit, chart.svg(title, curves))
        if "curves" in rows[0] and any(row["verdict"] for row in rows):
            cards += figure(f"{title}: difference", f"to {html.escape(rows[0]['name'])}; what is 0 lies on the axis",
                            chart.svg(f"{title}: difference", difference_curves(rows, name), logarithmic=True))
    legend += '<span><span class="key allowed"></span>allowed</span>'
    return f'<div class="legend">{legend}</div>\n<div class="charts">\n{cards}</div>\n'


def chip(row):
    if row["error"]:
        return f'<span class="chip bad">{"not compared" if "curves" in row else "failed"}</span>'
    if row["verdict"] is None:
        return '<span class="chip">reference</span>'
    weak = ", weak" if row["weak"] else ""
    return f'<span class="chip {"good" if row["as_expected"] else "bad"}">{row["verdict"]}{weak}</span>'


def verdict_rows(rows):
    text = ""
    for number, row in enumerate(rows):
        cells = f"<td>{key(number)}{html.escape(row['name'])}</td><td>{chip(row)}</td>"
        if row["verdict"] is None:
            why = row["error"] or ""
            text += f'<tr>{cells}<td colspan="4" class="why">{html.escape(why)}</td></tr>\n'
            continue
        for name in verdict.FIGURES:
            worst = row[name]
            cells += (f'<td class="n" title="allowed: {worst["allowed"]:.3g}">{worst["largest"]:.2g}</td>'
                      f'<td class="n">{results.share_text(worst["share"])}'
                      f'<small>{"step %d" % worst["step"] if worst["share"] else ""}</small></td>')
        text += f"<tr>{cells}</tr>\n"
    return text


def part_heading(report, rows, columns):
    name = part_name(report, rows)
    return f'<tr class="part"><td colspan="{columns}">{html.escape(name)}</td></tr>\n' if name else ""


def table(head, body, kind=""):
    return f'<div class="card scroll tall"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'


def verdicts(report):
    body = "".join(part_heading(report, rows, 6) + verdict_rows(rows) for rows in parts_of(report))
    head = ('<th>run</th><th>verdict</th><th class="n">loss off by</th><th class="n">of what is allowed</th>'
            '<th class="n">gradient norm off by</th><th class="n">of what is allowed</th>')
    return section("Verdicts", table(head, body, "dense"),
                   "largest difference to the reference, and largest share of what is allowed at a step")


def share_cell(percent, value, largest):
    """Per cent of the first run, and a bar that compares all runs of the table."""
    return (f'<td class="n bar">{"–" if percent is None else f"{percent:.0f} %"}'
            f'<span class="share" style="width:{100 * value / largest if largest else 0:.1f}%"></span></td>')


def cost_cells(row, dimensions, most, has_mfu):
    """Time, memory, traffic. `most`: the largest time and memory of the table."""
    time, memory = row["step_time_s"], row["memory_bytes"]
    half = (time["high"] - time["low"]) / 2
    cells = (f'<td class="n" title="quartiles: {time_text(time["low"])} to {time_text(time["high"])}">'
             f'{time_text(time["median"])}<small>± {100 * half / time["median"]:.0f} %</small></td>'
             f'{share_cell(row.get("step_time_percent"), time["median"], most[0])}'
             f'<td class="n" title="{memory:,} bytes">{bytes_text(memory)}</td>'
             f'{share_cell(row.get("memory_percent"), memory, most[1])}'
             f'<td class="n">{row["tokens_per_s"]:,.0f}</td>')
    if has_mfu:
        cells += f'<td class="n">{"–" if row["mfu"] is None else "%.1f %%" % row["mfu"]}</td>'
    for dimension in dimensions:
        sent = row["comm_bytes"].get(dimension)
        cells += f'<td class="n"{"" if sent is None else f""" title="{sent:,} bytes" """}>{"–" if sent is None else bytes_text(sent)}</td>'
    return cells


def costs(report):
    done = [row for row in report["runs"] if "curves" in row]
    if not done:
        return ""
    axes = list(dict.fromkeys(name for row in done for name in row["labels"]))
    dimensions = list(dict.fromkeys(name for row in done for name in row["comm_bytes"]))
    has_mfu = any(row["mfu"] is not None for row in done)
    most = (max(row["step_time_s"]["median"] for row in done), max(row["memory_bytes"] for row in done))
    first = "".join(f"<th>{html.escape(axis)}</th>" for axis in axes)
    head = (f'<th>run</th>{first}<th class="n">ranks</th><th class="n">step time</th><th class="n">%</th>'
            f'<th class="n">memory</th><th class="n">%</th><th class="n">tokens/s</th>'
            + ('<th class="n">MFU</th>' if has_mfu else "")
            + "".join(f'<th class="n">sent over {html.escape(dimension)}</th>' for dimension in dimensions))
    columns, body = head.count("<th"), ""
    memory = "tensors" if all(row["memory_of"] == "peak_active_bytes" for row in done) else "process or device"
    for rows in parts_of(report):
        body += part_heading(report, rows, columns)
        for number, row in enumerate(rows):
            if "curves" in row:
                name = html.escape(row["name"])
                cells = "".join(f"<td>{html.escape(row['labels'].get(axis, ''))}</td>" for axis in axes)
                # The axes' values are the name.
                shown = key(number) + ("" if row["labels"] else name)
                body += (f'<tr><td title="{name}">{shown}</td>{cells}<td class="n">{row["ranks"]}</td>'
                         f"{cost_cells(row, dimensions, most, has_mfu)}</tr>\n")
    return section("Time, memory, traffic", table(head, body, "dense"),
                   f"of rank 0; median step ± half of what lies between the quartiles; peak memory of its {memory}; "
                   "bytes that it puts in, in the last step; % of the reference")


def method(report):
    rules = {row["rule"] for row in report["runs"] if row["verdict"]}
    text = ""
    if "fp32" in rules:
        text += (f"<p>In fp32 runs may differ by rounding. The reference is run again {report['perturbed']} times from weights "
                 "with the last bit of every second one flipped. A sum of n terms in another order is at most √n times such "
                 "a change, in each of three kinds of products, in two runs, and in each of t steps anew: at step t the largest "
                 "change so far times √(6·n·t) is allowed (a unit in the last printed place of it only √(6·t) times), and "
                 "2·√(n·t)·2<sup>−24</sup> of the figure itself. n is the longest sum of a step.</p>")
    for rule in sorted(rules - {"fp32"}):
        text += (f"<p>In {rule} its last bit is flipped, and n of √(6·n·t) is twice the number of ranks: products add in fp32, "
                 "and round their results, as do the functions behind them. No more is allowed than the largest difference between two seeds so far, where seeds "
                 "change anything.</p>")
    for rule in sorted(rules):
        first = next(row for row in report["runs"] if row["verdict"] and row["rule"] == rule)
        text += f"<p>{html.escape(first['name'])} ({rule}) {html.escape(results.limits_text(first))}.</p>"
    return section("What is allowed", f'<div class="card text">{text}</div>\n') if text else ""


def settings(report):
    items = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(json.dumps(value).strip(chr(34)))}</dd></div>\n"
                    for name, value in report["flags"].items())
    return section("Flags of all runs", f'<dl class="card">\n{items}</dl>\n') if items else ""


def made_html(report):
    title, count = html.escape(report["title"]), len(report["runs"])
    curves = "".join(section("Curves", charts(rows), html.escape(part_name(report, rows))) for rows in parts_of(report))
    body = (f"<header><h1>{title}</h1><p>{count} runs of {html.escape(report['program'])}</p></header>\n"
            f"{tiles(report)}{verdicts(report)}{costs(report)}{curves}{method(report)}{settings(report)}")
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
            f"<title>{title}</title>\n<style>{style()}</style></head>\n<body><main>\n{body}"
            "<footer>Written by Tessera.</footer>\n</main></body></html>\n")


def plain(value):
    """JSON has no numbers that are not finite."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(report, folder):
    """Both files; older ones are replaced at the end."""
    write_whole(folder.path / "report.json", json.dumps(plain(report), indent=1) + "\n")
    write_whole(folder.path / "report.html", made_html(report))
