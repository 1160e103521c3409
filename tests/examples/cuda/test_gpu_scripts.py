"""scripts/gpu/pack and run, rehearsed on the fake CUDA: a machine with a GPU is not the place to correct them."""
import json
import os
import pathlib
import runpy
import sys
import tempfile

import pytest

import programs

SCRIPTS = programs.ROOT / "scripts" / "gpu"
sys.path.insert(0, str(SCRIPTS))
import checks  # noqa: E402
import context as stage_context  # noqa: E402
import speeds  # noqa: E402

pytestmark = pytest.mark.skipif(not programs.FAKE_CUDA.exists(),
                                reason="built without CUDA's headers")
STAGES = ["versions", "gpu_test", "parity", "ranks", "collectives", "train", "peer", "compare", "ceilings", "profile",
          "kernels", "sanitizer"]


@pytest.fixture(scope="module")
def packed():
    with tempfile.TemporaryDirectory() as folder:
        pack = pathlib.Path(folder, "pack")
        programs.succeed([SCRIPTS / "pack", pack, programs.BIN.parent])
        yield pack


def run(packed, out, *flags, **environment):
    # The time limit is longer than those of all items together.
    done = programs.run([sys.executable, packed / "run", "--rehearse", "--out", out, *flags], timeout=1800,
                        env=os.environ | environment)
    results = out / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return done, rows


def of_stage(rows, stage):
    return [row for row in rows if row["stage"] == stage and row["what"] != "stage"]


def ends(rows):
    return [(row["stage"], row["value"]) for row in rows if row["what"] == "stage"]


def test_every_stage_ends(packed, tmp_path):
    """On eight cards."""
    done, rows = run(packed, tmp_path, TESSERA_FAKE_CUDA_DEVICES="8")
    assert done.returncode == 0, done.stderr
    assert {value for _, value in ends(rows)} == {"ended"}
    # The checks run before the speeds.
    assert list(dict.fromkeys(stage for stage, _ in ends(rows))) == STAGES
    assert {"2-D on 8 ranks, fp32, NCCL, to a CPU", "saved and resumed on 2 ranks, fp32, NCCL, to a CPU"} == {
        row["what"] for row in of_stage(rows, "ranks")}
    bandwidths = {(row["what"], row["unit"]): row["value"] for row in of_stage(rows, "collectives")}
    for name, factor in (("all_reduce", 7 / 4), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8)):
        algorithm, bus = (bandwidths[f"{name}, 64 KiB, 8 ranks", f"GB/s, {kind}"] for kind in ("algorithm", "bus"))
        assert bus == pytest.approx(algorithm * factor)
    assert [row["ok"] for row in of_stage(rows, "collectives") if row["what"] == "values"] == [True]
    shape = speeds.SHAPES[0]
    for stage, on_all in (("train", shape.on_cards(8)), ("train", shape.on_cards(4, 2)), ("peer", shape.on_cards(8))):
        assert (on_all.name(), "tokens/s") in {(row["what"], row["unit"]) for row in of_stage(rows, stage)}
    assert {(row["what"], row["unit"]) for row in of_stage(rows, "compare")} >= {
        (side, f"ms a step, {name}") for side in ("Tessera", "PyTorch", "PyTorch, FSDP2") for name in ("min", "median", "max")}
    # The fake fills norms with nothing: it computes no value that could be held against the CPU's.
    assert [row["ok"] for row in rows if row["what"] == "initial weights, GPU to CPU"] == [None]
    # The kernels of this library compute values on the fake.
    assert [row["ok"] for row in of_stage(rows, "gpu_test")] == [True] * 5
    assert {row["unit"] for row in of_stage(rows, "train")} >= {"ms a step", "tokens/s", "MFU, %", "MFU, causal, %"}
    assert {row["unit"] for row in of_stage(rows, "peer")} >= {"ms a step", "GiB, peak"}
    assert {row["value"] for row in of_stage(rows, "sanitizer")} == {"not run: rehearsal"}
    assert {row["what"] for row in of_stage(rows, "profile")} == {"kernels and copies"}
    assert {row["unit"] for row in of_stage(rows, "kernels")} == {"us", "% of the speed of a copy"}
    assert {"silu_mul 64x14336/tessera", "silu_mul 64x14336/aten"} <= {row["what"] for row in rows}
    assert (tmp_path / "results.md").read_text() in done.stdout
    assert "| peer | 1b B=4 T=4096 ac=none |" in done.stdout and "our tokens/s to its" in done.stdout
    stored, = (tmp_path / "benchmarks" / "results").glob("fakecuda-*.json")
    assert json.loads(stored.read_text())["rows"] == rows


def test_ranks_share_the_only_card(packed, tmp_path):
    """NCCL allows this for ranks that seem to be on different hosts."""
    done, rows = run(packed, tmp_path, "ranks", "collectives")
    assert done.returncode == 0, done.stderr
    assert ends(rows) == [("ranks", "ended")]  # collectives needs several cards
    assert {f"{what}, NCCL, to a CPU" for what in ("2-D on 4 ranks, fp32", "2-D on 4 ranks, bf16",
                                                   "saved and resumed on 2 ranks, fp32")} <= {
        row["what"] for row in of_stage(rows, "ranks")}


def test_run_ends_at_the_first_failed_check(packed, tmp_path):
    flags, fault = ["versions", "parity"], {"TESSERA_FAKE_CUDA_FAULT": "malloc-above:1000000"}
    done, rows = run(packed, tmp_path / "ends", *flags, **fault)
    assert done.returncode == 1 and ends(rows) == [("versions", "failed, exit code 1")]
    line = done.stderr.splitlines()[-1]
    assert line.startswith("run: versions: error: ") and "Tried to allocate" in line
    done, rows = run(packed, tmp_path / "continues", *flags, "--continue", **fault)
    assert [stage for stage, _ in ends(rows)] == flags and done.returncode == 1


def test_first_items_take_at_most_20_minutes():
    items = runpy.run_path(str(SCRIPTS / "run"))["items"](1)
    second = next(i for i, item in enumerate(items) if item.name().startswith("compare") and item.turn == 2)
    assert sum(item.limit for item in items[:second + 1]) <= 1200


def test_kinds_of_ranks_use_all_cards(tmp_path):
    def counts(cards, hosts=1):
        context = stage_context.Context(tmp_path / "results.jsonl", "ranks", False, cards, hosts)
        return {(kind, count) for kind, _, count in checks.meshes(context)}

    assert {count for kind, count in counts(1) if kind == "FSDP"} == {2}
    assert counts(2) == {("FSDP", 2), ("TP", 2), ("context parallelism", 2), ("offload", 2)}
    assert {count for kind, count in counts(8) if kind == "experts"} == {4, 8}
    assert {count for kind, count in counts(8, 2) if kind == "HSDP"} == {4, 8, 16}


def test_out_of_memory_is_a_result(packed, tmp_path):
    done, rows = run(packed, tmp_path, "train", TESSERA_FAKE_CUDA_FAULT="malloc-above:1000000")
    assert done.returncode == 0, done.stderr
    assert {row["value"] for row in of_stage(rows, "train")} == {"out of memory"}
    assert {value for _, value in ends(rows)} == {"ended"}


def test_interrupted_run_continues(packed, tmp_path):
    done, _ = run(packed, tmp_path, "trian")
    assert done.returncode == 2 and "unknown stage trian; the stages are versions" in done.stderr
    done, rows = run(packed, tmp_path, "ceilings", "versions", "--budget", 1)
    assert (done.returncode, rows) == (0, []), done.stderr
    assert "Left for the next run: versions; ceilings" in done.stdout
    done, rows = run(packed, tmp_path, "ceilings", "versions", "--limit", 1, "--continue")
    assert ends(rows) == [("versions", "stopped after 1 s"), ("ceilings", "stopped after 1 s")]
    assert done.returncode == 1
    done, rows = run(packed, tmp_path, "ceilings")
    assert ends(rows) == [("versions", "stopped after 1 s"), ("ceilings", "ended")]
    done, again = run(packed, tmp_path, "ceilings")
    assert again == rows
    done, rows = run(packed, tmp_path, "ceilings", "--repeat", 2)
    assert ends(rows)[1:] == [("ceilings", "ended")] * 2


def test_batch_is_halved_until_it_fits(tmp_path, monkeypatch):
    def steps(_, shape, __):
        if shape.batch > 2:
            raise stage_context.OutOfMemory
        return [{"step_time_s": 1.0}]

    monkeypatch.setattr(speeds, "peer_steps", steps)
    results = tmp_path / "results.jsonl"
    for batch in (8, 16):
        shape = speeds.Shape("1b", batch, 4096)
        speeds.peer(stage_context.Context(results, "peer", rehearse=False), shape)
    values = [(row["what"].split()[1], row["value"]) for row in stage_context.read(results)]
    # The second run does not measure again what the first run has measured.
    assert values == [("B=8", "out of memory"), ("B=4", "out of memory"), ("B=2", 1000.0), ("B=16", "out of memory")]
