"""Decides whether two runs have trained the same: which differences between their figures are allowed.

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
import math

from experiment import check, coarsest, config_of
from jobs import Job

FIGURES = ("loss", "grad_norm")
ROUNDING = 2.0 ** -24
FEWEST_SEEDS = 3
LAST_BIT = {"fp32": 0, "fp16": 13, "bf16": 16}  # index of a type's last mantissa bit in an fp32 number
WEAK = 2e-4  # as a fraction of the figure: the verdict is weak if a larger fault could go unnoticed


def job_of(run, seed=None, name=None, flipped=0):
    return Job(name or run.name, run.flags | {"seed": run.seed if seed is None else seed}, run.ranks, flipped)


def references(asked):
    """The first run of each part, with the first seed."""
    return [run for run in asked.runs if asked.reference(run) is run and run.seed == asked.seeds[0]]


def rule_of(asked, run):
    """The type whose rounding determines the allowed difference between a run and its reference."""
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
                  f"run \"{job.name}\" has a name that the experiment itself gives to a run; choose another")
    return list(jobs.values())


def longest_sum(asked, flags):
    """The number of terms in the longest sum of a step: over features, the vocabulary or the tokens of a batch."""
    config = config_of(asked.path.parent, flags)
    sizes = [config.get(name) or 0 for name in ("hidden_size", "intermediate_size", "vocab_size")]
    return max(flags.get("batch", 4) * flags.get("seq", 128), *sizes)


def values(steps, figure):
    """A figure at each step. Values that are not finite become NaN, which is equal to nothing."""
    return [math.nan if step[figure] is None else step[figure] for step in steps]


def largest_so_far(numbers):
    """The running maximum. A single difference would be too small where two curves cross by chance."""
    result, largest = [], 0.0
    for number in numbers:
        largest = max(largest, number)
        result.append(largest)
    return result


def last_place(value):
    """The value of the last digit of an fp32 figure."""
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
    """The allowed difference from the run's reference at each step, by figure."""
    allowed = {figure: rounding_allowed(asked, run, outcomes, figure) for figure in FIGURES}
    if rule_of(asked, run) != "fp32":
        for figure in FIGURES:
            allowed[figure] = list(map(min, allowed[figure], spread_of_seeds(asked, run, outcomes, figure)))
    return allowed


def found_from(base, allowed):
    """The smallest detectable fault, as a fraction of the figure, at the step where it is smallest."""
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
