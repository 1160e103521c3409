"""Starts the runs of an experiment. Each run has a folder, and a finished run is not repeated."""
import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import time

from experiment import BadFile, check


MOST_LETTERS = 60  # maximum letters of a run's name in its folder's name
END_S = 60  # seconds that the launcher has to end its ranks
MADE_HERE = ".experiments-run"  # marks a run's folder as created by this script
# The number of bytes that are read at a time: fast, and small enough for any machine's memory.
FLIPPED_AT_ONCE = 1 << 24


@dataclasses.dataclass
class Job:
    name: str
    flags: dict  # the program's flags, including the seed
    ranks: int
    flipped: int = 0  # if > 0: the seed of the bit flips with which the run starts
    bit: int = 0  # index of the flipped mantissa bit; 0 is the last


@dataclasses.dataclass
class Outcome:
    steps: list = dataclasses.field(default_factory=list)  # the metrics records of the run's steps
    error: str = ""
    kept: bool = False
    seconds: float = 0

    def said(self):
        if self.error:
            return f"failed: {self.error}"
        return f"{len(self.steps)} steps" + (", kept" if self.kept else f" in {self.seconds:.1f} s")


def toml(flags):
    """Flags as TOML. JSON's strings, numbers and arrays are valid TOML, except surrogate escapes, which
    ensure_ascii=False avoids."""
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in flags.items())


def stamp(path):
    """Returns a value that changes whenever the file changes."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def write_whole(path, text):
    """Writes a file atomically: a killed process leaves either the old or the new file."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


class Launcher:
    """Starts the program of an experiment in the folder of the experiment's file, to which paths are relative."""

    def __init__(self, folder, asked):
        self.launcher, self.home = pathlib.Path(folder, "tessera-run").resolve(), asked.path.parent
        place = self.home if "/" in asked.program else pathlib.Path(folder).resolve()
        self.program = place / asked.program
        for path in (self.launcher, self.program):
            check(os.access(path, os.X_OK), f"{path} is not a program; build the program, or pass its folder as --bin")

    def command(self, ranks, flags_file):
        return [self.launcher, "--nproc", str(ranks), "--", self.program, "--config-file", flags_file]

    def inputs(self, flags):
        """Returns stamps of all files that a run reads. If a stamp changes, the run must be repeated."""
        values = [part for value in flags.values() for part in (value if isinstance(value, list) else [value])]
        return [stamp(path) for path in [self.program, *(path for value in values if isinstance(value, str)
                                                         for path in files_of(self.home, value))]]


def stop(process):
    """Ends the launcher, which ends its ranks; kills the launcher after END_S."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def files_of(home, value):
    """Returns the files that a flag's value names: a file, the files of a folder, or the matches of a pattern."""
    path = home / value
    if os.path.isdir(path) and value:
        return sorted(file for file in path.iterdir() if file.is_file())
    return [pathlib.Path(name) for name in sorted(glob.glob(str(path))) if pathlib.Path(name).is_file()]


def why_failed(log, program):
    """Returns the line of a failed run's output with the reason: an error message, or else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if f"{program}: " in line or "error: " in line]
    return own[0] if own else (lines or ["the program wrote nothing"])[-1]


def read_metrics(path):
    """Returns the metrics records, without an incomplete last line of a killed run."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except OSError:
        return []


def flip(path, seed, bit=0):
    """Flips one bit of the mantissa (0: the last) of every second fp32 value of the matrices in a safetensors file: a model
    that differs only by rounding. `seed` determines which values are flipped. Norm weights are not changed: they are often 1, whose last bit
    would change all of them in the same direction.
    """
    draw = random.Random(f"{seed} {path.name}")
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name == "__metadata__" or tensor["dtype"] != "F32" or len(tensor["shape"]) < 2:
                continue
            begin, end = tensor["data_offsets"]
            for at in range(begin, end, FLIPPED_AT_ONCE):
                length = min(FLIPPED_AT_ONCE, end - at)
                lowest = int.from_bytes((1 << bit).to_bytes(4, "little") * (length // 4), "little")
                bits = int.from_bytes(draw.randbytes(length), "little") & lowest
                file.seek(8 + size + at)
                value = int.from_bytes(file.read(length), "little") ^ bits
                file.seek(8 + size + at)
                file.write(value.to_bytes(length, "little"))


def folder_name(name):
    """Returns the folder name of a run: unique for each name, and without path separators."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:MOST_LETTERS].strip("-")
    return "-".join(filter(None, [readable, hashlib.sha256(name.encode()).hexdigest()[:8]]))


class Folder:
    """The folder with the runs and the report of an experiment. Only one process at a time may use the folder."""

    def __init__(self, path, asked):
        self.path, self.file = path, asked.path

    def __enter__(self):
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "a")
            # The lock is inherited by the launcher, because its ranks may outlive a killed process of this script.
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadFile(f"another process uses {self.path}; wait for its end, or pass another folder as --out") from None
        except OSError as error:
            raise BadFile(f"can't write in {self.path}: {error.strerror}; pass a writable folder as --out") from None
        self.claim()
        return self

    def claim(self):
        """Reserves the folder for this experiment's file; raises BadFile if the folder belongs to another file."""
        owner = self.path / "experiment.json"
        if owner.exists():
            with contextlib.suppress(OSError, ValueError, AttributeError):
                found = json.loads(owner.read_text(encoding="utf-8")).get("file")
                check(found == str(self.file), f"{self.path} has the runs of {found}; pass another folder as --out")
                return
        taken = [name for name in ("experiment.json", "runs", "report.json", "report.html") if (self.path / name).exists()]
        check(not taken, f"{self.path} has {', '.join(taken)}, but no experiment wrote the folder; pass another folder as --out")
        write_whole(owner, json.dumps({"file": str(self.file)}) + "\n")

    def __exit__(self, *_):
        self.lock.close()

    def of(self, job):
        return self.path / "runs" / folder_name(job.name)

    def renew(self, folder):
        """Empties a run's folder. Deletes only folders that this script created."""
        made = folder / MADE_HERE
        if os.path.lexists(folder) and not made.is_file():
            check(folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()),
                  f"{folder} is not the folder of a run; move the folder away, or pass another folder as --out")
        folder.mkdir(parents=True, exist_ok=True)
        made.touch()
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry != made:
                entry.unlink()

    def train(self, job, launcher):
        """Runs a job unless it is finished."""
        folder, record = self.of(job), {"job": dataclasses.asdict(job), "inputs": launcher.inputs(job.flags)}
        done = folder / "done.json"
        with contextlib.suppress(OSError, ValueError):
            steps = read_metrics(folder / "metrics.jsonl")
            if steps and json.loads(done.read_text(encoding="utf-8")) == record:
                return Outcome(steps, kept=True)
        self.renew(folder)
        begin = time.monotonic()
        error = self.run(job, launcher, folder)
        steps = read_metrics(folder / "metrics.jsonl")
        if not error and not steps:
            error = "the run wrote no metrics; set steps to 1 or more"
        if not error:
            write_whole(done, json.dumps(record))
        return Outcome([] if error else steps, error, seconds=time.monotonic() - begin)

    def run(self, job, launcher, folder):
        flags = dict(job.flags)
        if job.flipped:
            # The initial weights of the run without flipped bits, which the same program writes.
            weights = folder / "weights"
            error = self.start(launcher, job.ranks, flags | {"steps": 0, "save-hf": str(weights)}, folder / "weights.log")
            if error:
                return error
            for file in sorted(weights.glob("*.safetensors")):
                flip(file, job.flipped, job.bit)
            flags.pop("config", None)
            flags["model"] = str(weights)
        flags["metrics"] = str(folder / "metrics.jsonl")
        error = self.start(launcher, job.ranks, flags, folder / "output.log")
        shutil.rmtree(folder / "weights", ignore_errors=True)
        return error

    def start(self, launcher, ranks, flags, log):
        """Runs the program to completion. Returns the reason of a failure, or nothing."""
        flags_file = log.with_suffix(".toml")
        flags_file.write_text(toml(flags), encoding="utf-8")
        with open(log, "wb") as output:
            process = subprocess.Popen(
                launcher.command(ranks, flags_file), cwd=launcher.home, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=[self.lock.fileno()],
                # Makes the metrics count only the memory of tensors: on a CPU the process has other memory, too.
                env=dict(os.environ, TESSERA_COUNT_MEMORY="1"))
            try:
                status = process.wait()
            finally:
                if process.poll() is None:
                    stop(process)
        return f"{why_failed(log, launcher.program.name)} (exit code {status}; {log})" if status else ""
