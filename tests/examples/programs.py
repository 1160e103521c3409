"""What the tests of the programs share: where they are, how they are run, small inputs for them."""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("TESSERA_BIN", ROOT / "build" / "bin"))
PEER = ROOT / "benchmarks" / "peer" / "torch_llama.py"

SMALL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256,
         "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
         "hidden_act": "silu", "max_position_embeddings": 256, "rope_theta": 10000.0,
         "tie_word_embeddings": False}
# Nothing divides by 4 but the heads: 618 / 4, 1009 / 4, and blocks of 240 rows over 3 ranks.
ODD = SMALL | {"vocab_size": 1009, "hidden_size": 240, "intermediate_size": 618,
               "num_attention_heads": 12, "num_key_value_heads": 4}
# Tied embeddings, and a head size that is not hidden / heads.
TIED = SMALL | {"vocab_size": 301, "head_dim": 24, "num_key_value_heads": 4,
                "tie_word_embeddings": True, "rope_theta": 500000.0}


# Flags that add up.
LISTS = {"--tokens", "--weight", "--jsonl", "--text", "--eval-text", "--eval-tokens", "--prompt", "--prompts", "--stop",
         "--freeze", "--lora-targets", "--exclude", "--prefix"}


def words(command):
    """The words of a command in which what a test adds wins over the flags that it shares with others:
    the programs refuse two values of a flag."""
    groups = []  # a flag with its value, or another word
    for part in map(str, command):
        if groups and groups[-1][0].startswith("--") and len(groups[-1]) == 1 and not part.startswith("--"):
            groups[-1].append(part)
        else:
            groups.append([part])
    last = {group[0]: i for i, group in enumerate(groups)}
    return [word for i, group in enumerate(groups) for word in group
            if not group[0].startswith("--") or group[0] in LISTS or last[group[0]] == i]


def run(command, **kwargs):
    """A finished process; never waits more than its time-out."""
    kwargs.setdefault("timeout", 300)
    return subprocess.run(words(command), capture_output=True, text=True, errors="replace", **kwargs)


def succeed(command, **kwargs):
    """The same of a process that must end well."""
    done = run(command, **kwargs)
    assert done.returncode == 0, done.stderr
    return done


def on_ranks(count, command):
    """The command that runs `command` in `count` processes."""
    return [BIN / "tessera-run", "--nproc", count, "--", *command] if count > 1 else command


def train(arguments, dp=1, tp=1, replicas=1, cp=1, **kwargs):
    """llama_train on a mesh of processes: dp x cp x tp, `replicas` times. Must end well."""
    command = [BIN / "llama_train", "--dp", dp, "--cp", cp, "--tp", tp, "--dp-replicate", replicas,
               *arguments]
    return succeed(on_ranks(replicas * dp * cp * tp, command), **kwargs)


def peer(arguments):
    return succeed([sys.executable, PEER, *arguments])


def write_config(folder, config):
    path = pathlib.Path(folder, "config.json")
    path.write_text(json.dumps(config))
    return path


def make_model(folder, config, seed=0):
    """A Hugging Face folder with random weights, made by PyTorch."""
    source = write_config(folder, config)
    model = pathlib.Path(folder, "model")
    peer(["make", "--config", source, "--out", model, "--seed", seed])
    return model


def write_tokens(path, tokens, magic=20240520, count=None):
    """An llm.c token shard; a wrong `magic` or `count` makes a bad one."""
    tokens = list(tokens)
    header = struct.pack("<256i", magic, 1, len(tokens) if count is None else count, *[0] * 253)
    pathlib.Path(path).write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def text_tokens(count, vocabulary):
    """Deterministic, with some structure to learn: a few repeated phrases with changes."""
    state, tokens = 12345, []
    for i in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        repeat = tokens[i - 17] if i >= 17 and state % 10 < 6 else state // 64
        tokens.append(repeat % vocabulary)
    return tokens


def read_metrics(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


class InFolder(unittest.TestCase):
    """Tests in a temporary folder that holds a small config and tokens to train it on."""
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.config = write_config(self.folder, SMALL)
        self.tokens = write_tokens(self.folder / "t.bin", text_tokens(5000, 256))

    def refuse(self, command, *parts, **kwargs):
        """Runs a command of one process, which must end with one line that has these parts."""
        done = run(command, **kwargs)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stdout + done.stderr)
        for part in parts:
            self.assertIn(str(part), done.stderr)


class WithSharedFolder(unittest.TestCase):
    """Tests that share a folder, which setUpClass may fill for all of them."""
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.shared = pathlib.Path(temporary.name)
