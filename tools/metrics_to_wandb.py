#!/usr/bin/env python3
"""Sends the metrics of a run of llama_train to Weights & Biases.

    metrics_to_wandb.py METRICS [--project NAME] [--name NAME] [--id ID] [--dir DIR]

METRICS is a file of --metrics, or the folder of --output-dir; for a folder, the flags in its config.toml become the
run's configuration. Needs the package wandb. Without WANDB_MODE, the run is offline in DIR/wandb (./wandb), and `wandb sync`
uploads it; with WANDB_MODE=online it is uploaded immediately. Each step is one entry: numbers under their names, and
traffic as comm/GROUP/COLLECTIVE/bytes. Values that are unknown in a step are left out. The steps so far of an unfinished
run can be sent too.
"""
import argparse
import json
import math
import os
import pathlib
import sys

try:
    import tomllib
except ImportError:  # Python 3.10 has no tomllib
    tomllib = None


def metrics_file(path):
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        sys.exit(f"error: there is no metrics file '{file}'; name a file of --metrics or a folder of --output-dir")
    return file


def flat(record, prefix=""):
    """Names and numbers of a record. null stands for a number that is unknown or not finite."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        elif value is not None and not (isinstance(value, float) and not math.isfinite(value)):
            yield prefix + name, value


def read_steps(file):
    """(step, numbers) of each line. A line without a line end is still being written."""
    last = -1
    for number, line in enumerate(file.read_text(errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return
        try:
            record = json.loads(line)
            step = record.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError):
            sys.exit(f"error: line {number} of '{file}' is no record of llama_train's metrics")
        if not isinstance(step, int) or step <= last:
            sys.exit(f"error: line {number} of '{file}' is of step {step}, after step {last}")
        last = step
        yield step, dict(flat(record))


def flags_of(path):
    """The flags of a run, from config.toml in its folder."""
    file = path / "config.toml"
    if not path.is_dir() or not file.is_file():
        return {}
    if tomllib is None:
        sys.exit(f"error: Python 3.11 or newer is needed to read '{file}'; name '{path / 'metrics.jsonl'}' instead")
    try:
        sections = tomllib.loads(file.read_text())
    except ValueError as error:
        sys.exit(f"error: '{file}' is no file of flags ({error}); name '{path / 'metrics.jsonl'}' instead")
    flags = {}
    for name, value in sections.items():
        flags |= value if isinstance(value, dict) else {name: value}  # in a section, or at the top level
    return flags


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=pathlib.Path)
    parser.add_argument("--project", help="of Weights & Biases (WANDB_PROJECT)")
    parser.add_argument("--name", help="of the run (one that wandb makes up)")
    parser.add_argument("--id", help="of a run that was sent before, to continue it")
    parser.add_argument("--dir", help="where the folder wandb is made (here)")
    arguments = parser.parse_args()
    steps = list(read_steps(metrics_file(arguments.metrics)))
    if not steps:
        sys.exit(f"error: '{metrics_file(arguments.metrics)}' has no whole line yet; send it after the first step")
    os.environ.setdefault("WANDB_MODE", "offline")
    try:
        import wandb
    except ImportError as error:
        sys.exit(f"error: {error}; install it for this Python with: {sys.executable} -m pip install wandb")
    run = wandb.init(project=arguments.project, name=arguments.name, id=arguments.id, dir=arguments.dir,
                     resume="allow" if arguments.id else None, config=flags_of(arguments.metrics))
    folder = pathlib.Path(run.dir).parent
    for step, numbers in steps:
        run.log(numbers, step=step)
    run.finish()
    print(f"{len(steps)} steps are in {folder}")


if __name__ == "__main__":
    main()
