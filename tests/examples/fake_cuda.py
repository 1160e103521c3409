"""Runs programs on the fake CUDA (tests/fake_cuda) and reads its reports."""
import json
import os

import programs

LIBRARY = programs.BIN.parent / "lib" / "fake_cuda" / "libcuda.so.1"


class Run:
    """A finished run: its process and the reports of its ranks, by rank."""
    def __init__(self, done, reports):
        self.done = done
        self.reports = reports

    def host_syncs(self, rank=0):
        return sum(row["count"] for row in self.reports[rank]["host_syncs"])


def train(folder, arguments, dp=1, tp=1, replicas=1, cp=1, fault=""):
    """llama_train on a mesh of processes, each with a fake device."""
    command = [programs.BIN / "llama_train", "--device", "cuda", "--dp", dp, "--cp", cp, "--tp", tp,
               "--dp-replicate", replicas, *arguments]
    return run(folder, command, dp * cp * tp * replicas, fault)


def run(folder, command, ranks, fault=""):
    """A program on so many processes. Its exit code may be any; ranks that were killed have no report."""
    stem = folder / "report"
    environment = dict(os.environ, LD_PRELOAD=str(LIBRARY), TESSERA_FAKE_CUDA_REPORT=str(stem),
                       TESSERA_FAKE_CUDA_FAULT=fault, OMP_NUM_THREADS="1")
    done = programs.run(programs.on_ranks(ranks, command), env=environment, timeout=100)
    files = {rank: stem.with_name(f"report.{rank}.json") for rank in range(ranks)}
    return Run(done, {rank: json.loads(file.read_text())
                      for rank, file in files.items() if file.exists()})
