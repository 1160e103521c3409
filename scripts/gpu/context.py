"""Shared by the stages of scripts/gpu/run: their results, and starting programs."""
import dataclasses
import json
import os
import pathlib
import struct
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FAKE = HERE / "lib" / "fake_cuda" / "libcuda.so.1"


def read(results):
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def add(results, **row):
    with open(results, "a") as out:
        out.write(json.dumps(row) + "\n")


@dataclasses.dataclass
class Context:
    """The context of one item: a stage, or a stage for one shape."""
    results: pathlib.Path
    item: str
    rehearse: bool

    def add(self, stage, what, value, unit="", ok=None):
        """Adds a result. A rehearsal computes no values, so its results count as not checked."""
        self.add_judged(stage, what, value, unit, None if self.rehearse else ok)

    def add_judged(self, stage, what, value, unit="", ok=None):
        add(self.results, stage=stage, item=self.item, what=what, value=value, unit=unit, ok=ok,
            rehearsed=self.rehearse)

    def environment(self):
        environment = dict(os.environ)
        if self.rehearse:
            # One device shared by several ranks, as in the real checks.
            environment |= {"LD_PRELOAD": str(FAKE), "TESSERA_FAKE_CUDA_DEVICES": "1"}
        return environment

    def config(self, name):
        return HERE / "configs" / ("small.json" if self.rehearse else f"{name}.json")


def torch_folders():
    """The folders of the libraries that libtorch loads, from this machine's python3."""
    import torch
    root = pathlib.Path(torch.__file__).parent
    return [root / "lib", *sorted((root.parent / "nvidia").glob("*/lib"))]


def write_tokens(folder, count=1 << 18):
    """Writes an llm.c shard of repeated phrases, so that there is something to learn."""
    tokens = [(i * i // 7 + i % 13) % 512 for i in range(count)]
    path = folder / "tokens.bin"
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + struct.pack(f"<{count}H", *tokens))
    return path


def for_programs(context):
    """The environment of Tessera's programs. Not for Python, whose torch must find its own libraries. Existing search
    folders are kept behind the new ones, because they may include the driver's."""
    environment = context.environment()
    paths = [*map(str, [HERE / "lib", *torch_folders()]), environment.get("LD_LIBRARY_PATH")]
    return environment | {"LD_LIBRARY_PATH": ":".join(filter(None, paths))}


class OutOfMemory(RuntimeError):
    """The GPU has too little memory for a run; counts as the result of the run."""


def check(done, what):
    """Raises an error if a finished process has failed."""
    if done.returncode == 0:
        return
    said = f"{done.stdout[-1000:]}{done.stderr[-2000:]}"
    # The message of libtorch and PyTorch.
    kind = OutOfMemory if "out of memory" in f"{done.stdout}{done.stderr}" else RuntimeError
    raise kind(f"{what}: exit code {done.returncode}\n{said}")


# Makes NCCL treat ranks as if each were on its own host, so that they may share a GPU; they
# communicate over the loopback interface.
SEVERAL_HOSTS = {"NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
HOST_EACH = ["sh", "-c", 'NCCL_HOSTID=rank$RANK exec "$0" "$@"']


def llama_train(context, flags, ranks=1, prefix=(), several_hosts=False):
    """The metrics of a run of llama_train. Raises OutOfMemory if the run ended for lack of memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        metrics = folder / "m.jsonl"
        program = [HERE / "bin" / "llama_train", "--tokens", write_tokens(folder), "--metrics", metrics, *flags]
        launcher = [HERE / "bin" / "tessera-run", "--nproc", ranks, "--"] if ranks > 1 else []
        hosts = HOST_EACH if several_hosts else []
        done = subprocess.run([str(part) for part in [*prefix, *launcher, *hosts, *program]], capture_output=True,
                              text=True, env=for_programs(context) | (SEVERAL_HOSTS if several_hosts else {}))
        check(done, f"llama_train {' '.join(map(str, flags))}")
        return [json.loads(line) for line in metrics.read_text().splitlines()]
