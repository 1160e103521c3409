"""The figures of an experiment's runs and the verdict on each run, as in report.json."""
import json
import math
import statistics

import verdict
from experiment import DIFFERENT, SAME
from jobs import write_whole

# The first step is not timed, because it allocates memory and compiles kernels.
FIRST_TIMED = 1


def spread(numbers):
    """The median and quartiles."""
    low, middle, high = (statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3)
    return {"median": middle, "low": low, "high": high}


def bytes_by_dimension(record):
    return {dimension: sum(traffic["bytes"] for traffic in collectives.values())
            for dimension, collectives in record["comm"].items()}


def figures(steps):
    """Time, memory and traffic of rank 0 of a run, from the program's metrics."""
    timed = steps[FIRST_TIMED:] or steps
    memory = "peak_active_bytes" if "peak_active_bytes" in steps[0] else "peak_memory_bytes"
    made = {"step_time_s": spread([step["step_time_s"] for step in timed]),
            "tokens_per_s": statistics.median(step["tokens_per_s"] for step in timed),
            "memory_bytes": max(step[memory] for step in steps), "memory_of": memory,
            "comm_bytes": bytes_by_dimension(steps[-1]), "comm": steps[-1]["comm"],
            "final_loss": steps[-1]["loss"]}
    for name in ("mfu", "mfu_causal"):
        known = [step[name] for step in timed if step.get(name) is not None]
        made[name] = statistics.median(known) if known else None
    return made


def why_none(asked, run, outcomes):
    """The reason why a run has no verdict, or nothing."""
    reference = asked.reference(run)
    if outcomes[run.name].error:
        return f"failed: {outcomes[run.name].error}"
    if outcomes[reference.name].error:
        return f"not compared: its reference '{reference.name}' failed"
    if len(outcomes[run.name].steps) != len(outcomes[reference.name].steps):
        return (f"not compared: it made {len(outcomes[run.name].steps)} steps, and its reference "
                f"{len(outcomes[reference.name].steps)}; give both the same steps")
    failed = [job.name for job in verdict.jobs_of(asked) if outcomes[job.name].error and job.name not in
              [other.name for other in asked.runs]]
    return f"not compared: what is allowed is not known, as '{failed[0]}' failed: {outcomes[failed[0]].error}" if failed else ""


def judged(asked, run, outcomes):
    """The verdict on a run: for each figure, and overall."""
    reference = asked.reference(run)
    steps, base = outcomes[run.name].steps, outcomes[reference.name].steps
    allowed = verdict.allowed_of(asked, run, outcomes)
    by_figure = {figure: verdict.compare(verdict.values(steps, figure), verdict.values(base, figure), allowed[figure])
                 for figure in verdict.FIGURES}
    for figure, row in by_figure.items():
        row["found_from"] = verdict.found_from(verdict.values(base, figure), allowed[figure])
    same = all(row["share"] <= 1 for row in by_figure.values())
    return {"verdict": SAME if same else DIFFERENT, "allowed": allowed,
            "rule": verdict.rule_of(asked, run),
            "weak": same and any(row["found_from"] > verdict.WEAK for row in by_figure.values())} | by_figure


def row_of(asked, run, outcomes):
    reference, outcome = asked.reference(run), outcomes[run.name]
    row = {"name": run.name, "part": run.part, "labels": run.labels, "ranks": run.ranks, "seed": run.seed,
           "flags": run.flags, "reference": reference.name, "expected": run.expect, "error": outcome.error,
           "verdict": None}
    if not outcome.error:
        row |= figures(outcome.steps)
        row["curves"] = {figure: [step[figure] for step in outcome.steps] for figure in verdict.FIGURES}
    trouble = why_none(asked, run, outcomes)
    row["error"] = trouble
    if not trouble and reference is not run:
        row |= judged(asked, run, outcomes)
    row["as_expected"] = not trouble and (reference is run or row["verdict"] == run.expect)
    return row


def report(asked, outcomes):
    """The whole report as numbers, texts and lists."""
    rows = [row_of(asked, run, outcomes) for run in asked.runs]
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        base = by_name[row["reference"]]
        if "memory_bytes" in row and "memory_bytes" in base:
            row["memory_percent"] = 100 * row["memory_bytes"] / base["memory_bytes"]
            row["step_time_percent"] = 100 * row["step_time_s"]["median"] / base["step_time_s"]["median"]
    return {"title": asked.title, "program": asked.program, "flags": asked.flags, "seeds": asked.seeds,
            "separate": asked.separate, "perturbed": asked.perturbed, "as_expected": all(row["as_expected"] for row in rows), "runs": rows,
            "method": method(rows, asked.perturbed)}


def share_text(share):
    """The fraction of the allowed difference that is used."""
    if share == float("inf"):
        return "∞ times"
    return f"{100 * share:.2g} %" if share <= 1 else f"{share:.3g} times"


def limits_text(row):
    """The smallest fault that the verdict can detect, in words."""
    return (f"{'weak: ' if row['weak'] else ''}finds faults from {100 * row['loss']['found_from']:.2g} % of the loss, "
            f"{100 * row['grad_norm']['found_from']:.2g} % of the gradient norm"
            + ("; compare in fp32 to find smaller ones" if row["weak"] and row["rule"] != "fp32" else ""))


def sentence(row):
    """The verdict in words."""
    if row["error"]:
        return row["error"]
    if row["verdict"] is None:
        return "the reference"
    parts = []
    for figure, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        worst = row[figure]
        parts.append(f"{name} bit-equal" if worst["largest"] == 0 else
                     f"{name} off by {worst['difference']:.2g} at step {worst['step']}, {share_text(worst['share'])}"
                     f"{' of' if worst['share'] <= 1 else ''} what "
                     f"rounding in {row['rule']} allows")
    wrong = "" if row["as_expected"] else f", expected {row['expected']}"
    return f"{row['verdict']}{wrong}: {'; '.join(parts)} ({limits_text(row)})"


def method(rows, perturbed):
    """Explains the allowed differences in words, and what the verdict on the first run of each rule can detect."""
    rules = sorted({row["rule"] for row in rows if row["verdict"]})
    lines = []
    for rule in rules:
        if rule == "fp32":
            lines.append(f"In fp32 runs may differ by rounding. The reference is run again {perturbed} times from weights with the last bit of every "
                         "second one flipped. A sum of n terms in another order is at most √n times such a change, in each of three kinds of products, "
                         "in two runs, and in each of t steps anew: at step t the largest change so far times √(6·n·t) is allowed (a unit in the last "
                         "printed place of it only √(6·t) times), and 2·√(n·t)·2⁻²⁴ of the figure itself. n is the longest sum of a step.")
        else:
            lines.append(f"In {rule} its last bit is flipped, and n of √(6·n·t) is twice the number of ranks: products add in fp32, and round their "
                         "results, as do the functions behind them. No more is allowed than the largest difference between two seeds so far, if seeds "
                         "change anything.")
    for rule in rules:
        first = next(row for row in rows if row["verdict"] and row["rule"] == rule)
        lines.append(f"{first['name']} ({rule}) {limits_text(first)}.")
    return lines


def plain(value):
    """Replaces numbers that are not finite by None, because JSON has none."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(report, folder):
    """Writes report.json atomically."""
    write_whole(folder.path / "report.json", json.dumps(plain(report), indent=1) + "\n")
