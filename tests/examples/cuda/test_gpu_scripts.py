"""scripts/gpu/pack and run, rehearsed on the fake CUDA: a machine with a GPU is not the place to correct them."""
import collections
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

import pytest

import fake_cuda
import programs

pytestmark = pytest.mark.skipif(not fake_cuda.LIBRARY.exists(),
                                reason="built without CUDA's headers")


@pytest.fixture(scope="module")
def packed():
    with tempfile.TemporaryDirectory() as folder:
        pack = pathlib.Path(folder, "pack")
        programs.succeed([programs.ROOT / "scripts" / "gpu" / "pack", pack, programs.BIN.parent])
        yield pack


def run(packed, out, *flags):
    # Longer than the limits of the stages together: they end it.
    done = programs.run([sys.executable, packed / "run", "--rehearse", "--out", out, *flags], timeout=900)
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return done, rows


def needed(file):
    """The names of the libraries that an ELF file asks for."""
    listed = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", listed))


def test_pack_needs_torch_and_glibc_alone(packed):
    torch = pathlib.Path(sysconfig.get_path("purelib"), "torch", "lib")
    of_torch = {file.name for file in torch.iterdir()}
    for name in ("libtorch_cpu.so", "libtorch_cuda.so", "libc10_cuda.so"):
        of_torch |= needed(torch / name)  # what pip brings beside it
    of_system = {"ld-linux-x86-64.so.2"} | {f"lib{name}" for name in (
        "c.so.6", "m.so.6", "dl.so.2", "rt.so.1", "pthread.so.0", "util.so.1", "stdc++.so.6", "gcc_s.so.1")}
    programs_and_libraries = [*packed.glob("bin/*"), *packed.glob("lib/*.so.*"), *packed.glob("lib/fake_cuda/*")]
    there = {file.name for file in programs_and_libraries} | of_torch | of_system
    missing = {file.name: needed(file) - there for file in programs_and_libraries}
    assert {name: names for name, names in missing.items() if names} == {}


def test_every_stage_of_both_sizes_ends(packed, tmp_path):
    done, rows = run(packed, tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    ended = {row["stage"]: row["value"] for row in rows if row["what"] == "stage"}
    assert ended == dict.fromkeys(["versions", "ceilings", "gpu_test", "parity", "train"], "ended")
    # The fake fills norms with nothing: it computes no value that could be held against the CPU's.
    assert [row["ok"] for row in rows if row["what"] == "initial weights, GPU to CPU"] == [None]
    # Our own kernels do compute on it.
    assert [row["ok"] for row in rows if row["stage"] == "gpu_test" and row["what"] != "stage"] == [True] * 5
    assert {row["unit"] for row in rows if row["stage"] == "train" and "unit" in row} >= {
        "ms a step", "tokens/s", "MFU, %"}
    assert (tmp_path / "results.md").read_text() in done.stdout
    done, rows = run(packed, tmp_path, "--full", "--repeat", 2, "sanitizer", "peer", "compiled_peer", "profile",
                     "ceilings", "kernels")
    assert [row["value"] for row in rows if row["stage"] == "sanitizer"] == (["not run: rehearsal"] * 2 + ["ended"]) * 2
    assert [row["value"] for row in rows if row["stage"] == "compiled_peer"] == ["not run: rehearsal", "ended"] * 2
    assert {row.get("unit") for row in rows if row["stage"] == "peer"} >= {"ms a step", "GiB, peak"}
    assert {row["what"] for row in rows if row["stage"] == "profile"} == {"kernels and copies", "stage"}
    timed = collections.Counter((row["what"], row["unit"]) for row in rows
                                if row["stage"] == "kernels" and row["what"] != "stage")
    assert set(timed.values()) == {2} and {unit for _, unit in timed} == {"us", "% of the speed of a copy"}
    assert {"silu_mul 64x14336/tessera", "silu_mul 64x14336/aten"} <= {what for what, _ in timed}
    assert done.returncode == 0, done.stderr


def test_stage_that_takes_too_long_stops_no_other(packed, tmp_path):
    done, rows = run(packed, tmp_path, "--quick", "--limit", 1, "parity", "train")
    assert done.returncode == 1
    assert [(row["stage"], row["value"]) for row in rows] == [
        ("parity", "stopped after 1 s"), ("train", "stopped after 1 s")]


def test_stage_that_fails_stops_no_other(packed, tmp_path):
    (packed / "configs" / "small.json").rename(packed / "away.json")
    try:
        done, rows = run(packed, tmp_path, "--quick", "parity", "ceilings")
    finally:
        (packed / "away.json").rename(packed / "configs" / "small.json")
    assert done.returncode == 1
    assert "small.json" in done.stderr
    stages = [(row["stage"], row["ok"]) for row in rows if row["what"] == "stage"]
    assert stages == [("parity", False), ("ceilings", True)]


def test_unknown_stage_is_named(packed, tmp_path):
    done = programs.run([sys.executable, packed / "run", "--quick", "trian"])
    assert done.returncode == 2
    assert "no stage is named trian; there are versions" in done.stderr
