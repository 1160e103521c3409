"""Decides whether runs have trained the same, and makes the report of an experiment.

fp32: the runs differ by rounding. A sum of n terms in another order equals the exact sum of terms that are each changed
by at most sqrt(n) u, u = 2^-24, with high probability (Higham and Mary, A new approach to probabilistic rounding error
analysis, 2019). So a matrix product on another mesh equals the product with weights whose last bits differ (a change of
u), times at most sqrt(n). The effect of a change of u on a training is measured: the reference is run again from weights
with flipped last bits. Each step has three kinds of products (forward, gradients of inputs, gradients of weights), two
runs are compared, and each step adds its own errors to the earlier ones. Errors have random signs, so after t steps they
are sqrt(2 * 3 * t) times as large. A figure itself is a sum too, and differs by sqrt(n t) u of its size in each run.

Metrics have the digits of fp32. So the part of the measured change that is at most one unit in a figure's last place is
multiplied by sqrt(2 * 3 * t), but not by sqrt(n).

bf16 and fp16: a product accumulates in fp32 and rounds its result and the ranks' partial results. So n is twice the number
of ranks, because the function after each product also rounds, and the flipped bit is the last bit of the type. If there
are runs with several seeds, the allowed difference is at most the reference's spread over the seeds.
"""
import dataclasses
import json
import math
import statistics

from experiment import DIFFERENT, SAME, check, coarsest, config_of
from jobs import Job, write_whole

FIGURES = ("loss", "grad_norm")
ROUNDING = 2.0 ** -24
FEWEST_SEEDS = 3
LAST_BIT = {"fp32": 0, "fp16": 13, "bf16": 16}  # index of a type's last mantissa bit in an fp32 number
WEAK = 2e-4  # as a fraction of the figure: the verdict is weak if a larger fault could go unnoticed


def job_of(run, seed=None, name=None, flipped=0):
    return Job(name or run.name, run.flags | {"seed": run.seed if seed is None else seed}, run.ranks, flipped)


def references(asked):
    """Returns the first run of each part, with the first seed."""
    return [run for run in asked.runs if asked.reference(run) is run and run.seed == asked.seeds[0]]


def rule_of(asked, run):
    """Returns the type whose rounding determines the allowed difference between a run and its reference."""
    return coarsest(run.precision, asked.reference(run).precision)


def perturbed_jobs(asked, reference, rule):
    """The reference with other last bits: of fp32, or of a less precise type, then at least as many runs as seeds."""
    name, count = (("last bits", asked.perturbed) if rule == "fp32" else
                   (f"{rule}'s last bits", max(asked.perturbed, FEWEST_SEEDS)))
    return [dataclasses.replace(job_of(reference, name=f"{reference.name}, {name} {i}", flipped=i), bit=LAST_BIT[rule])
            for i in range(1, count + 1)]


def seed_jobs(asked, reference):
    """The reference with the experiment's seeds, and with further seeds if these are too few."""
    own = [run for run in asked.runs if run.part == reference.part and asked.reference(run) is run]
    new = [seed for seed in range(len(asked.seeds) + FEWEST_SEEDS) if seed not in asked.seeds]
    return [job_of(run) for run in own] + [job_of(reference, seed, f"{reference.name}, of seed {seed}")
                                           for seed in new[:max(0, FEWEST_SEEDS - len(own))]]


def jobs_of(asked):
    """All jobs: the experiment's runs, and the runs that are needed to judge them."""
    jobs = {run.name: job_of(run) for run in asked.runs}
    for reference in references(asked):
        others = [run for run in asked.runs if run.part == reference.part and asked.reference(run) is not run]
        rules = {rule_of(asked, run) for run in others}
        more = [job for rule in sorted(rules) for job in perturbed_jobs(asked, reference, rule)] + (
            seed_jobs(asked, reference) if rules - {"fp32"} else [])
        for job in more:
            check(jobs.setdefault(job.name, job) == job,
                  f"run \"{job.name}\" has the name of a run that the experiment adds; choose another name")
    return list(jobs.values())


def longest_sum(asked, flags):
    """Returns the number of terms in the longest sum of a step: over features, vocabulary or a batch's tokens."""
    config = config_of(asked.path.parent, flags)
    sizes = [config.get(name) or 0 for name in ("hidden_size", "intermediate_size", "vocab_size")]
    return max(flags.get("batch", 4) * flags.get("seq", 128), *sizes)


def values(steps, figure):
    """Returns a figure at each step. Values that are not finite become NaN, which is equal to nothing."""
    return [math.nan if step[figure] is None else step[figure] for step in steps]


def largest_so_far(numbers):
    """Returns the running maximum: a single difference would be too small where two curves cross by chance."""
    result, largest = [], 0.0
    for number in numbers:
        largest = max(largest, number)
        result.append(largest)
    return result


def last_place(value):
    """Returns the value of the last digit of an fp32 figure."""
    return 2 * ROUNDING * 2.0 ** math.floor(math.log2(abs(value))) if value and math.isfinite(value) else 0.0


def rounding_allowed(asked, run, outcomes, figure):
    reference = next(first for first in references(asked) if first.part == run.part)
    base, rule = values(outcomes[reference.name].steps, figure), rule_of(asked, run)
    longest = longest_sum(asked, reference.flags)
    terms = longest if rule == "fp32" else 2 * max(run.ranks, reference.ranks)
    others = [values(outcomes[job.name].steps, figure) for job in perturbed_jobs(asked, reference, rule)]
    changes = largest_so_far([max(abs(a - b) for a in at_step) for *at_step, b in zip(*others, base)])
    allowed = []
    for step, (change, value) in enumerate(zip(changes, base), 1):
        printed = min(change, last_place(value))
        allowed.append(math.sqrt(6 * terms * step) * (change - printed) + math.sqrt(6 * step) * printed
                       + 2 * math.sqrt(longest * step) * ROUNDING * abs(value))
    return allowed


def spread_of_seeds(asked, run, outcomes, figure):
    """The reference's spread over seeds at each step; infinite if seeds change nothing (weights from a file, and
    no dropout)."""
    reference = next(first for first in references(asked) if first.part == run.part)
    of_seeds = [values(outcomes[job.name].steps, figure) for job in seed_jobs(asked, reference)]
    return [spread or math.inf for spread in largest_so_far([max(at_step) - min(at_step) for at_step in zip(*of_seeds)])]


def allowed_of(asked, run, outcomes):
    """Returns the allowed difference from the run's reference at each step, by figure."""
    allowed = {figure: rounding_allowed(asked, run, outcomes, figure) for figure in FIGURES}
    if rule_of(asked, run) != "fp32":
        for figure in FIGURES:
            allowed[figure] = list(map(min, allowed[figure], spread_of_seeds(asked, run, outcomes, figure)))
    return allowed


def found_from(base, allowed):
    """Returns the smallest detectable fault, as a fraction of the figure, at the step where it is smallest."""
    return min((limit / abs(value) for value, limit in zip(base, allowed) if value and math.isfinite(value)),
               default=math.inf)


def compare(steps, base, allowed):
    """The largest difference of two curves, the step that uses the largest fraction of the allowed difference, and
    the first step beyond it."""
    rows = []
    for step, (a, b, limit) in enumerate(zip(steps, base, allowed), 1):
        difference = 0.0 if math.isnan(a) and math.isnan(b) else abs(a - b)
        if math.isnan(difference):
            difference = math.inf
        share = difference / limit if limit > 0 else math.inf if difference > 0 else 0.0
        rows.append({"step": step, "difference": difference, "allowed": limit, "share": share})
    worst = max(rows, key=lambda row: row["share"])
    return worst | {"largest": max(row["difference"] for row in rows),
                    "first_beyond": next((row["step"] for row in rows if row["share"] > 1), None)}


# ---- The report.

# The first step is not timed, because it allocates memory and compiles kernels.
FIRST_TIMED = 1


def spread(numbers):
    """Returns the median and the quartiles."""
    low, middle, high = (statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3)
    return {"median": middle, "low": low, "high": high}


def bytes_by_dimension(record):
    return {dimension: sum(traffic["bytes"] for traffic in collectives.values())
            for dimension, collectives in record["comm"].items()}


def figures(steps):
    """Returns time, memory and traffic of rank 0 of a run, from the program's metrics."""
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
    """Returns the reason why a run has no verdict, or an empty text."""
    reference = asked.reference(run)
    if outcomes[run.name].error:
        return f"failed: {outcomes[run.name].error}"
    if outcomes[reference.name].error:
        return f"not compared: the reference '{reference.name}' failed"
    if len(outcomes[run.name].steps) != len(outcomes[reference.name].steps):
        return (f"not compared: the run made {len(outcomes[run.name].steps)} steps, but the reference "
                f"{len(outcomes[reference.name].steps)}; set equal steps for both runs")
    failed = [job.name for job in jobs_of(asked) if outcomes[job.name].error and job.name not in
              [other.name for other in asked.runs]]
    return f"not compared: the allowed difference is unknown, because '{failed[0]}' failed: {outcomes[failed[0]].error}" if failed else ""


def judged(asked, run, outcomes):
    """Returns the verdict on a run: for each figure, and overall."""
    reference = asked.reference(run)
    steps, base = outcomes[run.name].steps, outcomes[reference.name].steps
    allowed = allowed_of(asked, run, outcomes)
    by_figure = {figure: compare(values(steps, figure), values(base, figure), allowed[figure])
                 for figure in FIGURES}
    for figure, row in by_figure.items():
        row["found_from"] = found_from(values(base, figure), allowed[figure])
    same = all(row["share"] <= 1 for row in by_figure.values())
    return {"verdict": SAME if same else DIFFERENT, "allowed": allowed,
            "rule": rule_of(asked, run),
            "weak": same and any(row["found_from"] > WEAK for row in by_figure.values())} | by_figure


def row_of(asked, run, outcomes):
    reference, outcome = asked.reference(run), outcomes[run.name]
    row = {"name": run.name, "part": run.part, "labels": run.labels, "ranks": run.ranks, "seed": run.seed,
           "flags": run.flags, "reference": reference.name, "expected": run.expect, "error": outcome.error,
           "verdict": None}
    if not outcome.error:
        row |= figures(outcome.steps)
        row["curves"] = {figure: [step[figure] for step in outcome.steps] for figure in FIGURES}
    trouble = why_none(asked, run, outcomes)
    row["error"] = trouble
    if not trouble and reference is not run:
        row |= judged(asked, run, outcomes)
    row["as_expected"] = not trouble and (reference is run or row["verdict"] == run.expect)
    return row


def report(asked, outcomes):
    """Returns the whole report as numbers, texts and lists."""
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
    """Returns as text the largest difference as a fraction of the allowed difference."""
    if share == float("inf"):
        return "∞ times"
    return f"{100 * share:.2g} %" if share <= 1 else f"{share:.3g} times"


def limits_text(row):
    """Returns the smallest fault that the verdict can detect, in words."""
    return (f"{'weak: ' if row['weak'] else ''}finds faults from {100 * row['loss']['found_from']:.2g} % of the loss, "
            f"{100 * row['grad_norm']['found_from']:.2g} % of the gradient norm"
            + ("; compare in fp32 to find smaller faults" if row["weak"] and row["rule"] != "fp32" else ""))


def sentence(row):
    """Returns the verdict in words."""
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
            lines.append(f"In fp32, runs may differ by rounding. The reference is run again {perturbed} times from weights in which the last bit of every "
                         "second value is flipped. Summing n terms in another order changes a sum by at most √n times the change of such a flip. There are "
                         "three kinds of products, two runs and t steps: at step t, the allowed difference is √(6·n·t) times the largest change so far (only "
                         "√(6·t) times one unit in the last printed place), plus 2·√(n·t)·2⁻²⁴ of the figure. n is the length of the longest sum of a step.")
        else:
            lines.append(f"In {rule}, the last bit of {rule} is flipped, and n in √(6·n·t) is twice the number of ranks: products add in fp32 and round the "
                         "results, and so do the functions after the products. The allowed difference is at most the largest difference between two seeds "
                         "so far, if seeds change anything.")
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
