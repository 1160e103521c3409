"""Reads the TOML file of an experiment and checks it."""
import dataclasses
import difflib
import itertools
import json
import math
import pathlib
import tomllib

# Flags that an experiment must not set: each run has its own value, or the flag would make the run depend on other
# runs.
OWN = ("metrics", "config-file", "checkpoint", "checkpoint-every", "resume", "resume-step",
       "initial-load", "save-hf", "save-lora", "seed", "profile", "profile-steps", "tensorboard", "output-dir")
DEGREES = ("dp-replicate", "dp", "ep", "cp", "tp")
WHOLE = (*DEGREES, "batch", "seq")
TEXTS = ("model", "config", "text", "tokenizer", "param-dtype", "reduce-dtype", "device")
MOST_SEED = 2 ** 63 - 1  # TOML's largest integer
BYTES = 256  # vocabulary of byte tokens (without a tokenizer)
NAMES = {"title": str, "program": str, "seeds": list, "perturbed": int, "separate": list, "flags": dict,
         "run": list, "axis": list}
SAME, DIFFERENT = "same", "different"
TYPES = ("fp32", "fp16", "bf16")  # types in decreasing order of mantissa bits


class BadFile(Exception):
    """An error with a one-line message: what was requested, what was found, and how to correct the file."""


def coarsest(*types):
    return max(types, key=TYPES.index)


@dataclasses.dataclass
class Run:
    name: str
    flags: dict
    seed: int
    expect: str = SAME
    labels: dict = dataclasses.field(default_factory=dict)  # the run's value on each axis
    part: tuple = ()  # runs of different parts are not comparable

    @property
    def ranks(self):
        return math.prod(self.flags.get(degree, 1) for degree in DEGREES)

    @property
    def precision(self):
        """Returns the least precise of the TYPES in which the run computes."""
        by_default = "bf16" if self.flags.get("device") == "cuda" else "fp32"
        return coarsest(self.flags.get("param-dtype", by_default), self.flags.get("reduce-dtype", "fp32"))


@dataclasses.dataclass
class Experiment:
    title: str
    path: pathlib.Path
    program: str
    seeds: list
    perturbed: int  # number of runs with flipped last bits, for each part
    separate: list  # flags that divide the runs into parts
    flags: dict  # flags of all runs
    runs: list

    def reference(self, run):
        """Returns the run with which `run` is compared: the first run of its part and seed."""
        return next(other for other in self.runs if (other.part, other.seed) == (run.part, run.seed))


def check(condition, message):
    if not condition:
        raise BadFile(message)


def check_names(found, known, where):
    for name in found:
        near = difflib.get_close_matches(name, known, 1, 0)
        check(name in known, f"{where} has the unknown name \"{name}\"; did you mean \"{near[0] if near else ''}\"?")


def check_flags(flags, where):
    for name, value in flags.items():
        check(name not in OWN, f"{where} has \"{name}\", which the experiment sets for each run; leave the flag out"
              + (", and write seeds = [...] instead" if name == "seed" else ""))
        parts = value if isinstance(value, list) else [value]
        check(all(isinstance(part, (str, int, float)) and (not isinstance(part, float) or math.isfinite(part)) for part in parts),
              f"{where}: \"{name}\" must be a flag's value: a string, a finite number, true, false, or an array of these")
    for name in WHOLE:
        count = flags.get(name, 1)
        check(type(count) is int and count > 0, f"{where}: {name} = {json.dumps(count)} is not a "
              f"{'number of ranks' if name in DEGREES else 'whole number above 0'}; write 1 or more")
    for name in TEXTS:
        check(isinstance(flags.get(name, ""), str), f"{where}: {name} = {json.dumps(flags.get(name))} must be a string")
    return flags


def check_vocabulary(run, home):
    """Checks runs with flipped bits. They start from a folder of weights, with which byte tokens need a vocabulary
    of 256."""
    by_bytes = [name for name in ("text", "jsonl", "eval-text") if name in run.flags]
    if not by_bytes or "config" not in run.flags or "model" in run.flags or "tokenizer" in run.flags:
        return
    size = config_of(home, run.flags).get("vocab_size", BYTES)
    check(size == BYTES, f"run \"{run.name}\" has {by_bytes[0]} without a tokenizer, so tokens are bytes, but {run.flags['config']} has a "
          f"vocabulary of {size}; add a tokenizer, use tokens instead of {by_bytes[0]}, or use a vocabulary of {BYTES}")


def config_of(home, flags):
    """Returns a run's config.json; empty if the file can't be read, which the program will report."""
    name = pathlib.Path(flags["model"], "config.json") if "model" in flags else pathlib.Path(flags.get("config", ""))
    try:
        config = json.loads((home / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return config if isinstance(config, dict) else {}


def label_of(name, value):
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


def points_of(axis):
    """Returns the values of an axis, each as (axis name, value's label, flags)."""
    check(isinstance(axis, dict) and isinstance(axis.get("name"), str) and axis["name"]
          and axis.get("values"),
          "an [[axis]] needs a name, and values: an array of the flag's values, or a table of labels with flags")
    check_names(axis, ("name", "values"), f"axis \"{axis['name']}\"")
    name, values = axis["name"], axis["values"]
    if isinstance(values, list):
        return [(name, {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value),
                 label_of(name, value), {name: value}) for value in values]
    check(isinstance(values, dict) and all(isinstance(flags, dict) for flags in values.values()),
          f"axis \"{name}\": values must be an array, or a table of labels with flags: {{\"label\" = {{dp = 2}}}}")
    return [(name, label, f"{name} {label}", flags) for label, flags in values.items()]


def listed_runs(table):
    """Returns the runs of the file's [[run]] tables: (name, flags, expected verdict, labels)."""
    for entry in table.get("run", []):
        check(isinstance(entry, dict) and isinstance(entry.get("name"), str) and entry["name"],
              "a [[run]] needs a name, and the flags that differ from the other runs")
        flags = {name: value for name, value in entry.items() if name not in ("name", "expect")}
        expect = entry.get("expect", SAME)
        check(expect in (SAME, DIFFERENT), f"run \"{entry['name']}\": expect = {json.dumps(expect)} is neither "
              f"\"{SAME}\" nor \"{DIFFERENT}\"")
        yield entry["name"], flags, expect, {}


def grid_runs(table):
    """Returns a run for every combination of the axes' values, like listed_runs(). The last axis varies fastest."""
    if "axis" not in table:
        return
    for points in itertools.product(*map(points_of, table["axis"])):
        flags = {name: value for *_, of_point in points for name, value in of_point.items()}
        yield (", ".join(text for *_, text, _ in points), flags, SAME,
               {name: label for name, label, *_ in points})


def check_table(table):
    check_names(table, NAMES, "the file")
    for name, kind in NAMES.items():
        check(isinstance(table.get(name, kind()), kind),
              f"\"{name}\" must be {({str: 'a string', int: 'a number', list: 'an array', dict: 'a table'})[kind]}")
    seeds = table.get("seeds", [0])
    check(seeds and all(type(seed) is int and 0 <= seed <= MOST_SEED for seed in seeds) and len(set(seeds)) == len(seeds),
          f"seeds = {seeds} must be different numbers from 0 to {MOST_SEED}")
    perturbed = table.get("perturbed", 2)
    check(type(perturbed) is int and perturbed > 0,
          f"perturbed = {json.dumps(perturbed)} leaves no runs to derive the allowed difference from; write 1 or more")
    check(table.get("program", "llama_train"), "program = \"\" is empty; write the name of a program, or remove the line for llama_train")
    for name in table.get("separate", []):
        check(isinstance(name, str), f"separate = {json.dumps(table['separate'], default=str)} must be an array of flags' names")


def made_runs(table, seeds):
    common, separate = check_flags(table.get("flags", {}), "[flags]"), table.get("separate", [])
    runs = []
    for name, flags, expect, labels in [*listed_runs(table), *grid_runs(table)]:
        flags = common | check_flags(flags, f"run \"{name}\"")
        part = tuple(tuple(value) if isinstance(value, list) else value for value in map(flags.get, separate))
        for seed in seeds:
            of_seed = f"{name}, seed {seed}" if len(seeds) > 1 else name
            runs.append(Run(of_seed, flags, seed, expect, labels, part))
    for key in separate:
        check(any(key in run.flags for run in runs), f"separate has \"{key}\", a flag that no run has")
    return runs


def read(path):
    """Reads an experiment from a TOML file. Raises BadFile."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadFile(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        check_table(table)
        seeds = table.get("seeds", [0])
        runs = made_runs(table, seeds)
        check(len(runs) > 1, "there are fewer than two runs to compare; add [[run]] or [[axis]]")
        names = [run.name for run in runs]
        for name in names:
            check(names.count(name) == 1, f"two runs have the name \"{name}\"; give each run its own name")
        for run in runs:
            check_vocabulary(run, path.resolve().parent)
    except BadFile as error:
        raise BadFile(f"{path}: {error}") from None
    return Experiment(table.get("title", path.stem), path.resolve(), table.get("program", "llama_train"), seeds,
                      table.get("perturbed", 2), table.get("separate", []), table.get("flags", {}), runs)
