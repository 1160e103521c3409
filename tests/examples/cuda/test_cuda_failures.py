"""How a job with NCCL ends where something fails: soon, and in one line that names rank, collective and
unit. On the fake CUDA."""
import pathlib
import re
import tempfile
import time

import pytest

import programs

pytestmark = pytest.mark.skipif(not programs.FAKE_CUDA.exists(),
                                reason="built without CUDA's headers")


@pytest.fixture(name="folder")
def _folder():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def train(folder, monkeypatch, fault="", timeout=4, flags=()):
    """Runs llama_train on dp=2 x tp=2. With a fault, the time-out is `timeout` seconds."""
    monkeypatch.setenv("TESSERA_TIMEOUT", str(timeout) if fault else "60")
    monkeypatch.setenv("TESSERA_WATCHDOG", "0")
    monkeypatch.setenv("TESSERA_DEBUG", "0")
    text = programs.write(folder / "text", "All work and no play makes Jack a dull boy. " * 1000)
    config = programs.ROOT / "examples/llama/configs/tiny.json"
    return programs.train_on_fake_cuda(folder, ["--config", config, "--text", text, "--steps", 2, "--batch", 4,
                                    "--seq", 32, *flags], dp=2, tp=2, fault=fault)


def error_of(run, rank):
    """Returns the only line of standard error in which the rank says why it ended."""
    lines = [line for line in run.done.stderr.splitlines()
             if re.match(rf"\[rank {rank}\] (error|llama_train): ", line)]
    assert len(lines) == 1, run.done.stderr
    return lines[0]


def test_groups_are_split_and_destroyed_in_reverse_order(folder, monkeypatch):
    """One rank is slow to end its last group, so that its peers have ended already."""
    run = train(folder, monkeypatch, fault="slow-end:4@0", timeout=60)
    assert run.done.returncode == 0, run.done.stderr
    assert "ended after" not in run.done.stderr
    for report in run.reports.values():
        communicators = report["communicators"]
        assert [group["ended"] for group in communicators] == list(range(len(communicators)))[::-1]
        assert all(group["finalized"] and group["ended_by"] == "destroy" for group in communicators)
        assert not report["violations"]
        # NCCL splits the groups of a mesh from one communicator.
        assert made(report)[0] == ("init", 4)
        assert set(made(report)[1:]) == {("split", 2), ("split", 4)}


def made(report):
    return [(group["made_by"], group["ranks"]) for group in report["communicators"]]


def traffic(report):
    """Bytes by collective of each communicator, in the order of their making."""
    moved = [{} for _ in report["communicators"]]
    places = {group["id"]: i for i, group in enumerate(report["communicators"])}
    for row in report["collectives"]:
        group = moved[places[row["communicator"]]]
        group[row["collective"]] = group.get(row["collective"], 0) + row["bytes"]
    return moved


def test_groups_are_created_separately_if_ranks_are_late(folder, monkeypatch):
    """Ranks 2 and 3 do not wait for rank 1 to split the groups of tp. The traffic is that of groups that are split."""
    monkeypatch.setenv("TESSERA_TIMEOUT", "60")
    run = programs.run_on_fake_cuda(folder, [programs.BIN / "late_rank", 5], 4)
    assert run.done.returncode == 0, run.done.stderr
    for report in run.reports.values():
        assert made(report) == [("init", 2), ("init", 4), ("split", 2), ("split", 4)]
        assert [group["ended"] for group in report["communicators"]] == [3, 2, 1, 0]
        assert all(group["ended_by"] == "destroy" for group in report["communicators"])
        assert not report["violations"]
    split = programs.run_on_fake_cuda(folder, [programs.BIN / "late_rank", 0], 4)
    assert made(split.reports[0]) == [("init", 4), ("split", 2), ("split", 2), ("split", 4)]
    for rank, report in run.reports.items():
        of_tp, of_all, *others = traffic(report)
        assert [of_all, of_tp, *others] == traffic(split.reports[rank])


def test_hanging_set_up_ends_at_the_time_out(folder, monkeypatch):
    began = time.monotonic()
    run = train(folder, monkeypatch, fault="init:2@1", timeout=3)
    # Besides the time-out, four processes take time to start and to end.
    assert time.monotonic() - began < 3 + 8
    assert run.done.returncode == 1
    said = {}
    for line in run.done.stderr.splitlines():
        if found := re.match(r"\[rank (\d)\] (?:error|llama_train): (.*)", line):
            said.setdefault(int(found[1]), []).append(found[2])
    assert all(len(lines) == 1 for lines in said.values()), run.done.stderr
    hung = r"set-up \(call 0 of group 'tp'\), rank {}: no rank is known to be missing, but the call did not end for 3.* s: rank 0 "
    # The launcher ends all ranks after the first error line, which may be of a rank that waits for the others.
    assert any(re.match(hung.format(rank), said[rank][0]) for rank in {0, 1} & said.keys()) or any(
        "rank 0 waits in set-up (call 0 of group 'tp')" in said[rank][0] for rank in {2, 3} & said.keys()), run.done.stderr
    for rank in {2, 3} & said.keys():
        assert re.match("all_reduce in group 'start' .*: rank.* 0, 1 did not arrive for", said[rank][0]), run.done.stderr


@pytest.mark.parametrize("fault, rank, said", [
    # The faults are: an error in the background, a collective that fails at once, a lost collective, a rank without memory.
    ("async:40@1", 1, r"error: \w+ .*\(call \d+ of group '(dp|tp)'\).*, rank 1: NCCL reported an error"),
    ("nccl:40@1", 1, r"\w+ .*in group '(dp|tp)' \(ranks .*\), rank 1: NCCL reported an error"),
    ("lost:40@1", None, r"error: .*\(call \d+ of group '(dp|tp)'\).*, rank \d.* did not end for 4"),
    ("malloc-above:1000000@1", 1, "CUDA out of memory")])
def test_failure_is_reported_in_one_line(folder, monkeypatch, fault, rank, said):
    run = train(folder, monkeypatch, fault=fault)
    assert run.done.returncode == 1
    assert re.search(said, run.done.stderr if rank is None else error_of(run, rank)), run.done.stderr


@pytest.mark.parametrize("malloc, where", [(6, "the forward of unit 'model.layers"), (9, "the backward of ")])
def test_out_of_memory_names_the_unit(folder, monkeypatch, malloc, where):
    """The request for memory that fails is one of the activations; the requests for the weights come first."""
    run = train(folder, monkeypatch, fault=f"malloc:{malloc}@1", timeout=60, flags=["--batch", 16, "--seq", 512])
    assert run.done.returncode == 1
    line = error_of(run, 1)
    assert f"step 1, {where}" in line and ", rank 1: CUDA out of memory. Tried to allocate" in line
    assert line.endswith("; pass a smaller --batch or --ac full, or start more ranks")
