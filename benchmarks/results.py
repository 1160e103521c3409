"""Makes the tables in docs/performance.md from the raw results of the benchmarks.
  benchmarks/results.py          writes the tables of docs/performance.md from benchmarks/results/
  benchmarks/results.py --check  fails if the page differs from the tables that would be written
"""
import datetime
import json
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
MIB = 2**20


def machine():
    """Returns the properties of the machine on which the figures depend."""
    import torch
    cpu = re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"cpu": cpu.group(1) if cpu else "unknown", "cores": len(__import__("os").sched_getaffinity(0)),
            "torch": torch.__version__, "commit": commit, "date": datetime.date.today().isoformat(),
            "load": pathlib.Path("/proc/loadavg").read_text().split()[0]}


def write(path, result):
    """Writes a benchmark's result together with the machine and the command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "command": sys.argv, **result}, indent=1) + "\n")


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def step_table():
    rows = ["| mesh | Tessera, ms: min, median, max | PyTorch, ms: min, median, max | ratio of each round | memory of a rank, MiB |",
            "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("step-*.json")):
        rounds = json.loads(path.read_text())["rounds"]
        sides = []
        for side in ("tessera", "other"):
            times = [round_[f"{side}_s"] * 1e3 for round_ in rounds]
            sides.append(f"{min(times):.0f}, {statistics.median(times):.0f}, {max(times):.0f}")
        ratios = ", ".join(f"{round_['other_s'] / round_['tessera_s']:.2f}" for round_ in rounds)
        memory = " / ".join(f"{max(round_[f'{side}_peak_bytes'] for round_ in rounds) / MIB:.0f}" for side in ("tessera", "other"))
        rows.append(f"| {path.stem.removeprefix('step-')} | {sides[0]} | {sides[1]} | {ratios} | {memory} |")
    return rows


def ddp_table():
    rounds = read("ddp")["rounds"]
    rows = ["| program | ms: min, median, max | time of PyTorch's DDP / time of this program: min, median, max |", "|---|---|---|"]
    for side, name in (("ddp", "PyTorch's DDP on Gloo"), ("gloo", "Tessera on Gloo"), ("shm", "Tessera on shared memory, its default on one host")):
        times = [round_[f"{side}_s"] * 1e3 for round_ in rounds]
        ratios = [round_["ddp_s"] / round_[f"{side}_s"] for round_ in rounds]
        cells = [", ".join(form % function(values) for function in (min, statistics.median, max))
                 for form, values in (("%.0f", times), ("%.2f", ratios))]
        rows.append(f"| {name} | {cells[0]} | {cells[1] if side != 'ddp' else ''} |")
    return rows


def dispatch_table():
    result = read("dispatch")
    ours, theirs = result["tessera_us"], result["pytorch_us"]
    rows = ["| operator; additional time in us | Tessera | PyTorch | ratio | with autograd: Tessera | PyTorch | first call: Tessera | PyTorch |",
            "|---|---|---|---|---|---|---|---|"]

    def cell(times, name):
        return f"{times[name]:.2f}" if name in times else ""
    for name in (name for name in ours if "/" not in name):
        ratio = f"{theirs[name] / max(ours[name], 1e-3):.0f}" if name in theirs else "refused"
        cells = [cell(ours, name), cell(theirs, name), ratio]
        for kind in ("autograd", "first"):
            cells += [cell(ours, f"{name}/{kind}"), cell(theirs, f"{name}/{kind}")]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def experts_table():
    rounds = read("experts")["rounds"]
    rows = ["| program | ms: min, median, max | time of `transformers` / time of this program, in each round | memory of a rank, MiB |",
            "|---|---|---|---|"]
    for side, name in (("transformers", "`transformers` with FSDP2"), ("dp", "Tessera, `--dp 2`"), ("ep", "Tessera, `--ep 2`")):
        times = [round_[f"{side}_s"] * 1e3 for round_ in rounds]
        ratios = ", ".join(f"{round_['transformers_s'] / round_[f'{side}_s']:.2f}" for round_ in rounds)
        memory = max(round_[f"{side}_peak_bytes"] for round_ in rounds) / MIB
        rows.append(f"| {name} | {min(times):.0f}, {statistics.median(times):.0f}, {max(times):.0f} "
                    f"| {ratios if side != 'transformers' else ''} | {memory:.0f} |")
    return rows


TABLES = {"step": step_table, "ddp": ddp_table, "experts": experts_table, "dispatch": dispatch_table}


def page_with_tables(text):
    for name, table in TABLES.items():
        begin, end = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(table()) + "\n" + end + rest.split(end, 1)[1]
    return text


def main():
    old = PAGE.read_text()
    new = page_with_tables(old)
    if "--check" in sys.argv:
        raise SystemExit(None if old == new else "docs/performance.md differs from benchmarks/results: run benchmarks/results.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
