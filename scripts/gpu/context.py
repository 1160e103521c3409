"""Code that the stages of scripts/gpu/run share: storing results and starting programs."""
import array
import dataclasses
import json
import os
import pathlib
import re
import struct
import subprocess
import tempfile

import launch

HERE = pathlib.Path(__file__).resolve().parent
FAKE = HERE / "lib" / "fake_cuda" / "libcuda.so.1"

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_act": "silu",
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "initializer_range": 0.02,
         "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
MODELS = {
    "1b": LLAMA,
    "3b": LLAMA | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "8b-4-layers": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "head_dim": 128,
                            "tie_word_embeddings": False},
    "small": LLAMA | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
                      "num_attention_heads": 8, "head_dim": 32, "tie_word_embeddings": False}}


def read(results):
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def add(results, **row):
    with open(results, "a") as out:
        out.write(json.dumps(row) + "\n")


@dataclasses.dataclass
class Context:
    """The context in which one item runs: a stage, or a stage for one shape."""
    results: pathlib.Path
    item: str
    rehearse: bool
    host_cards: int = 1
    hosts: int = 1

    @property
    def cards(self):
        """The number of cards of all hosts."""
        return self.host_cards * self.hosts

    @property
    def shared(self):
        """The folder of launch.py, which all hosts share."""
        return self.results.parent.resolve() / "hosts"

    def spans_hosts(self, ranks):
        return self.hosts > 1 and ranks > self.host_cards

    def fits(self, ranks):
        """Whether the ranks fit on this host's cards, or on all cards with the same number of ranks on each host."""
        return ranks <= self.host_cards or (ranks <= self.cards and ranks % self.hosts == 0)

    def scratch(self):
        """A temporary folder in the folder of the results, because other hosts share no /tmp."""
        return tempfile.TemporaryDirectory(dir=self.results.parent.resolve())

    def backend(self, ranks):
        """The fake CUDA's NCCL has no network, so the ranks of a rehearsal on several hosts communicate by Gloo."""
        return ["--backend", "gloo"] if self.rehearse and self.spans_hosts(ranks) else []

    def add(self, stage, what, value, unit="", ok=None):
        """Adds a result. A rehearsal computes no values, so its results count as not checked."""
        self.add_judged(stage, what, value, unit, None if self.rehearse else ok)

    def add_judged(self, stage, what, value, unit="", ok=None):
        add(self.results, stage=stage, item=self.item, what=what, value=value, unit=unit, ok=ok,
            rehearsed=self.rehearse)

    def environment(self):
        environment = dict(os.environ)
        if self.rehearse:
            environment |= {"LD_PRELOAD": str(FAKE), "TESSERA_FAKE_CUDA_DEVICES": str(self.host_cards)}
        return environment

    def config(self, name):
        """Returns the config.json of a model; a rehearsal's models are all small."""
        if name == "tiny-moe":
            return HERE / "tiny-moe.json"
        name = "small" if self.rehearse else name
        path = self.results.parent.resolve() / f"{name}.json"
        path.write_text(json.dumps(MODELS[name]))
        return path


def torch_folders():
    """Returns the folders of the libraries that libtorch loads, from this machine's python3."""
    import torch
    root = pathlib.Path(torch.__file__).parent
    return [root / "lib", *sorted((root.parent / "nvidia").glob("*/lib"))]


def write_tokens(folder, vocabulary):
    """Writes an llm.c shard of real text: the words of Tessera's documents and sources, numbered by first appearance.
    On a GPU at its power limit the speed depends on the values, so both sides of a comparison need the same real text."""
    numbers = {}
    words = re.findall(r" ?\w+|\s+|[^\w\s]+", (HERE / "text.txt").read_text())
    tokens = array.array("I", (numbers.setdefault(word, len(numbers)) % vocabulary for word in words))
    path = folder / "tokens.bin"
    path.write_bytes(struct.pack("<256i", 20240801, 1, len(tokens), *[0] * 253) + tokens.tobytes())
    return path


def vocabulary_of(config):
    return json.loads(pathlib.Path(config).read_text())["vocab_size"]


def for_programs(context):
    """The environment of Tessera's programs. Not for Python, whose torch must find its own libraries. Existing search
    folders are kept behind the new ones, because they may include the driver's."""
    environment = context.environment()
    paths = [*map(str, [HERE / "lib", *torch_folders()]), environment.get("LD_LIBRARY_PATH")]
    return environment | {"LD_LIBRARY_PATH": ":".join(filter(None, paths))}


class OutOfMemory(RuntimeError):
    """Raised if the GPU has too little memory for a run; counts as the result of the run."""


def check(done, what):
    """Raises an error if a finished process has failed."""
    if done.returncode == 0:
        return
    said = f"{done.stdout[-1000:]}{done.stderr[-2000:]}"
    # The error message of libtorch and PyTorch for lack of GPU memory.
    kind = OutOfMemory if "out of memory" in f"{done.stdout}{done.stderr}" else RuntimeError
    raise kind(f"{what}: exit code {done.returncode}\n{said}")


# Makes NCCL treat ranks as if each were on its own host, so that they may share a GPU; they
# communicate over the loopback interface.
SEVERAL_HOSTS = {"NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
HOST_EACH = ["sh", "-c", 'NCCL_HOSTID=rank$RANK exec "$0" "$@"']


def llama_train(context, flags, ranks=1, prefix=(), several_hosts=False):
    """Returns the metrics of a run of llama_train. Raises OutOfMemory if the run ended for lack of memory."""
    with context.scratch() as name:
        folder = pathlib.Path(name)
        metrics = folder / "m.jsonl"
        config = flags[flags.index("--config") + 1]
        tokens = write_tokens(folder, vocabulary_of(config))
        program = [HERE / "bin" / "llama_train", "--tokens", tokens, "--metrics", metrics, *flags, *context.backend(ranks)]
        environment = for_programs(context) | (SEVERAL_HOSTS if several_hosts else {})
        if context.spans_hosts(ranks):
            done = launch.torchrun(context, program, ranks, environment)
        else:
            launcher = [HERE / "bin" / "tessera-run", "--nproc", ranks, "--"] if ranks > 1 else []
            hosts = HOST_EACH if several_hosts else []
            done = subprocess.run([str(part) for part in [*prefix, *launcher, *hosts, *program]], capture_output=True,
                                  text=True, env=environment)
        check(done, f"llama_train {' '.join(map(str, flags))}")
        return [json.loads(line) for line in metrics.read_text().splitlines()]
