"""Runs of llama_train that tests on hosts start and watch."""
import itertools
import time

import programs
from hosts import finish

numbers = itertools.count()


class Run:
    """llama_train with its files in a new folder."""
    def __init__(self, folder, *flags):
        self.folder = folder / str(next(numbers))
        self.folder.mkdir()
        config = programs.write_config(self.folder, programs.SMALL)
        tokens = programs.write_tokens(self.folder / "t.bin", programs.text_tokens(5000, 256))
        self.metrics = self.folder / "m.jsonl"
        given = ["--config", config, "--tokens", tokens, "--batch", 8, "--seq", 32, "--steps", 6, "--metrics", self.metrics]
        self.program = programs.words([programs.BIN / "llama_train", *given, *flags])

    def on_one_host(self):
        programs.succeed(programs.on_ranks(4, self.program))
        return self.losses()

    def on(self, machines, **kwargs):
        for status, output in finish(machines.start(4 // len(machines), self.program, **kwargs)):
            assert status == 0, output
        return self.losses()

    def losses(self):
        return [(step["loss"], step["grad_norm"]) for step in programs.read_metrics(self.metrics)]

    def steps(self):
        """How far it has come: the last step that the file names."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return len(lines)


def wait_for_step(run, step, launchers):
    """Until the run has trained so far."""
    ends_at = time.monotonic() + 60
    while run.steps() < step:
        if time.monotonic() > ends_at or any(launcher.poll() is not None for launcher in launchers):
            raise AssertionError(f"{run.steps()} steps were trained:\n{finish(launchers, timeout=1)}")
        time.sleep(0.05)
