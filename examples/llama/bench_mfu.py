#!/usr/bin/env python3
"""Trains each combination of shapes, meshes, activation checkpointing and batches for a few steps by llama_train, and shows
MFU in three conventions, tokens a second and memory."""
# Each run is a separate process, so that a run that is out of memory does not end the others.

import argparse
import dataclasses
import difflib
import itertools
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys

BIN = pathlib.Path(__file__).resolve().parent  # the folder also has llama_train, llama_plan and tessera-run
# Every run reads the whole token file.
MOST_TOKENS = 1 << 28

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-05,
         "rope_theta": 500000.0, "max_position_embeddings": 8192, "initializer_range": 0.02, "tie_word_embeddings": False}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
                "max_position_embeddings": 131072, "num_hidden_layers": 28}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model configuration with published results."""
    config: dict
    seq: int
    batch: int  # sequences per step and GPU
    published: str


SHAPES = {
    "llmq-1.5b": Shape(
        QWEN | {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                "num_key_value_heads": 2, "tie_word_embeddings": True}, 1024, 16,
        "llmq on one H100, bf16: 58,000 tokens/s; at the GPU's peak its products would take 55 % of that time"),
    "llmq-7b": Shape(
        QWEN | {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                "num_key_value_heads": 4}, 1024, 4,
        "llmq on one H100, bf16: 14,000 tokens/s; at the GPU's peak its products would take 60 % of that time"),
    "torchtitan-8b": Shape(
        LLAMA | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                 "num_attention_heads": 32, "num_key_value_heads": 8}, 8192, 1,
        "torchtitan on 8 H100, bf16, FSDP: 33 % MFU eager, 39 to 40 % compiled")}

# How PyTorch runs: the name in results, and the flags of --peer's script.
PEERS = {"eager": [], "compiled": ["--compile"], "compiled_without_fsdp": ["--compile", "--parallel", "none"]}


# The sections of --help and of a --config-file.
SECTIONS = ("model", "parallelism", "training", "metrics")


class Failure(Exception):
    """An error with a message for the user."""


@dataclasses.dataclass
class Trial:
    """One run of llama_train."""
    config: str
    model: str
    dp: int
    cp: int
    tp: int
    ac: str
    batch: int
    seq: int

    @property
    def ranks(self):
        return self.dp * self.cp * self.tp

    @property
    def mesh(self):
        return f"{self.dp}x{self.tp}" if self.cp == 1 else f"{self.dp}x{self.cp}x{self.tp}"


# ---- Flags.

class Once(argparse.Action):
    """Rejects a second value of a flag that takes one value."""
    def __call__(self, parser, namespace, value, option=None):
        first = parser.given.setdefault(self.dest, value)
        if first != value:
            parser.error(f"{option} is given as {first} and as {value}, but takes one value; pass the flag once")
        setattr(namespace, self.dest, value)


class Parser(argparse.ArgumentParser):
    def parse_words(self, words):
        self.given = {}
        found, unknown = self.parse_known_args(words)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            near = difflib.get_close_matches(unknown[0].split("=")[0], flags, 1, 0)
            raise Failure(f"unknown flag {unknown[0]}; did you mean {near[0]}? (--help lists all)")
        return found

    def error(self, message):
        raise Failure(f"{message} (--help lists the flags)")


def number(least):
    def read(text):
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {least}")
        return value
    read.__name__ = "number"
    return read


def several(read):
    """Parses comma-separated values."""
    def split(text):
        return [read(part) for part in text.split(",")]
    split.__name__ = "list"
    return split


def one_of(*names):
    def read(text):
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(names)}")
        return text
    return read


def checkpointing(text):
    """Checks the kind in a value of --ac. llama_train checks what may follow after a colon."""
    one_of("none", "full", "selective", "auto")(text.partition(":")[0])
    return text


def peak(text):
    if text != "measure" and not 1e6 <= float(text) <= 1e18:
        raise argparse.ArgumentTypeError(f"{text} is neither measure nor a number of FLOP/s, such as 989e12")
    return text


def make_parser():
    parser = Parser(prog="bench_mfu", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config-file", metavar="FILE.toml", help="TOML file with flags by name, with or without the "
                        "sections of --help; flags on the command line override the file")
    model = parser.add_argument_group("model")
    model.add_argument("--config", metavar="FILE[,FILE]", type=several(str), action="extend",
                       help="config.json files of the models to measure")
    model.add_argument("--shape", metavar="NAME[,NAME]", type=several(one_of(*SHAPES)), action="extend",
                       help="Models with published figures, which the table also shows. --seq and --batch (of each rank) "
                            f"default to the values of the shape: {', '.join(SHAPES)}")
    parallelism = parser.add_argument_group("parallelism")
    parallelism.add_argument("--ac", metavar="AC[,AC]", type=several(checkpointing), action="extend",
                             help="Activation checkpointing: none, selective, full, selective:N, full:N, auto (none)")
    parallelism.add_argument("--mesh", metavar="DPxTP[,DPxTP]", type=several(str), action="extend",
                             help="Degrees of FSDP and tensor parallelism (1x1); DPxCPxTP also has the degree of context "
                                  "parallelism")
    training = parser.add_argument_group("training")
    training.add_argument("--batch", metavar="N[,N]", type=several(number(1)), action="extend",
                          help="Sequences per step over all ranks (4, or the shape's)")
    for flag, least, default, text in (("--seq", 1, None, "Tokens per sequence (128, or the shape's)"),
                                       ("--steps", 1, 6, "Steps of each run (6)"),
                                       ("--warmup", 0, 2, "Number of first steps that are not measured (2)")):
        training.add_argument(flag, metavar="N", type=number(least), default=default, action=Once, help=text)
    training.add_argument("--device", choices=("cpu", "cuda"), default="cpu", action=Once, help="cpu or cuda (cpu)")
    metrics = parser.add_argument_group("metrics")
    metrics.add_argument("--peak-flops", metavar="X|measure", type=peak, default="measure", action=Once,
                         help="Peak for MFU: FLOP/s of a device, or measure: measured by matrix products (measure)")
    metrics.add_argument("--flags", metavar='"FLAG ..."', default="", action=Once,
                         help='More flags of llama_train, for every run: --flags="--param-dtype bf16"')
    metrics.add_argument("--peer", metavar="FILE", default="", action=Once,
                         help="Also measure PyTorch's step on the same tokens: eager, compiled, and compiled without FSDP, by "
                              "benchmarks/peer/torch_step.py and python3. For runs of one rank, with --ac none or full")
    metrics.add_argument("--out", metavar="DIR", default="bench_mfu", action=Once,
                         help="Folder of the runs and results.json (bench_mfu)")
    return parser


def words_of(path):
    """Returns the flags of a TOML file as words of a command line."""
    try:
        import tomllib
        table = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ImportError:
        raise Failure(f"--config-file {path} needs Python 3.11; pass the flags on the command line") from None
    except (OSError, ValueError) as error:
        raise Failure(f"can't read --config-file {path}: {error}") from None
    flags = {}
    for section, value in table.items():
        if isinstance(value, dict) and section not in SECTIONS:
            raise Failure(f"--config-file {path} has the unknown section [{section}]; the sections are {', '.join(SECTIONS)}")
        for name, each in (value if isinstance(value, dict) else {section: value}).items():
            if name == "config-file":
                raise Failure(f"--config-file {path} names another --config-file; remove the line")
            if name in flags:
                raise Failure(f"--config-file {path} gives {name} twice; remove one of the two lines")
            flags[name] = (" " if name == "flags" else ",").join(map(str, each)) if isinstance(each, list) else each
    return [f"--{name}={value}" for name, value in flags.items()]


def check_outputs(given):
    """Raises an error if an output would replace an input or another output."""
    out = pathlib.Path(given.out)
    files = [("--config", config) for config in given.config] + [("--peer", given.peer)] * bool(given.peer)
    files += [(f"config.json of --shape {name}", config_of(out, name)) for name in given.shape]
    files.append(("results.json of --out", out / "results.json"))
    known = {}
    for what, path in files:
        other = known.setdefault(pathlib.Path(path).resolve(), what)
        if other != what:
            raise Failure(f"{other} and {what} are both {path}; pass different paths")


def parse(words):
    parser = make_parser()
    given = parser.parse_words(words)
    if given.config_file:
        here = {name for name, value in vars(given).items() if name in parser.given or isinstance(value, list)}
        for name, value in vars(parser.parse_words(words_of(given.config_file))).items():
            if name not in here:
                setattr(given, name, value)
    for name, default in (("config", []), ("shape", []), ("ac", ["none"]), ("mesh", ["1x1"]), ("batch", [])):
        setattr(given, name, getattr(given, name) or default)
    if not given.config and not given.shape:
        raise Failure("no shape is given; pass --config FILE or --shape NAME")
    if given.warmup >= given.steps:
        raise Failure(f"--warmup {given.warmup} leaves no step of --steps {given.steps} to measure; pass more --steps")
    if given.peer and given.flags:
        raise Failure("--peer runs without --flags; leave out one of the two flags")
    for config in given.config:
        if given.peer and not pathlib.Path(config).is_file():
            raise Failure(f"--peer reads a file, but --config {config} is not a file; pass the path of a config.json")
    if given.peer and not pathlib.Path(given.peer).is_file():
        raise Failure(f"--peer {given.peer} is not a file; pass benchmarks/peer/torch_step.py")
    check_outputs(given)
    return given


def degrees_of(mesh):
    if not re.fullmatch(r"[0-9]*[1-9][0-9]*(x[0-9]*[1-9][0-9]*){1,2}", mesh):
        raise Failure(f"--mesh {mesh} is not a mesh; pass degrees as DPxTP, such as 2x1, or as DPxCPxTP")
    dp, *cp, tp = map(int, mesh.split("x"))
    return dp, cp[0] if cp else 1, tp


def config_of(out, name):
    """Returns the path to which the config.json of a --shape is written."""
    return out / "shapes" / f"{name}.json"


def model_of(config):
    """Returns the name of a file, or the name of the folder of a config.json."""
    path = pathlib.Path(config)
    if path.suffix != ".json":
        return config
    return path.parent.name if path.stem == "config" and path.parent.name else path.stem


def trials_of(given):
    models = [(config, model_of(config), 128, lambda ranks: 4) for config in given.config]
    models += [(str(config_of(pathlib.Path(given.out), name)), name, SHAPES[name].seq,
                lambda ranks, each=SHAPES[name].batch: each * ranks) for name in given.shape]
    trials = []
    for (config, model, seq, batch_of), mesh, ac in itertools.product(models, given.mesh, given.ac):
        dp, cp, tp = degrees_of(mesh)
        for batch in given.batch or [batch_of(dp * cp * tp)]:
            trials.append(Trial(config, model, dp, cp, tp, ac, batch, given.seq or seq))
    for trial in trials:
        if trial.batch * trial.seq > MOST_TOKENS:
            raise Failure(f"--batch {trial.batch} x --seq {trial.seq} is more than {MOST_TOKENS} tokens per step; pass smaller values")
    return trials


# ---- Measurements.

def error_in(log):
    """Returns the first error (later errors are of ranks that waited for the failed rank), or else the last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line]
    errors = [line for line in lines if "llama_train: " in line or "llama_plan: " in line]
    return (errors or lines[-1:] or ["the program wrote nothing"])[0]


def run_logged(command, log):
    try:
        with open(log, "w", encoding="utf-8") as out:
            code = subprocess.run([str(word) for word in command], stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    except OSError as error:
        raise Failure(f"can't start {command[0]} ({error.strerror}); build it in the folder of this program: cmake --build BUILD "
                      "--target llama_train llama_plan tessera-run") from None
    if code != 0:
        raise Failure(error_in(log))


def run_flags(trial, given):
    return ["--config", trial.config, "--dp", trial.dp, "--cp", trial.cp, "--tp", trial.tp, "--batch", trial.batch, "--seq",
            trial.seq, "--steps", given.steps, "--ac", trial.ac, "--device", given.device, *given.flags.split()]


def flops_of_step(flags, folder):
    """Returns the FLOPs of all ranks that llama_plan counts in a step's operators: equal for every machine."""
    run_logged([BIN / "llama_plan", *flags, "--gpu", "h100", "--json", folder / "plan.json"], folder / "plan.log")
    kinds = json.loads((folder / "plan.json").read_text())["kinds"]
    return sum(kind["ranks"] * kind["flops"] for kind in kinds)


def chosen_ac(log):
    found = re.search(r"(?m)^--ac auto: (\S+)", log.read_text(errors="replace"))
    if not found:
        raise Failure(f"the run with --ac auto printed no choice in {log}")
    return found[1]


def counted_steps(metrics, warmup):
    steps = [json.loads(line) for line in metrics.read_text(errors="replace").splitlines() if line.startswith("{")][warmup:]
    if not steps:
        raise Failure(f"the run has no step after the warm-up in {metrics}")
    return steps


def middle_step(steps):
    """Returns the step with the median time. All figures of a run are taken from this step, to be consistent."""
    return sorted(steps, key=lambda step: step["step_time_s"])[len(steps) // 2]


def figures_of(steps, flops, ranks):
    step = middle_step(steps)
    figures = {name: step[name] for name in ("step_time_s", "tokens_per_s", "mfu")}
    figures["reserved_bytes"] = max(each["peak_memory_bytes"] for each in steps)
    if "peak_active_bytes" in step:
        figures["active_bytes"] = max(each["peak_active_bytes"] for each in steps)
    if step["mfu"] is not None:
        figures["mfu_causal"] = step["mfu_causal"]
        figures["peak_flops"] = step["tflops"] * 1e12 / (step["mfu"] / 100)
        figures["hfu"] = 100 * flops / (step["step_time_s"] * ranks) / figures["peak_flops"]
    return figures


def measure_peer(trial, given, name, folder, tokens):
    """Measures a trial's step on PyTorch with the script of --peer."""
    log = folder / f"peer-{name}.log"
    if trial.ranks != 1:
        raise Failure(f"--peer runs one rank, not {trial.ranks}")
    if trial.ac not in ("none", "full"):
        raise Failure(f"--peer has no --ac {trial.ac}")
    run_logged(["/usr/bin/env", "python3", given.peer, "--config", trial.config, "--tokens", tokens, "--ac", trial.ac, "--batch",
                trial.batch, "--seq", trial.seq, "--warm", given.warmup, "--steps", given.steps - given.warmup, "--device",
                given.device, *PEERS[name]], log)
    step = middle_step(counted_steps(log, warmup=0))
    return {"step_time_s": step["step_time_s"], "tokens_per_s": step["tokens_per_s"]}


def figures_or_error(measured):
    """Returns the figures that `measured` returns, or {"error": why there are no figures}."""
    try:
        return measured()
    except (Failure, OSError, ValueError, KeyError, ArithmeticError) as error:
        return {"error": str(error) or type(error).__name__}


def measure(trial, given, peak_flops, folder, tokens):
    """Returns the row of a trial for results.json."""
    folder.mkdir(parents=True, exist_ok=True)

    def train():
        log, metrics = folder / "run.log", folder / "metrics.jsonl"
        run_logged([BIN / "tessera-run", "--nproc", trial.ranks, "--", BIN / "llama_train", *run_flags(trial, given), "--tokens",
                    tokens, "--peak-flops", peak_flops, "--metrics", metrics], log)
        if trial.ac == "auto":
            trial.ac = chosen_ac(log)
        return figures_of(counted_steps(metrics, given.warmup), flops_of_step(run_flags(trial, given), folder), trial.ranks)

    figures = figures_or_error(train)
    peers = {name: figures_or_error(lambda name=name: measure_peer(trial, given, name, folder, tokens))
             for name in (PEERS if given.peer else ())}
    row = {"model": trial.model, "mesh": trial.mesh} | {name: getattr(trial, name) for name in
                                                        ("ac", "batch", "seq", "dp", "cp", "tp")}
    for name in ("step_time_s", "tokens_per_s", "peak_flops", "mfu", "mfu_causal", "hfu", "active_bytes", "reserved_bytes"):
        row[name] = figures.get(name)
    return row | {"peer": peers, "error": figures.get("error")}


def write_tokens(path, count):
    """Writes an llm.c shard of small token ids, which every vocabulary has."""
    period = struct.pack("<61H", *range(61))
    with open(path, "wb") as out:
        out.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253))
        out.write((period * (count // 61 + 1))[:2 * count])


# ---- Results.

def shown(value, form, unit=""):
    return "-" if value is None else f"{value:{form}}{unit}"


def to_table(rows):
    form = "{:<16} {:>6} {:>10} {:>6} {:>6} {:>10} {:>8} {:>8} {:>8} {:>12} {:>11} {:>13}\n"
    text = form.format("model", "mesh", "ac", "batch", "seq", "tokens/s", "MFU", "causal", "HFU", "peak TFLOP/s", "active GiB",
                       "reserved GiB")
    for row in rows:
        trial = [row[name] for name in ("model", "mesh", "ac", "batch", "seq")]
        if row["error"]:
            text += "{:<16} {:>6} {:>10} {:>6} {:>6}   {}\n".format(*trial, row["error"])
            continue
        scaled = [row[name] and row[name] / scale for name, scale in
                  (("peak_flops", 1e12), ("active_bytes", 2**30), ("reserved_bytes", 2**30))]
        text += form.format(*trial, shown(row["tokens_per_s"], ".0f"),
                            *(shown(row[name], ".1f", " %") for name in ("mfu", "mfu_causal", "hfu")),
                            *(shown(value, ".3g") for value in scaled))
    return text


def peers_text(rows):
    text = ""
    for row in rows:
        for name, peer in row["peer"].items():
            speed = peer.get("error") or f"{peer['tokens_per_s']:.0f} tokens/s"
            if "error" not in peer and not row["error"]:
                speed += f"; ours is {row['tokens_per_s'] / peer['tokens_per_s']:.2f} times as fast"
            text += f"PyTorch {name}, {row['model']} {row['ac']} {row['batch']}: {speed}\n"
    return text


def write_results(path, rows):
    """Replaces the file atomically, so that a reader never sees a part of the file."""
    runs = [{name: value for name, value in row.items() if name != "mesh"} for row in rows]
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps({"runs": runs}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    new.replace(path)


def measure_all(words):
    given = parse(words)
    trials, out = trials_of(given), pathlib.Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in given.shape:
        config = config_of(out, name)
        config.parent.mkdir(exist_ok=True)
        config.write_text(json.dumps(SHAPES[name].config, indent=1) + "\n")
    tokens = out / "tokens.bin"
    write_tokens(tokens, max(trial.batch * trial.seq for trial in trials) + 1)
    os.environ["TESSERA_COUNT_MEMORY"] = "1"  # llama_train then reports peak_active_bytes on a CPU, too
    rows, peaks = [], {}
    for index, trial in enumerate(trials, start=1):
        folder = out / f"run-{index}"
        print(f"{folder} of {len(trials)}", file=sys.stderr, flush=True)
        # The first run of each number of ranks measures the peak: a new measurement would vary with the machine's load.
        known = peaks.get(trial.ranks) if given.peak_flops == "measure" else None
        rows.append(measure(trial, given, repr(known) if known else given.peak_flops, folder, tokens))
        if rows[-1]["peak_flops"]:
            peaks.setdefault(trial.ranks, rows[-1]["peak_flops"])
        write_results(out / "results.json", rows)  # after each trial, so that an interruption loses only one trial
    print(to_table(rows) + peers_text(rows) + "".join(f"published, {name}: {SHAPES[name].published}\n" for name in given.shape) +
          f"written: {out / 'results.json'}")
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception ends the current run
    try:
        sys.exit(measure_all(sys.argv[1:]))
    except (Failure, OSError) as failure:
        sys.exit(f"bench_mfu: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
