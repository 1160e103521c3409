#!/usr/bin/env python3
"""Time of a training step of FSDP, and with --collectives that of collectives, on two hosts of two ranks each, where the
ranks of a host share memory and where they do not. The hosts are network namespaces of this machine (tests/hosts), which
takes the right to make them.

  benchmarks/bench_hosts.py --mbit 20 50 200
"""
import argparse
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "examples"), str(ROOT / "tests" / "hosts")]
import programs  # noqa: E402
from hosts import Hosts, finish  # noqa: E402
from runs import Run  # noqa: E402


def steps(folder, mbit, shared_memory):
    """The median time of a step in s, and the MB that all hosts sent in it."""
    run = Run(folder, "--dp", 4, "--steps", 8)
    with Hosts(2) as machines:
        machines.network.rate = mbit * 1e6 / 8
        run.on(machines, environment={"TESSERA_SHM": shared_memory})
        sent = machines.network.bytes_sent()
    return statistics.median(row["step_time_s"] for row in programs.read_metrics(run.metrics)[1:]), sent / 8e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[200], help="what a host's link carries in a second")
    parser.add_argument("--collectives", action="store_true", help="takes minutes")
    args = parser.parse_args()
    for mbit in args.mbit:
        with tempfile.TemporaryDirectory(dir=programs.BIN.parent, prefix="hosts-") as name:
            for label, shared_memory in (("one flow a host", "1"), ("one a rank", "0")):
                seconds, sent = steps(pathlib.Path(name), mbit, shared_memory)
                print(f"{mbit:6.0f} Mbit/s, {label:16} {seconds:7.3f} s a step, {sent:7.2f} MB between the hosts")
        if args.collectives:
            with Hosts(2) as machines:
                machines.network.rate = mbit * 1e6 / 8
                for status, output in finish(machines.start(2, [programs.BIN / "bench_comm"]), timeout=1200):
                    assert status == 0, output
                    print(output, end="")


if __name__ == "__main__":
    main()
