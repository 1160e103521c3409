"""Jobs that begin again on several hosts, with all of them or with those that are left."""
import os
import random
import signal
import sys
import time

import pytest
from safetensors.numpy import load_file

import hosts
import programs
from hosts import finish
from runs import Run, wait_for_step

REASON = hosts.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")

TIMES = ["--rdzv-conf", "join_timeout=60,last_call_timeout=2"]
MESH = ["--dp", -1, "--tp", 2]


def losses_by_step(run):
    """Each step's once: a step that a restart repeats must have the same."""
    found = {}
    for line in programs.read_metrics(run.metrics):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    return found


def tessera_run(nodes, restarts):
    return [programs.BIN / "tessera-run", "--nnodes", nodes, "--nproc", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint",
            "10.77.0.1:29500", "--max-restarts", restarts, "--timeout", 4, *TIMES, "--"]


def torchrun(nodes, restarts):
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", 2, "--rdzv-backend",
            "c10d", "--rdzv-endpoint", "10.77.0.1:29500", "--max-restarts", restarts, *TIMES, "--no-python"]


def start(machines, launcher, run, environment=None):
    return [host.start([*launcher, *run.program], environment) for host in machines]


@pytest.mark.parametrize("launcher", [tessera_run, torchrun])
def test_a_killed_rank_starts_all_hosts_again(folder, two, launcher):
    flags = [*MESH, "--steps", 30]
    whole = Run(folder, *flags).on(two)
    saved = ["--checkpoint", folder / launcher.__name__, "--checkpoint-every", 5, "--resume", "auto"]
    run = Run(folder, *flags, *saved)
    launchers = start(two, launcher("2", 3), run, {"TESSERA_TIMEOUT": "4"})
    wait_for_step(run, 8, launchers)
    os.kill(two[1].processes_of("llama_train")[0], signal.SIGKILL)
    for status, output in finish(launchers):
        assert status == 0, output
    assert list(losses_by_step(run).values()) == [loss for loss, _ in whole]


def test_a_job_goes_on_without_a_host_that_is_gone(folder, two):
    """From the last step that both had saved, on half of the ranks: nothing is skipped or repeated."""
    flags = [*MESH, "--steps", 30]
    whole = Run(folder, *flags).on_one_host()
    run = Run(folder, *flags, "--checkpoint", folder / "gone", "--checkpoint-every", 5, "--resume", "auto")
    launchers = start(two, tessera_run("1:2", 3), run)
    wait_for_step(run, 8, launchers)
    two.cut(1)
    two[1].end()
    (status, output), _ = finish(launchers)
    assert status == 0, output
    assert "starting with 1 of 2 nodes" in output
    found = {line["step"]: line["loss"] for line in programs.read_metrics(run.metrics)}
    assert sorted(found) == list(range(1, 31))
    # On another number of ranks sums are rounded otherwise.
    assert list(found.values()) == pytest.approx([loss for loss, _ in whole], rel=1e-4)


class Trouble:
    """What happens to a job, drawn from a seed."""
    def __init__(self, machines, seed):
        self.machines = machines
        self.random = random.Random(seed)
        self.count = 0

    def cut(self):
        number = self.random.randrange(len(self.machines))
        self.machines.cut(number)
        time.sleep(self.random.choice([0.5, 6]))  # TCP mends the one, the other is longer than the time-out
        self.machines.restore(number)

    def kill(self):
        self._signal(signal.SIGKILL)

    def stop(self):
        """A rank that does not come."""
        self._signal(signal.SIGSTOP)

    def pause(self):
        """One that comes late."""
        for pid in self._signal(signal.SIGSTOP):
            time.sleep(0.5)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

    def _signal(self, number):
        ranks = self.random.choice(list(self.machines)).processes_of("llama_train")
        chosen = self.random.sample(ranks, min(1, len(ranks)))
        for pid in chosen:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        return chosen

    def one(self):
        self.count += 1
        self.random.choice([self.cut, self.kill, self.stop, self.pause])()


def test_trouble_of_all_kinds_changes_no_bit(folder, two):
    """A soak: TESSERA_SOAK=500 is the number of steps, TESSERA_SOAK_SEED another course of events."""
    steps, seed = int(os.environ.get("TESSERA_SOAK", 120)), int(os.environ.get("TESSERA_SOAK_SEED", 1))
    flags = [*MESH, "--steps", steps, "--log-every", 50]
    whole = Run(folder, *flags, "--save-hf", folder / "whole")
    whole.on(two)
    run = Run(folder, *flags, "--checkpoint", folder / f"soak-{seed}", "--checkpoint-every", 10, "--resume", "auto",
              "--save-hf", folder / "troubled")
    launchers = start(two, tessera_run("2", 1000), run)
    trouble = Trouble(two, seed)
    ends_at = time.monotonic() + 4 * steps
    reached = 0
    while all(launcher.poll() is None for launcher in launchers) and time.monotonic() < ends_at:
        # Some way on, so that the run gets to its end.
        wanted = min(steps, reached + trouble.random.randrange(10, 40))
        while run.steps() < wanted and all(launcher.poll() is None for launcher in launchers):
            time.sleep(0.02)
        reached = run.steps()
        if reached < steps:
            trouble.one()
    for status, output in finish(launchers, timeout=240):
        assert status == 0, output
    restarts = output.count("starting the job again")
    print(f"{trouble.count} troubles, {restarts} restarts")
    assert restarts > 0
    assert losses_by_step(run) == losses_by_step(whole)
    weights, expected = (load_file(folder / name / "model.safetensors") for name in ("troubled", "whole"))
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in expected)
