"""Runs of llama_train that are compared with one another."""
import pathlib
import shutil
import subprocess

import programs

STEPS, EVERY, BATCH = 8, 3, 12
SAME = ("step", "loss", "grad_norm", "lr")


def figures(metrics):
    """What of the metrics does not depend on the time."""
    return [[record[key] for key in SAME] for record in programs.read_metrics(metrics)]


class TrainingRuns(programs.InFolder):
    """Every run has a folder: its checkpoints, metrics, report and exported weights."""

    def flags(self, run, steps=STEPS):
        return ["--config", self.config, "--tokens", self.tokens, "--steps", steps, "--batch", BATCH,
                "--seq", 16, "--schedule", "cosine", "--warmup", 2, "--dropout", 0.1, "--metrics",
                run / "metrics.jsonl", "--save-hf", run / "model"]

    def checkpoints(self, run):
        return ["--checkpoint", run / "steps"]

    def train(self, name, flags=(), dp=2, tp=2, steps=STEPS, **kwargs):
        run = self.folder / name  # or `name` itself, where that is a path
        programs.train([*self.flags(run, steps), *flags], dp, tp, **kwargs)
        return run

    def broken_copy(self, name, unbroken, step=EVERY):
        """The same run, as if it had been killed after it had saved this step."""
        run = self.folder / name
        shutil.copytree(unbroken / f"steps/step-{step:08}", run / f"steps/step-{step:08}")
        shutil.copy(unbroken / "metrics.jsonl", run)
        return run

    def weights(self, run):
        return (run / "model/model.safetensors").read_bytes()

    def assert_equal_runs(self, run, other):
        self.assertEqual(figures(run / "metrics.jsonl"), figures(other / "metrics.jsonl"))
        self.assertEqual(self.weights(run), self.weights(other))


class Job:
    """llama_train under tessera-run, in the background."""

    def __init__(self, arguments, dp=2, tp=2, launcher=()):
        command = [programs.BIN / "tessera-run", "--nproc", dp * tp, *launcher, "--",
                   programs.BIN / "llama_train", "--dp", dp, "--tp", tp, *arguments]
        self.process = subprocess.Popen(programs.words(command), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_for_line(self, part):
        for line in self.process.stdout:
            if part in line:
                return
        raise AssertionError(f"no line with {part}: {self.process.stderr.read()}")

    def ranks(self):
        """The processes of the ranks, by number; those that have ended are missing."""
        found = {}
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            try:
                process = pathlib.Path("/proc", pid)
                is_rank = b"llama_train" in process.joinpath("cmdline").read_bytes().split(b"\0")[0]
                variables = process.joinpath("environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_rank:
                rank = next(v for v in variables if v.startswith(b"RANK="))
                found[int(rank[len(b"RANK="):])] = int(pid)
        return found

    def end(self, timeout=120):
        """(exit code, standard error)"""
        errors = self.process.communicate(timeout=timeout)[1]
        return self.process.returncode, errors
