#!/usr/bin/env python3
"""Plots the JSON files of Tessera's programs. Each page is one self-contained HTML file.

    tessera_plot.py run METRICS.jsonl        a run of llama_train --metrics, with run.json in the same folder
    tessera_plot.py plan PLAN.json           of llama_plan --json, with its search, or of vit_train --plan --json
    tessera_plot.py experiment REPORT.json   of examples/experiments/run
    tessera_plot.py mfu RESULTS.json         of bench_mfu

    --out FILE.html     the page (default: report.html next to the input, or the input's name with .html)
    --sample FILE       run: a text that the model wrote
Needs matplotlib, which scripts/setup installs: .deps/venv/bin/python tools/tessera_plot.py ...
"""
import argparse
import html
import io
import json
import math
import pathlib
import re
import statistics
import sys

import matplotlib
matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: E402

# Colours of the page, light and dark. Pictures contain placeholders, which the page's CSS variables replace.
PALETTE = {name: colours.split("/") for name, colours in (pair.split("=") for pair in """
page=#f6f7f9/#11151b card=#fff/#191f27 ink=#1a1f27/#e4e8ee muted=#647084/#97a3b4 rule=#e3e7ed/#2b333e grid=#edf0f4/#252c36 accent=#2f6fed/#6ea2ff
bad=#d1453b/#ff7a70 good=#14603f/#7fdcb0 p0=#2f6fed/#6ea2ff p1=#8a63d2/#b094f0 p2=#d9822b/#eba15a p3=#1d9a8a/#45c2b1 p4=#e0b13c/#e8c765
p5=#58a55c/#80c784 p6=#a3acb9/#7c8797 h0=#2f6fed/#6ea2ff h1=#e0701a/#f39a4e h2=#1c9a6c/#4fcb9c h3=#b5379b/#e47fd0 h4=#8a6d00/#d6b43c
h5=#0e93b8/#4cc4e6 h6=#c93a3a/#f57f7f h7=#6b5bd6/#a99bff""".split())}
COLOUR = {name: f"#01{number:02x}fe" for number, name in enumerate(PALETTE)}
HUES = 8
STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1180px;margin:0 auto;padding:36px 24px 56px}
header{margin-bottom:24px}h1{margin:0;font-size:25px;font-weight:650;line-height:1.25}header p{margin:6px 0 0;color:var(--muted)}
h2{margin:34px 0 12px;font-size:16px;font-weight:650}h3{margin:0 0 6px;font-size:14px;font-weight:600}
h3 span,h2 span{color:var(--muted);font-weight:400;margin-left:6px}.card{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tile{padding:13px 16px}.tile b{display:block;font-size:21px;font-weight:600;line-height:1.3}.tile span{color:var(--muted);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:12px}figure{margin:0 0 12px;padding:14px 14px 8px}.charts figure{margin:0}
svg{display:block;width:100%;height:auto}svg text{font-family:inherit!important}
[id^=stripe]:hover path{fill:var(--accent)!important;opacity:.09!important}[id^=tip]:hover{opacity:.72}.scroll{overflow:auto;max-height:560px}
table{width:100%;border-collapse:collapse;font-size:13.5px}th,td{padding:7px 14px;text-align:left;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{position:sticky;top:0;background:var(--card);color:var(--muted);font-weight:500;box-shadow:inset 0 -1px var(--rule)}
tbody tr:hover td{background:var(--grid)}tr:last-child td{border-bottom:0}.n{text-align:right}
.total td{font-weight:600;box-shadow:inset 0 1px var(--rule)}.part td{background:var(--page);color:var(--muted);font-weight:600}
.share{display:block;height:7px;border-radius:4px;background:var(--accent);min-width:2px;opacity:.75}td.wide{width:34%}
td small{color:var(--muted);font-size:12px;margin-left:6px}.why{white-space:normal;min-width:300px}
pre,td.name{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12.5px}
pre{margin:0;padding:16px 18px;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:0 28px;margin:0;padding:9px 18px}
dl div{display:flex;justify-content:space-between;gap:18px;padding:5px 0;border-bottom:1px solid var(--grid);font-size:13.5px}
dt{color:var(--muted);white-space:nowrap}dd{margin:0;text-align:right;overflow-wrap:anywhere}
.empty{margin:0;padding:20px 16px;color:var(--muted)}.text{padding:12px 18px}.text p{margin:0 0 8px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:2px 0 10px;font-size:13px;color:var(--muted)}
.key{display:inline-block;width:18px;border-top:3px solid;vertical-align:middle;margin-right:7px}
.box{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.over{color:var(--bad)!important}.chip{padding:1px 9px;border-radius:9px;font-size:12.5px;background:var(--grid);color:var(--muted)}
.chip.good{color:var(--good)}.chip.bad{color:var(--bad)}@media (max-width:560px){main{padding:20px 12px}.charts{grid-template-columns:1fr}}
"""
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tessera", "font.size": 9, "text.color": COLOUR["muted"],
                     "axes.edgecolor": COLOUR["rule"], "axes.labelcolor": COLOUR["muted"], "axes.axisbelow": True,
                     "xtick.color": COLOUR["muted"], "ytick.color": COLOUR["muted"], "grid.color": COLOUR["grid"],
                     "xtick.major.width": 0.6, "ytick.major.size": 0, "axes.spines.top": False, "axes.spines.right": False,
                     "axes.spines.left": False, "axes.grid": True, "axes.grid.axis": "y"})

# ---- Numbers and pieces of HTML.
def esc(text):
    return html.escape("".join(c if c >= " " and c != "\x7f" or c in "\t\n" else "\ufffd" for c in str(text)))

def bytes_text(count):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.{0 if unit == 'B' or count >= 100 else 1 if count >= 10 else 2}f} {unit}"
        count /= 1024

def time_text(seconds):
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"

def duration_text(seconds):
    for size, unit, small, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{round(seconds) // size}{unit}{round(seconds) % size // small:02}{rest}"
    return f"{round(seconds)}s"

def compact(value, _=None):
    for limit, scale, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"

def tiles(items):
    return '<div class="tiles">\n' + "".join(f'<div class="card tile"><b>{esc(value)}</b><span>{esc(label)}</span></div>\n' for value, label in items) + "</div>\n"

def section(heading, body, note=""):
    return f"<section><h2>{esc(heading)}{f'<span>{esc(note)}</span>' if note else ''}</h2>\n{body}</section>\n" if body else ""

def card(title, note, body):
    heading = f"<h3>{esc(title)}<span>{esc(note)}</span></h3>" if title else ""
    return f'<figure class="card">{heading}{body}</figure>\n'

def table(head, rows, kind=""):
    """Returns an HTML table. `head`: column names; a name that ends in > marks a column of numbers. `rows`: HTML."""
    cells = "".join(f'<th class="n">{esc(name[:-1])}</th>' if name.endswith(">") else f"<th>{esc(name)}</th>" for name in head)
    return f'<div class="card scroll"{kind}><table><thead><tr>{cells}</tr></thead><tbody>\n{rows}</tbody></table></div>\n'

def row(cells, kind=""):
    """Returns a table row. A cell is a text, or (text, tooltip) for a number."""
    made = "".join(f'<td class="n" title="{esc(cell[1])}">{esc(cell[0])}</td>' if isinstance(cell, tuple) else f"<td>{esc(cell)}</td>" for cell in cells)
    return f'<tr class="{kind}">{made}</tr>\n'

def listing(items):
    return '<dl class="card">\n' + "".join(f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>\n" for name, value in items) + "</dl>\n" if items else ""

def boxes(items):
    return '<div class="legend">' + "".join(f'<span><i class="box" style="background:var(--{colour})"></i>{esc(name)}</span>' for name, colour in items) + "</div>\n"

def page(title, body):
    def variables(which):
        return ":root{" + ";".join(f"--{name}:{colours[which]}" for name, colours in PALETTE.items()) + "}"
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">\n'
            f"<title>{esc(title)}</title>\n<style>:root{{color-scheme:light dark}}{variables(0)}"
            f"@media (prefers-color-scheme:dark){{{variables(1)}}}{STYLE}</style></head>\n<body><main>\n{body}</main></body></html>\n")

def traffic_table(comm):
    rows, flat = [], [(dim, name, use) for dim, uses in comm.items() for name, use in uses.items()]
    everything = sum(use["bytes"] for _, _, use in flat)
    for dim, name, use in flat:
        share = 100 * use["bytes"] / everything if everything else 0
        cells = row([dim, name, (f"{use['calls']:,}", ""), (bytes_text(use["bytes"] / use["calls"]), ""), (bytes_text(use["bytes"]), f"{use['bytes']:,} bytes")])
        rows.append(cells.replace("</tr>", f'<td class="wide"><span class="share" style="width:{share:.1f}%" title="{share:.1f} %"></span></td></tr>'))
    if not rows:
        return '<div class="card"><p class="empty">None: one rank.</p></div>\n'
    calls = f"{sum(use['calls'] for _, _, use in flat):,}"
    rows.append(row(["total", "", (calls, ""), "", (bytes_text(everything), f"{everything:,} bytes"), ""], "total"))
    return table(["mesh dimension", "collective", "calls>", "per call>", "per step>", "share of bytes"], "".join(rows))

# ---- Pictures.
class Picture:
    """A matplotlib figure with one pair of axes and tooltips."""
    def __init__(self, name, width=7.8, height=3.28, left=0.62):
        self.name, self.tips = name, []
        self.figure = plt.figure(figsize=(width, height))
        self.axes = self.figure.add_axes((left / width, 0.42 / height, 1 - (left + 0.2) / width, 1 - 0.62 / height))
    def tip(self, artist, text, kind="tip"):
        artist.set_gid(f"{kind}-{len(self.tips)}")
        self.tips.append(text)
        return artist
    def box(self, x, y, width, height, colour, text, alpha=None, kind="tip"):
        patch = Rectangle((x, y), width, height, facecolor=COLOUR[colour], linewidth=0, alpha=alpha)
        self.axes.add_patch(self.tip(patch, text, kind))
    def stripes(self, places, texts):
        """Adds invisible columns, each with a tooltip."""
        low, high = self.axes.get_ylim()
        most, count = 120, len(places)
        chosen = range(count) if count <= most else [(count - 1) * i // (most - 1) for i in range(most)]
        width = (places[-1] - places[0]) / max(len(chosen) - 1, 1) or 1
        for i in chosen:
            self.box(places[i] - width / 2, low, width, high - low, "accent", texts[i], alpha=0.001, kind="stripe")
        self.axes.set_ylim(low, high)
    def svg(self):
        file = io.StringIO()
        self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(self.figure)
        text = file.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg"):], flags=re.S)
        text = re.sub(r'<svg[^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
                      rf'aria-label="{esc(self.name)}">', text, count=1, flags=re.S)
        text = re.sub(r'<g id="((?:tip|stripe)-(\d+))">', lambda found: f"{found[0]}<title>{esc(self.tips[int(found[2])])}</title>", text)
        for name, colour in COLOUR.items():
            text = text.replace(colour, f"var(--{name})")
        return re.sub(r"\n\s*", "\n", text)

def thinned(points, most=600):
    """Reduces points to the minimum and maximum of each group, so that peaks stay visible."""
    if len(points) <= most:
        return points
    groups = most // 2
    parts = [points[len(points) * group // groups:len(points) * (group + 1) // groups] for group in range(groups)]
    return [point for part in parts for point in sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})]

def running_mean(points, reach):
    return [(step, statistics.fmean(value for _, value in points[max(0, i - reach):i + reach + 1])) for i, (step, _) in enumerate(points)]

def upright(axes, names, low, high):
    """Labels one row for each name, with the first name on top."""
    axes.set(xlim=(low, high), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")

def under_left(axes, text):
    axes.annotate(text, (0, 0), xytext=(-24, -7), xycoords="axes fraction", textcoords="offset points", ha="right", va="top")

def steps_axis(axes, first, last):
    axes.set_xlim(first, max(last, first + 1))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    under_left(axes, "step")

def curve(title, unit, points, smooth=True, from_zero=False, may_be_logarithmic=False):
    """Returns a card with one curve over the steps. Values that are not finite are omitted."""
    points = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    if not points:
        return card(title, unit, '<p class="empty">no finite values</p>')
    picture = Picture(title)
    axes, values = picture.axes, [value for _, value in points]
    reach = len(points) // 80 if smooth else 0
    axes.plot(*zip(*thinned(points)), color=COLOUR["accent"], linewidth=0.9 if reach else 1.6, alpha=0.32 if reach else 1, marker="o" if len(points) == 1 else None)
    if reach:
        axes.plot(*zip(*thinned(running_mean(points, reach))), color=COLOUR["accent"], linewidth=1.6)
    if may_be_logarithmic and min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
    elif from_zero:
        axes.set_ylim(min(0, min(values)), 1.08 * max(values) or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(compact))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    steps_axis(axes, points[0][0], points[-1][0])
    picture.stripes([step for step, _ in points], [f"step {step}: {compact(value)} {unit}" for step, value in points])
    return card(title, unit, picture.svg())

# ---- A run.
def run_page(path, sample):
    steps = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    if not steps:
        sys.exit(f"tessera_plot: {path} has no steps")
    record = path.with_name("run.json")
    record = json.loads(record.read_text()) if record.exists() else {"title": path.stem, "configuration": {}, "sharding": []}
    last = steps[-1]
    def median(name):
        return statistics.median(step[name] for step in steps if step.get(name) is not None)
    uses = [use for uses in last["comm"].values() for use in uses.values()]
    items = [("NaN" if last["loss"] is None else f"{last['loss']:.4f}", "loss, last step"), (f"{median('tokens_per_s'):,.0f}", "tokens/s, median"),
             (time_text(median("step_time_s")), "step time, median"), (f"{median('tflops'):.4g}", "TFLOP/s per rank")]
    if last.get("mfu") is not None:
        items.append((f"{median('mfu'):.1f} %", f"MFU, median (causal {median('mfu_causal'):.1f} %)"))
    items += [(bytes_text(last["peak_memory_bytes"]), "peak memory, rank 0"),
              (bytes_text(sum(use["bytes"] for use in uses)), f"sent a step, {sum(use['calls'] for use in uses):,} collectives")]
    def points(name, scale=1):
        return [(step["step"], None if step.get(name) is None else step[name] / scale) for step in steps]
    unit, scale = ("GiB", 2**30) if last["peak_memory_bytes"] >= 2**30 else ("MiB", 2**20)
    charts = curve("Loss", "nats per token", points("loss"))
    if any("eval_loss" in step for step in steps):
        charts += curve("Held-out loss", "nats per token", points("eval_loss"), smooth=False)
    charts += curve("Gradient norm", "before clipping", points("grad_norm"), may_be_logarithmic=True)
    if "expert_load" in last:
        charts += curve("Load of experts", "largest over mean", points("expert_load"))
        charts += curve("Load-balancing loss", "without its coefficient", points("router_aux_loss"))
        charts += curve("Router z-loss", "without its coefficient", points("router_z_loss"))
    charts += curve("Throughput", "tokens/s", points("tokens_per_s"), from_zero=True)
    charts += curve("Peak memory of rank 0", unit, points("peak_memory_bytes", scale), smooth=False, from_zero=True)
    rows = "".join(row([entry["name"], (" × ".join(map(str, entry["sizes"])) or "scalar", ""), entry["placements"],
                        (" × ".join(map(str, entry["local_sizes"])) or "scalar", ""),
                        (bytes_text(entry["local_bytes"]), f"{entry['local_bytes']:,} bytes")]) for entry in record["sharding"])
    elements = sum(math.prod(entry["sizes"]) for entry in record["sharding"])
    summary = f"{len(steps):,} steps in {duration_text(sum(step['step_time_s'] for step in steps))}"
    body = (f"<header><h1>{esc(record['title'])}</h1><p>{summary}</p></header>\n" + tiles(items) + section("Curves", f'<div class="charts">\n{charts}</div>\n')
            + section("Communication", traffic_table(last["comm"]), f"of rank 0 in step {last['step']}; bytes that the rank puts in")
            + section("Sample", f'<div class="card"><pre>{esc(sample)}</pre></div>\n' if sample else "")
            + section("Configuration", listing(list(record["configuration"].items())))
            + section("Sharding", table(["parameter", "global size>", "placements", "local size>", "on rank 0>"], rows) if rows else "",
                      f"{elements:,} parameters in {len(record['sharding'])} tensors, "
                      f"{bytes_text(sum(entry['local_bytes'] for entry in record['sharding']))} on rank 0"))
    return page(record["title"], body)

# ---- A plan, and a search.
KINDS = ["parameters", "optimizer", "gradients", "gathered parameters", "gradients on the way", "activations", "temporary"]
ON_HOST = KINDS[:3]  # memory kinds that are on the host with FSDP offloading
PHASES = {"forward": "p0", "backward": "p1", "update": "p5", "all_gather": "p3", "reduce_scatter": "p2", "all_reduce": "p4", "waiting": "bad"}

def memory_picture(plan, kind):
    """Draws the live memory of a step as one bar for each moment; the highest bar is labelled."""
    moments = kind["moments"]
    picture = Picture("memory over the step", 15.5, 4.05)
    axes, peak = picture.axes, max(moments, key=lambda moment: moment["bytes"])
    unit, scale, room = *(("GiB", 2**30) if peak["bytes"] >= 2**30 else ("MiB", 2**20)), plan["room_bytes"]
    shows_room = room is not None and room < 2 * peak["bytes"]
    most = max(peak["bytes"], room if shows_room else 0) / scale
    for i, moment in enumerate(moments):
        base = 0
        for number, name in enumerate(KINDS):
            count = moment["live"].get(name, 0) / scale
            if count and not (plan["offload"] and plan["device"] == "cuda" and name in ON_HOST):
                picture.box(i, base, 0.9, count, f"p{number}", f"{moment['name']}: {bytes_text(moment['bytes'])}, of which {name} " f"{bytes_text(count * scale)}")
                base += count
    if shows_room:
        axes.axhline(room / scale, color=COLOUR["bad"], linestyle=(0, (5, 4)), linewidth=1)
        axes.text(len(moments), room / scale, f"{bytes_text(room)} of a {plan['gpu']} ", color=COLOUR["bad"], ha="right", va="bottom")
    at = moments.index(peak) + 0.45
    left = at > 0.6 * len(moments)
    axes.text(at, peak["bytes"] / scale + 0.015 * most, f"{bytes_text(peak['bytes'])} in {peak['name']}", color=COLOUR["ink"],
              fontweight="bold", ha="right" if left else "left", va="bottom")
    phases = [moment["name"].split(" of ")[0].removeprefix("the ") for moment in moments]
    starts = [i for i in range(len(phases)) if i == 0 or phases[i] != phases[i - 1]] + [len(phases)]
    for begin, end in zip(starts, starts[1:]):
        axes.plot([begin + 0.05, end - 0.15], [-0.02 * most] * 2, color=COLOUR["muted"], linewidth=1, clip_on=False)
        if end - begin > 0.04 * len(phases):
            axes.text((begin + end) / 2, -0.035 * most, phases[begin], ha="center", va="top")
    axes.set(xlim=(0, len(moments)), ylim=(0, 1.14 * most), xticks=[])
    axes.set_ylabel(unit, rotation=0, loc="top")
    return picture.svg()

def drawn_spans(spans, near):
    """Merges spans that are too close to be distinguished: [what, begin, end, count]."""
    drawn = []
    for what, begin, end in spans:
        if drawn and drawn[-1][0] == what and begin - drawn[-1][2] < near:
            drawn[-1][2:] = [max(drawn[-1][2], end), drawn[-1][3] + 1]
        else:
            drawn.append([what, begin, end, 1])
    return drawn

def timeline_picture(kind, begin, end):
    """Draws operators, waiting, and the collectives of each mesh dimension, between two times in seconds."""
    rows = ["operators", "waiting", *kind["communication_s"]]
    picture = Picture("time line", 15.5, 0.62 + 0.36 * len(rows), left=1.2)
    unit, scale = ("ms", 1e-3) if end - begin < 1 else ("s", 1)
    for number, name in enumerate(rows):
        spans = [span for span in kind["spans"].get(name, []) if span[2] > begin and span[1] < end]
        for what, first, last, count in drawn_spans(spans, (end - begin) / 3000):
            text = f"{'waits for ' if name == 'waiting' else ''}{what}{f' ({count} times)' if count > 1 else ''}, {1e3 * first:.3f} to {1e3 * last:.3f} ms"
            left = max(first, begin)
            width = max(min(last, end) - left, (end - begin) / 3000)
            picture.box(left / scale, number - 0.35, width / scale, 0.7, PHASES.get("waiting" if name == "waiting" else what, "p6"), text)
    axes = picture.axes
    upright(axes, rows, begin / scale, end / scale)
    under_left(axes, unit)
    return picture.svg()

def layout_name(layout):
    return (f"dp {layout['dp']} × tp {layout['tp']}{' × cp %d' % layout['cp'] if layout['cp'] > 1 else ''}, ac {layout['ac']}, "
            f"ZeRO-{layout['zero']}{', %d micro-batches' % layout['accumulate'] if layout['accumulate'] > 1 else ''}")

def search_picture(search):
    """Draws the memory of each training layout over its time, with the frontier as a line."""
    room = search["room_bytes"]
    shown = [layout for layout in search["layouts"] if layout["peak_bytes"] <= 1.3 * room] or search["layouts"][:1]
    picture = Picture("memory over time of layouts", 15.5, 5)
    axes, scale = picture.axes, 2**30
    times, sizes = [layout["step_time_s"] for layout in shown], [layout["peak_bytes"] / scale for layout in shown]
    axes.set_xlim(0.97 * min(times), 1.03 * max(times))
    axes.set_ylim(0.9 * min(*sizes, room / scale), 1.04 * max(*sizes, room / scale))
    axes.axhspan(room / scale, axes.get_ylim()[1], color=COLOUR["bad"], alpha=0.08, linewidth=0)
    axes.axhline(room / scale, color=COLOUR["bad"], linestyle=(0, (5, 4)), linewidth=1)
    axes.text(axes.get_xlim()[1], room / scale, f"{bytes_text(room)} of a {search['gpu']} ", color=COLOUR["bad"], ha="right", va="bottom")
    best = [layout for layout in shown if layout["frontier"]]
    if best:
        axes.step([layout["step_time_s"] for layout in best], [layout["peak_bytes"] / scale for layout in best], where="post",
                  color=COLOUR["accent"], linewidth=1.4, alpha=0.6)
    labelled = None
    width, height = (high - low for low, high in (axes.get_xlim(), axes.get_ylim()))
    for layout in shown:
        x, y = layout["step_time_s"], layout["peak_bytes"] / scale
        colour, face = ("bad", "none") if not layout["fits"] else ("accent", None) if layout["frontier"] else ("muted", None)
        point, = axes.plot(x, y, "o", color=COLOUR[colour], markerfacecolor=face or COLOUR[colour], markersize=7 if layout["frontier"] else 5)
        picture.tip(point, f"{layout_name(layout)}: {bytes_text(layout['peak_bytes'])}, {layout['step_time_s']:.3f} s")
        if layout["frontier"] and (labelled is None or abs(x - labelled[0]) > 0.17 * width or abs(y - labelled[1]) > 0.05 * height):
            left = x - axes.get_xlim()[0] > 0.8 * width
            axes.annotate(layout_name(layout), (x, y), xytext=(-8 if left else 8, 5), textcoords="offset points", ha="right" if left else "left",
                          color=COLOUR["ink"], fontweight="bold")
            labelled = (x, y)
    axes.set_ylabel("GiB", rotation=0, loc="top")
    axes.set_xlabel("seconds a step", loc="right")
    return picture.svg()

def search_section(search):
    has_cp = any(layout["cp"] > 1 for layout in search["layouts"])
    has_parts = any(layout["accumulate"] > 1 for layout in search["layouts"])
    rows = ""
    for layout in search["layouts"]:
        cells = [(layout["dp"], ""), (layout["tp"], "")] + ([(layout["cp"], "")] if has_cp else []) + [layout["ac"], (layout["zero"], "")]
        cells += ([(layout["accumulate"], "")] if has_parts else []) + [
            (bytes_text(layout["peak_bytes"]), layout["peak_moment"]), (f"{layout['step_time_s']:.3f} s", ""), (f"{layout['exposed_s']:.3f} s", ""),
            (f"{layout['mfu']:.1f} %", ""), (f"{layout['tokens_per_s']:,.0f}", ""), "frontier" if layout["frontier"] else "" if layout["fits"] else "too large"]
        rows += row(cells)
    head = ["dp>", "tp>"] + (["cp>"] if has_cp else []) + ["ac", "ZeRO>"] + (["micro-batches>"] if has_parts else [])
    return section("Layouts", card("", "", search_picture(search)) + table(head + ["peak>", "step>", "exposed>", "MFU>", "tokens/s>", ""], rows),
                   "memory and step time of the estimated layouts; the line is the frontier")

def plan_page(path):
    plan = json.loads(path.read_text())
    kinds = plan["kinds"]
    largest = max(kinds, key=lambda kind: kind["peak_bytes"])
    title = f"Plan of {plan.get('model', path.stem)}: {plan['ranks']} ranks{' of ' + plan['gpu'] if plan['gpu'] else ''}"
    settings = " × ".join(f"{name} {size}" for name, size in plan["mesh"].items() if size > 1) or "one rank"
    uses = [use for uses in largest["comm"].values() for use in uses.values()]
    items = [(bytes_text(largest["peak_bytes"]), "peak memory, largest kind of rank")]
    if largest["step_time_s"] is not None:
        items.append((time_text(largest["step_time_s"]), "step time, estimated"))
        if largest["mfu"] is not None:
            items += [(f"{largest['mfu']:.1f} %", "MFU, estimated"), (f"{largest['tokens_per_s']:,.0f}", "tokens/s, estimated")]
        items.append((f"{100 * sum(largest['exposed_s'].values()) / largest['step_time_s']:.1f} %", "of the step waits for collectives"))
    items.append((bytes_text(sum(use["bytes"] for use in uses)), f"sent a step, {sum(use['calls'] for use in uses):,} collectives"))
    if "experts" in plan:
        items += [(f"{plan['experts']['active_parameters']:,}", f"parameters compute a token, of {plan['experts']['parameters']:,}"),
                  (f"{plan['experts']['largest_rows']:,.0f}", f"rows of the largest expert in a micro-batch, {plan['experts']['most_rows']:,.0f} in the worst case")]
    memory = boxes([(name, f"p{number}") for number, name in enumerate(KINDS)])
    for kind in kinds:
        heading = ("", "") if len(kinds) == 1 else (f"rank {kind['rank']}", f"one of {kind['ranks']:,} alike")
        memory += card(*heading, memory_picture(plan, kind))
    times = ""
    if largest["spans"]:
        times = boxes(PHASES.items()) + card("", "", timeline_picture(largest, 0, largest["step_time_s"]))
        backward = [span for span in largest["spans"]["operators"] if span[0] == "backward"]
        if backward:
            begin, end = backward[0][1], backward[-1][2]
            half = (end - begin) * min(3 / plan.get("layers", 1), 1) / 2
            times += card("A few layers of backward", "", timeline_picture(largest, (begin + end) / 2 - half, (begin + end) / 2 + half))
    advice = "".join(f"<li>{esc(line)}</li>" for line in plan["advice"])
    body = (f"<header><h1>{esc(title)}</h1><p>{esc(settings)}</p><p class=\"{'over' if plan['fits'] is False else ''}\">{esc(plan['verdict'])}</p>"
            f"<ul>{advice}</ul></header>\n" + tiles(items) + (search_section(plan["search"]) if "search" in plan else "")
            + section("Memory over the step", memory, "peak while each unit is active, by kind")
            + section("Communication", traffic_table(largest["comm"]), f"of rank {largest['rank']} in a step; bytes that the rank puts in")
            + section("Time line", times, f"of rank {largest['rank']}, estimated") + section("Configuration", listing(list(plan.get("flags", {}).items()))))
    return page(title, body)

# ---- An experiment.
def share_text(share):
    return "∞ times" if share is None else f"{100 * share:.2g} %" if share <= 1 else f"{share:.3g} times"

def run_style(number):
    """The first curve is broad and pale, so that curves on top of it are visible; when the hues repeat, curves are
    dashed."""
    if number < 0:
        return {"color": COLOUR["muted"], "linewidth": 1.1, "linestyle": (0, (2, 3))}
    return {"color": COLOUR[f"h{number % HUES}"], "linewidth": 5 if number == 0 else 1.6, "alpha": 0.34 if number == 0 else 1,
            "linestyle": "--" if number >= HUES else "-"}

def run_key(number):
    line = "dotted" if number < 0 else "dashed" if number >= HUES else "solid"
    return f'<i class="key" style="border-top-style:{line};border-color:var(--{"muted" if number < 0 else f"h{number % HUES}"})"></i>'

def runs_chart(title, note, curves, logarithmic=False):
    """`curves`: (name, number, values by step)."""
    known = [value for _, _, values in curves for value in values if value is not None and (value > 0 or not logarithmic)]
    if not known:
        return card(title, note, '<p class="empty">No difference at any step.</p>' if logarithmic else '<p class="empty">no finite values</p>')
    picture = Picture(title, left=0.7)
    axes, count = picture.axes, max(len(values) for _, _, values in curves)
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(min(known))), 10 ** math.ceil(math.log10(max(known)) + 0.01))
    floor = axes.get_ylim()[0]
    for _, number, values in curves:
        style = run_style(number) if not (logarithmic and number == 0) else run_style(1)
        axes.plot(range(1, len(values) + 1), [math.nan if value is None else max(value, floor) if logarithmic else value for value in values], **style)
    steps_axis(axes, 1, count)
    texts = ["\n".join([f"step {i + 1}"] + [f"{name}: {values[i]:.7g}" for name, _, values in curves if i < len(values) and values[i] is not None])
             for i in range(count)]
    picture.stripes(list(range(1, count + 1)), texts)
    return card(title, note, picture.svg())

def part_charts(rows):
    drawn = [(number, run) for number, run in enumerate(rows) if "curves" in run]
    legend = "".join(f"<span>{run_key(number)}{esc(run['name'])}</span>" for number, run in drawn) + f"<span>{run_key(-1)}allowed</span>"
    cards = ""
    for figure, title, unit in (("loss", "Loss", "nats per token"), ("grad_norm", "Gradient norm", "before clipping")):
        cards += runs_chart(title, unit, [(run["name"], number, run["curves"][figure]) for number, run in drawn])
        judged = [(number, run) for number, run in enumerate(rows) if run["verdict"]]
        if "curves" in rows[0] and judged:
            base = rows[0]["curves"][figure]
            curves = [(run["name"], number, [None if a is None or b is None else abs(a - b) for a, b in zip(run["curves"][figure], base)]) for number, run in judged]
            curves += [("allowed", -1, list(limit)) for limit in sorted({tuple(run["allowed"][figure]) for _, run in judged})]
            cards += runs_chart(f"{title}: difference", f"to {rows[0]['name']}; a difference of 0 lies on the axis", curves, logarithmic=True)
    return f'<div class="legend">{legend}</div>\n<div class="charts">\n{cards}</div>\n'

def verdict_row(number, run):
    if run["error"]:
        chip = f'<span class="chip bad">{"not compared" if "curves" in run else "failed"}</span>'
    elif run["verdict"] is None:
        chip = '<span class="chip">reference</span>'
    else:
        chip = f'<span class="chip {"good" if run["as_expected"] else "bad"}">{run["verdict"]}{", weak" if run["weak"] else ""}</span>'
    cells = f"<td>{run_key(number)}{esc(run['name'])}</td><td>{chip}</td>"
    if run["verdict"] is None:
        return f'<tr>{cells}<td colspan="4" class="why">{esc(run["error"] or "")}</td></tr>\n'
    for figure in ("loss", "grad_norm"):
        worst = run[figure]
        off = "∞" if worst["largest"] is None else f"{worst['largest']:.2g}"
        cells += (f'<td class="n" title="allowed: {worst["allowed"]}">{off}</td><td class="n">{share_text(worst["share"])}'
                  f'<small>{"step %d" % worst["step"] if worst["share"] != 0 else ""}</small></td>')
    return f"<tr>{cells}</tr>\n"

def cost_row(number, run, axes, dimensions, most, has_mfu):
    time, memory = run["step_time_s"], run["memory_bytes"]
    def share(name, value, largest):
        percent = run.get(name)
        return (f'<td class="n">{"–" if percent is None else f"{percent:.0f} %"}'
                f'<span class="share" style="width:{100 * value / largest if largest else 0:.1f}%"></span></td>')
    cells = f"<td title=\"{esc(run['name'])}\">{run_key(number)}{'' if run['labels'] else esc(run['name'])}</td>"
    cells += "".join(f"<td>{esc(run['labels'].get(axis, ''))}</td>" for axis in axes) + f'<td class="n">{run["ranks"]}</td>'
    cells += (f'<td class="n" title="quartiles: {time_text(time["low"])} to {time_text(time["high"])}">{time_text(time["median"])}'
              f'<small>± {50 * (time["high"] - time["low"]) / time["median"]:.0f} %</small></td>{share("step_time_percent", time["median"], most[0])}'
              f'<td class="n" title="{memory:,} bytes">{bytes_text(memory)}</td>{share("memory_percent", memory, most[1])}'
              f'<td class="n">{run["tokens_per_s"]:,.0f}</td>')
    if has_mfu:
        cells += f'<td class="n">{"–" if run["mfu"] is None else "%.1f %%" % run["mfu"]}</td>'
    cells += "".join(f'<td class="n">{bytes_text(run["comm_bytes"][dim]) if dim in run["comm_bytes"] else "–"}</td>' for dim in dimensions)
    return f"<tr>{cells}</tr>\n"

def experiment_page(path):
    report = json.loads(path.read_text())
    parts = {}
    for run in report["runs"]:
        parts.setdefault((json.dumps(run["part"]), run["seed"]), []).append(run)
    def part_name(rows):
        values = [f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in zip(report["separate"], rows[0]["part"])]
        return ", ".join(values + ([f"seed {rows[0]['seed']}"] if len(report["seeds"]) > 1 else []))
    def in_parts(columns, make):
        text = ""
        for rows in parts.values():
            name = part_name(rows)
            text += f'<tr class="part"><td colspan="{columns}">{esc(name)}</td></tr>\n' if name else ""
            text += "".join(make(number, run) for number, run in enumerate(rows))
        return text
    done = [run for run in report["runs"] if "curves" in run]
    items = [(f"{sum(run['as_expected'] for run in report['runs'])} of {len(report['runs'])}", "runs as expected")]
    shares = [run[figure]["share"] for run in done if run["verdict"] for figure in ("loss", "grad_norm")]
    if shares:
        worst = None if None in shares else max(shares)
        items.append(("bit-equal", "loss and gradient norm") if worst == 0 else (share_text(worst), "largest share of the allowed difference"))
    if done and len(parts) == 1:
        fastest, smallest = min(done, key=lambda run: run["step_time_s"]["median"]), min(done, key=lambda run: run["memory_bytes"])
        items += [(time_text(fastest["step_time_s"]["median"]), f"shortest step: {fastest['name']}"),
                  (bytes_text(smallest["memory_bytes"]), f"least memory: {smallest['name']}")]
    costs = ""
    if done:
        axes = list(dict.fromkeys(name for run in done for name in run["labels"]))
        dimensions = list(dict.fromkeys(name for run in done for name in run["comm_bytes"]))
        has_mfu = any(run["mfu"] is not None for run in done)
        most = max(run["step_time_s"]["median"] for run in done), max(run["memory_bytes"] for run in done)
        head = ["run", *axes, "ranks>", "step time>", "%>", "memory>", "%>", "tokens/s>", *(["MFU>"] if has_mfu else []),
                *(f"sent over {dimension}>" for dimension in dimensions)]
        memory = "tensors" if all(run["memory_of"] == "peak_active_bytes" for run in done) else "process or device"
        costs = section("Time, memory, traffic", table(head, in_parts(len(head), lambda number, run: cost_row(
            number, run, axes, dimensions, most, has_mfu) if "curves" in run else "")),
            f"of rank 0; median step ± half the distance between the quartiles; peak memory of its {memory}; bytes that the rank puts in during the last step; "
            "% of the reference")
    curves = "".join(section("Curves", part_charts(rows), part_name(rows)) for rows in parts.values())
    method = "".join(f"<p>{esc(line)}</p>" for line in report.get("method", []))
    body = (f"<header><h1>{esc(report['title'])}</h1><p>{len(report['runs'])} runs of {esc(report['program'])}</p></header>\n" + tiles(items)
            + section("Verdicts", table(["run", "verdict", "loss off by>", "share of the allowed>", "gradient norm off by>", "share of the allowed>"],
                                        in_parts(6, verdict_row)), "largest difference to the reference, and largest share of the allowed difference at a step")
            + costs + curves + section("The allowed difference", f'<div class="card text">{method}</div>\n' if method else "")
            + section("Flags of all runs", listing([(name, json.dumps(value).strip('"')) for name, value in report["flags"].items()])))
    return page(report["title"], body)

# ---- A table of bench_mfu.
def mfu_page(path):
    runs = json.loads(path.read_text())["runs"]
    if not runs:
        raise ValueError("there are no runs")
    names = [f"{run['model']} {run['dp']}{'x%d' % run['cp'] if run['cp'] > 1 else ''}x{run['tp']}, ac {run['ac']}, batch {run['batch']}, seq {run['seq']}"
             for run in runs]
    picture = Picture("shares of the peak", 15.5, 0.9 + 0.62 * len(runs), left=4.2)
    for number, run in enumerate(runs):
        for place, (name, colour) in enumerate((("mfu", "p0"), ("mfu_causal", "p1"), ("hfu", "p3"))):
            if run[name] is not None:
                y = number - 0.36 + 0.25 * place
                picture.box(0, y, run[name], 0.22, colour, f"{names[number]}: {name} {run[name]:.1f} %")
                picture.axes.text(run[name], y + 0.12, f" {run[name]:.1f} %", va="center", fontsize=8)
    axes = picture.axes
    upright(axes, names, 0, 1.1 * max([1] + [run[name] for run in runs for name in ("mfu", "hfu") if run[name] is not None]))
    def text(value, form, scale=1.0):
        return ("–" if value is None else f"{value / scale:{form}}", "")
    rows = "".join(row([name, run["error"]]) if run["error"] else
                   row([name, *(text(run[share], ".1f") for share in ("mfu", "mfu_causal", "hfu")), text(run["peak_flops"], ".3g", 1e12),
                        text(run["tokens_per_s"], ",.0f"), text(run["active_bytes"], ".3g", 2**30), text(run["reserved_bytes"], ".3g", 2**30)])
                   for name, run in zip(names, runs))
    head = ["run", "MFU %>", "causal %>", "HFU %>", "peak TFLOP/s>", "tokens/s>", "active GiB>", "reserved GiB>"]
    body = ("<header><h1>Model FLOPs utilization</h1><p>share of a rank's peak, of the median step</p></header>\n"
            + boxes([("MFU", "p0"), ("MFU, causal", "p1"), ("HFU", "p3")]) + card("", "", picture.svg()) + table(head, rows))
    return page("bench_mfu", body)

def main():
    parser = argparse.ArgumentParser("tessera_plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "plan", "experiment", "mfu"))
    parser.add_argument("file", type=pathlib.Path)
    for name in ("--out", "--sample"):
        parser.add_argument(name, type=pathlib.Path)
    given = parser.parse_args()
    try:
        out = given.out or (given.file.with_name("report.html") if given.what == "run" else given.file.with_suffix(".html"))
        sample = given.sample.read_text(errors="replace") if given.sample else ""
        pages = {"plan": plan_page, "experiment": experiment_page, "mfu": mfu_page}
        text = run_page(given.file, sample) if given.what == "run" else pages[given.what](given.file)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.exit(f"tessera_plot: {error}")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        sys.exit(f"tessera_plot: {given.file} is not a JSON file of the kind '{given.what}' ({type(error).__name__}: {error})")
    print(f"page: {out}")

if __name__ == "__main__":
    main()
