"""Runs of the program: each has a folder, and one that is finished is not run again."""
import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import last_bits
from experiment import BadFile, check


MOST_LETTERS = 60  # of a name, in its folder's
END_S = 60  # for the launcher to end its ranks, seconds
MADE_HERE = ".experiments-run"  # a file in each run's folder


@dataclasses.dataclass
class Job:
    name: str
    flags: dict  # with the seed
    ranks: int
    flipped: int = 0  # above 0: begins with flipped bits, drawn from this
    bit: int = 0  # the one of the mantissa that is flipped, 0 the last


@dataclasses.dataclass
class Outcome:
    steps: list = dataclasses.field(default_factory=list)  # the metrics' records
    error: str = ""
    kept: bool = False
    seconds: float = 0

    def said(self):
        if self.error:
            return f"failed: {self.error}"
        return f"{len(self.steps)} steps" + (", kept" if self.kept else f" in {self.seconds:.1f} s")


def toml(flags):
    """JSON's strings, numbers and arrays are TOML's too, but for its pairs of escapes."""
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in flags.items())


def stamp(path):
    """Changes whenever a file does."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def write_whole(path, text):
    """A killed process leaves the old file or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


class Launcher:
    """Starts the program of an experiment, in the folder of its file: paths there are relative to it."""

    def __init__(self, folder, asked):
        self.launcher, self.home = pathlib.Path(folder, "tessera-run").resolve(), asked.path.parent
        place = self.home if "/" in asked.program else pathlib.Path(folder).resolve()
        self.program = place / asked.program
        for path in (self.launcher, self.program):
            check(os.access(path, os.X_OK), f"{path} is no program; build it, or name its folder with --bin")

    def command(self, ranks, flags_file):
        return [self.launcher, "--nproc", str(ranks), "--", self.program, "--config-file", flags_file]

    def inputs(self, flags):
        """What a run reads: if it changes, a finished run says nothing."""
        values = [part for value in flags.values() for part in (value if isinstance(value, list) else [value])]
        return [stamp(path) for path in [self.program, *(path for value in values if isinstance(value, str)
                                                         for path in files_of(self.home, value))]]


def stop(process):
    """Ends the launcher, which ends its ranks, and waits no longer than END_S."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def files_of(home, value):
    """The files that a flag names: one, those of a folder, or those that a pattern fits."""
    path = home / value
    if os.path.isdir(path) and value:
        return sorted(file for file in path.iterdir() if file.is_file())
    return [pathlib.Path(name) for name in sorted(glob.glob(str(path))) if pathlib.Path(name).is_file()]


def why_failed(log, program):
    """The line of a failed run's output that says why: the program's own, or the last one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if f"{program}: " in line or "error: " in line]
    return own[0] if own else (lines or ["it wrote nothing"])[-1]


def read_metrics(path):
    """The records, without a last line that a killed run has not finished."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except OSError:
        return []


def folder_name(name):
    """The name of a run's folder: no two names have the same one, and none leads elsewhere."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:MOST_LETTERS].strip("-")
    return "-".join(filter(None, [readable, hashlib.sha256(name.encode()).hexdigest()[:8]]))


class Folder:
    """Where the runs and the report of an experiment are. One process at a time works in it."""

    def __init__(self, path, asked):
        self.path, self.file = path, asked.path

    def __enter__(self):
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "a")
            # Passed on to the launcher: its ranks may outlive a killed process of ours.
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadFile(f"another process works in {self.path}; wait for it, or give --out another folder") from None
        except OSError as error:
            raise BadFile(f"can't write in {self.path}: {error.strerror}; give --out a folder that can be written") from None
        self.claim()
        return self

    def claim(self):
        """Keeps the file that the folder belongs to: another file that is there stays."""
        owner = self.path / "experiment.json"
        if owner.exists():
            with contextlib.suppress(OSError, ValueError, AttributeError):
                found = json.loads(owner.read_text(encoding="utf-8")).get("file")
                check(found == str(self.file), f"{self.path} has the runs of {found}; give --out another folder")
                return
        taken = [name for name in ("experiment.json", "runs", "report.json", "report.html") if (self.path / name).exists()]
        check(not taken, f"{self.path} has {', '.join(taken)}, but of no experiment; give --out another folder")
        write_whole(owner, json.dumps({"file": str(self.file)}) + "\n")

    def __exit__(self, *_):
        self.lock.close()

    def of(self, job):
        return self.path / "runs" / folder_name(job.name)

    def renew(self, folder):
        """Makes a run's folder empty. Only what was made here is deleted."""
        made = folder / MADE_HERE
        if os.path.lexists(folder) and not made.is_file():
            check(folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()),
                  f"{folder} is no run's folder; move it away, or give --out another folder")
        folder.mkdir(parents=True, exist_ok=True)
        made.touch()
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry != made:
                entry.unlink()

    def train(self, job, launcher):
        """Runs a job, unless it is finished."""
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
            error = "it wrote no metrics; give steps"
        if not error:
            write_whole(done, json.dumps(record))
        return Outcome([] if error else steps, error, seconds=time.monotonic() - begin)

    def run(self, job, launcher, folder):
        flags = dict(job.flags)
        if job.flipped:
            # The same weights as the run has that is perturbed, written by it.
            weights = folder / "weights"
            error = self.start(launcher, job.ranks, flags | {"steps": 0, "save-hf": str(weights)}, folder / "weights.log")
            if error:
                return error
            for file in sorted(weights.glob("*.safetensors")):
                last_bits.flip(file, job.flipped, job.bit)
            flags.pop("config", None)
            flags["model"] = str(weights)
        flags["metrics"] = str(folder / "metrics.jsonl")
        error = self.start(launcher, job.ranks, flags, folder / "output.log")
        shutil.rmtree(folder / "weights", ignore_errors=True)
        return error

    def start(self, launcher, ranks, flags, log):
        """Runs the program to its end. Returns why it failed, or nothing."""
        flags_file = log.with_suffix(".toml")
        flags_file.write_text(toml(flags), encoding="utf-8")
        with open(log, "wb") as output:
            process = subprocess.Popen(
                launcher.command(ranks, flags_file), cwd=launcher.home, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=[self.lock.fileno()],
                # The memory of tensors. On a CPU the process itself has more.
                env=dict(os.environ, TESSERA_COUNT_MEMORY="1"))
            try:
                status = process.wait()
            finally:
                if process.poll() is None:
                    stop(process)
        return f"{why_failed(log, launcher.program.name)} (exit code {status}; {log})" if status else ""
