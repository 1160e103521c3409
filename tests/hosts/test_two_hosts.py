"""Jobs on two hosts, and what becomes of them when the network between does not work."""
import os
import re
import signal

import numpy as np
import pytest

import hosts
import programs
from hosts import Hosts, Run, finish, wait_for_ranks_to_end, wait_for_step

REASON = hosts.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")
LIMIT = 4  # seconds: TESSERA_TIMEOUT


MESHES = {"fsdp_of_tp": ["--dp", 2, "--tp", 2], "fsdp": ["--dp", 4, "--zero", 2, "--accumulate", 2],
          "hsdp": ["--dp-replicate", 2, "--dp", 2], "cp": ["--dp", 2, "--cp", 2]}


@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_one_host(folder, two, mesh):
    """But for rounding: between hosts four terms are added in another order than in one host's memory."""
    there, here = Run(folder, *MESHES[mesh]).on(two), Run(folder, *MESHES[mesh]).on_one_host()
    assert np.allclose(there, here, rtol=1e-5, atol=0)


def test_tensor_parallelism_within_hosts_uses_no_network(folder, two):
    """What the ranks of a host exchange goes through its memory: only FSDP's half of the traffic is on the link."""
    run = Run(folder, *MESHES["fsdp_of_tp"])
    run.on(two)
    sent = sum(sum(use["bytes"] for use in step["comm"]["dp"].values()) for step in programs.read_metrics(run.metrics))
    # A rank's figure holds what it puts in; all four do, and headers and agreements add a little.
    assert two.network.bytes_sent() < 4 * sent * 1.5


@pytest.mark.parametrize("first, then", [(2, 1), (1, 2)])
def test_resumes_on_another_number_of_hosts(folder, first, then):
    flags = ["--dp", 2, "--tp", 2]
    whole = Run(folder, *flags).on_one_host()
    saved = folder / f"steps-{first}"
    losses = []
    for count, steps in ((first, 3), (then, 6)):
        run = Run(folder, *flags, "--steps", steps, "--checkpoint", saved, "--resume", "auto")
        with Hosts(count) as machines:
            losses += run.on(machines) if count > 1 else run.on_one_host()
    assert losses == whole


def test_two_jobs_share_two_hosts(folder, two):
    runs = [Run(folder, "--dp", 2, "--tp", 2, "--seed", seed) for seed in (1, 2)]
    started = [two.start(2, run.program, port=port) for run, port in zip(runs, (29500, 29600))]
    for status, output in finish(sum(started, [])):
        assert status == 0, output
    for seed, run in zip((1, 2), runs):
        assert run.losses() == Run(folder, "--dp", 2, "--tp", 2, "--seed", seed).on_one_host()


def names(output, rank):
    """Whether a line about a wait names the rank as missing."""
    return re.search(rf"rank\(s\) (\d+, )*{rank}(, \d+)* did not arrive", output)


@pytest.mark.parametrize("mesh, victim", [("fsdp_of_tp", 0), ("fsdp", 1)])
def test_disconnected_host_is_named(folder, two, mesh, victim):
    run = Run(folder, *MESHES[mesh], "--steps", 100000)
    launchers = two.start(2, run.program, environment={"TESSERA_TIMEOUT": str(LIMIT)})
    wait_for_step(run, 5, launchers)
    two.cut(victim)
    for number, output in enumerate(wait_for_ranks_to_end(two, launchers, timeout=LIMIT + 10)):
        other = 1 - number
        assert any(names(output, rank) for rank in (2 * other, 2 * other + 1)), output


def test_powered_off_host_is_named(folder, two):
    """Nothing closes its connections."""
    victim = 0
    run = Run(folder, "--dp", 2, "--tp", 2, "--steps", 100000)
    launchers = two.start(2, run.program, environment={"TESSERA_TIMEOUT": str(LIMIT)})
    wait_for_step(run, 5, launchers)
    two.cut(victim)
    two[victim].end()
    output, = wait_for_ranks_to_end([two[1 - victim]], [launchers[1 - victim]], timeout=LIMIT + 15)
    assert names(output, 2 * victim) or names(output, 2 * victim + 1), output


@pytest.mark.parametrize("mesh, victim", [("fsdp_of_tp", 0), ("fsdp", 1)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_rank_ends_both_hosts(folder, two, number, mesh, victim):
    run = Run(folder, *MESHES[mesh], "--steps", 100000)
    launchers = two.start(2, run.program, environment={"TESSERA_TIMEOUT": str(LIMIT)})
    wait_for_step(run, 5, launchers)
    os.kill(two[1].processes_of("llama_train")[victim], number)
    # torchrun kills a rank that ignores SIGTERM, as a stopped rank does, after 30 seconds.
    ends = finish(launchers, timeout=LIMIT + (25 if number == signal.SIGKILL else 60))
    assert all(code != 0 for code, _ in ends)
    assert any(names(ends[0][1], rank) or re.search(rf"rank {rank}\b", ends[0][1]) for rank in (2, 3)), ends[0][1]
    assert [host.processes() for host in two] == [[], []]


def test_torchrun_restarts_all_hosts_after_a_kill(folder, two):
    flags = ["--dp", 2, "--tp", 2, "--steps", 30]
    whole = Run(folder, *flags).on(two)
    run = Run(folder, *flags, "--checkpoint", folder / "again", "--checkpoint-every", 5, "--resume", "auto")
    launchers = two.start(2, run.program, environment={"TESSERA_TIMEOUT": "4"}, restarts=3)
    wait_for_step(run, 8, launchers)
    os.kill(two[1].processes_of("llama_train")[0], signal.SIGKILL)
    for status, output in finish(launchers):
        assert status == 0, output
    found = {line["step"]: line["loss"] for line in programs.read_metrics(run.metrics)}
    assert list(found.values()) == [loss for loss, _ in whole]


@pytest.mark.parametrize("places", [[0, 0, 0, 1], [0, 1, 0, 0]])
def test_hosts_can_have_different_rank_counts(folder, two, places):
    """Without a launcher."""
    run = Run(folder, "--dp", 4)
    job = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": two[0].ip, "MASTER_PORT": "29500"}
    started = [two[place].start(run.program, job | {"RANK": str(rank), "LOCAL_RANK": str(places[:rank].count(place))})
               for rank, place in enumerate(places)]
    for status, output in finish(started):
        assert status == 0, output
    assert np.allclose(run.losses(), Run(folder, "--dp", 4).on_one_host(), rtol=1e-5, atol=0)
