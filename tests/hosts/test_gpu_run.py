"""scripts/gpu/run on two hosts, rehearsed on the fake CUDA with one card on each."""
import json
import sys

import pytest

import hosts
import programs
from hosts import finish

REASON = hosts.why_not() if programs.FAKE_CUDA.exists() else "built without CUDA's headers"
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces or no fake CUDA here: {REASON}")


def test_items_run_on_the_gpus_of_both_hosts(folder, two):
    packed, out = folder / "pack", folder / "out"
    programs.succeed([programs.ROOT / "scripts/gpu/pack", packed, programs.BIN.parent])
    program = [sys.executable, packed / "run", "--rehearse", "--out", out, "ranks", "collectives"]
    ends = finish(two.start(1, program, environment={"TESSERA_FAKE_CUDA_DEVICES": "1"}), timeout=300)
    assert [status for status, _ in ends] == [0, 0], ends
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["value"] for row in rows if row["what"] == "stage"] == ["ended", "ended"]
    # The fake CUDA's NCCL does not connect hosts, so the ranks communicate by Gloo.
    assert {"FSDP on 2 ranks, fp32, staged, to a CPU", "all_reduce, 64 KiB, 2 ranks"} <= {row["what"] for row in rows}
    assert two.network.bytes_sent() > 1 << 20  # the ranks of an item run on different hosts
    assert [host.processes() for host in two] == [[], []]
