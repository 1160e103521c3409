"""Helpers of the tests of programs: where the programs are, how to run them, and small inputs for them."""
import json
import os
import pathlib
import shutil
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
# Sizes that ranks do not divide, except the heads: 618 and 1009 by 4, and blocks of 240 rows by 3 ranks.
ODD = SMALL | {"vocab_size": 1009, "hidden_size": 240, "intermediate_size": 618,
               "num_attention_heads": 12, "num_key_value_heads": 4}
# A model with tied embeddings, and a head size that is not the hidden size divided by the heads.
TIED = SMALL | {"vocab_size": 301, "head_dim": 24, "num_key_value_heads": 4,
                "tie_word_embeddings": True, "rope_theta": 500000.0}


# A Mixtral.
MOE = json.loads((ROOT / "examples/llama/configs/tiny-moe.json").read_text())

# Flags that add up.
LISTS = {"--tokens", "--weight", "--jsonl", "--text", "--eval-text", "--eval-tokens", "--prompt", "--prompts", "--freeze",
         "--lora-targets", "--exclude", "--prefix"}


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
    """Runs a command, at most for its time-out. Returns the finished process."""
    kwargs.setdefault("timeout", 300)
    return subprocess.run(words(command), capture_output=True, text=True, errors="replace", **kwargs)


def succeed(command, **kwargs):
    """Like run(), but the process must end with code 0."""
    done = run(command, **kwargs)
    assert done.returncode == 0, done.stderr
    return done


def fail(command, *parts, **kwargs):
    """Like run(), but the process must end with code 1, and with `parts` in its standard error."""
    done = run(command, **kwargs)
    assert done.returncode == 1, done.stdout + done.stderr
    missing = [str(part) for part in parts if str(part) not in done.stderr]
    assert not missing, f"{missing} are not in: {done.stderr}"
    return done


def on_ranks(count, command):
    """The command that runs `command` in `count` processes."""
    return [BIN / "tessera-run", "--nproc", count, "--", *command] if count > 1 else command


def train(arguments, dp=1, tp=1, replicas=1, cp=1, ep=1, **kwargs):
    """llama_train on a mesh of processes: dp x ep x cp x tp, `replicas` times. Must end well."""
    command = [BIN / "llama_train", "--dp", dp, "--ep", ep, "--cp", cp, "--tp", tp, "--dp-replicate", replicas,
               *arguments]
    return succeed(on_ranks(replicas * dp * ep * cp * tp, command), **kwargs)


def peer(arguments):
    return succeed([sys.executable, PEER, *arguments])


def metrics_of(folder, arguments, *mesh, **kwargs):
    """Runs train() with `arguments`. Returns the metrics of all steps, and the standard output."""
    metrics = pathlib.Path(folder, "m.jsonl")
    done = train([*arguments, "--metrics", metrics], *mesh, **kwargs)
    return read_metrics(metrics), done.stdout


def write(path, text):
    """Writes a text file. Returns its path."""
    path.write_text(text)
    return path


def write_config(folder, config):
    return write(pathlib.Path(folder, "config.json"), json.dumps(config))


def make_model(folder, config, seed=0):
    """Makes a Hugging Face folder with random weights by PyTorch. Returns its path."""
    source = write_config(folder, config)
    model = pathlib.Path(folder, "model")
    peer(["make", "--config", source, "--out", model, "--seed", seed])
    return model


def write_tokens(path, tokens, magic=20240520, count=None):
    """Writes an llm.c token shard, a bad one if `magic` or `count` is wrong. Returns its path."""
    tokens = list(tokens)
    header = struct.pack("<256i", magic, 1, len(tokens) if count is None else count, *[0] * 253)
    pathlib.Path(path).write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def text_tokens(count, vocabulary):
    """Returns deterministic tokens with some structure to learn: repeated phrases with changes."""
    state, tokens = 12345, []
    for i in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        repeat = tokens[i - 17] if i >= 17 and state % 10 < 6 else state // 64
        tokens.append(repeat % vocabulary)
    return tokens


def read_metrics(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


class WithFolder(unittest.TestCase):
    """Each test has a temporary folder."""
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def assert_close(self, got, want, within=1e-5):
        """Compares two lists of numbers, such as the losses of two runs, by their ratios."""
        self.assertEqual(len(got), len(want))
        for ours, theirs in zip(got, want):
            self.assertLess(abs(ours / theirs - 1), within, (got, want))


class InFolder(WithFolder):
    """Tests in a temporary folder that holds a small config and tokens to train it on."""
    def setUp(self):
        super().setUp()
        self.config = write_config(self.folder, SMALL)
        self.tokens = write_tokens(self.folder / "t.bin", text_tokens(5000, 256))

    def refuse(self, command, *parts, **kwargs):
        """Runs a command of one process, which must end with one line that has these parts."""
        done = fail(command, *parts, **kwargs)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)


class WithSharedFolder(unittest.TestCase):
    """Tests that share a folder, which setUpClass may fill for all of them."""
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.shared = pathlib.Path(temporary.name)


# ---- Small random models of each kind, written by transformers.

POSITIONS = 32
COMMON = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12,
          "max_position_embeddings": POSITIONS, "rope_theta": 500.0, "initializer_range": 0.2,
          "bos_token_id": None, "eos_token_id": None}
LLAMA = COMMON | {"model_type": "llama"}


def scaled(kind, **values):
    return LLAMA | {"rope_scaling": {"rope_type": kind, "factor": 4.0, **values}}


MIXTRAL = COMMON | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN3_MOE = COMMON | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
                      "moe_intermediate_size": 40}
MODELS = {
    "llama1": LLAMA | {"num_key_value_heads": 8},
    "llama2_with_biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama3": scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=POSITIONS)
              | {"tie_word_embeddings": True, "max_position_embeddings": 4 * POSITIONS},
    "linear": scaled("linear"),
    "yarn": scaled("yarn", original_max_position_embeddings=POSITIONS),
    "yarn_with_all": scaled("yarn", original_max_position_embeddings=POSITIONS, beta_fast=16.0,
                            beta_slow=2.0, truncate=False),
    "mistral": COMMON | {"model_type": "mistral", "sliding_window": None},
    "mistral_with_window": COMMON | {"model_type": "mistral", "sliding_window": 20},
    "qwen2": COMMON | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": COMMON | {"model_type": "qwen3"},
    "mixtral": MIXTRAL,
    "mixtral_with_window": MIXTRAL | {"num_local_experts": 8, "sliding_window": 20},
    "qwen3_moe": QWEN3_MOE | {"norm_topk_prob": True, "attention_bias": True, "output_router_logits": True,
                              "router_aux_loss_coef": 0.02},
    "qwen3_moe_with_dense": QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "olmoe": {key: value for key, value in COMMON.items() if key != "head_dim"}
             | {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "attention_bias": True},
}
WITH_EXPERTS = "mixtral", "mixtral_with_window", "qwen3_moe", "qwen3_moe_with_dense", "olmoe"


def make_architecture(folder, values):
    """Writes a random model whose weights differ enough from 0 and 1 that each weight matters. Returns it."""
    import torch
    import transformers
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()


# ---- Runs of llama_train that are compared with one another.

STEPS, EVERY, BATCH = 8, 3, 12
SAME = ("step", "loss", "grad_norm", "lr")


def figures(metrics):
    """Returns the metrics of each step that do not depend on time."""
    return [[record[key] for key in SAME] for record in read_metrics(metrics)]


class TrainingRuns(InFolder):
    """Every run has a folder: its checkpoints, metrics, report and exported weights."""

    def flags(self, run, steps=STEPS):
        return ["--config", self.config, "--tokens", self.tokens, "--steps", steps, "--batch", BATCH,
                "--seq", 16, "--schedule", "cosine", "--warmup", 2, "--dropout", 0.1, "--metrics",
                run / "metrics.jsonl", "--save-hf", run / "model"]

    def checkpoints(self, run):
        return ["--checkpoint", run / "steps"]

    def train(self, name, flags=(), dp=2, tp=2, steps=STEPS, **kwargs):
        run = self.folder / name  # or `name` itself, where that is a path
        train([*self.flags(run, steps), *flags], dp, tp, **kwargs)
        return run

    def broken_copy(self, name, unbroken, step=EVERY):
        """Copies a run to a folder `name`, as if the run had been killed after it had saved `step`."""
        run = self.folder / name
        shutil.copytree(unbroken / f"steps/step-{step:08}", run / f"steps/step-{step:08}")
        shutil.copy(unbroken / "metrics.jsonl", run)
        return run

    def weights(self, run):
        return (run / "model/model.safetensors").read_bytes()

    def assert_equal_runs(self, run, other):
        self.assertEqual(figures(run / "metrics.jsonl"), figures(other / "metrics.jsonl"))
        self.assertEqual(self.weights(run), self.weights(other))


class Job:
    """llama_train under tessera-run, in the background."""

    def __init__(self, arguments, dp=2, tp=2, launcher=()):
        command = [BIN / "tessera-run", "--nproc", dp * tp, *launcher, "--",
                   BIN / "llama_train", "--dp", dp, "--tp", tp, *arguments]
        self.process = subprocess.Popen(words(command), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_for_line(self, part):
        for line in self.process.stdout:
            if part in line:
                return
        raise AssertionError(f"no line with {part}: {self.process.stderr.read()}")

    def ranks(self):
        """Returns the process ids of the ranks that have not ended, by rank."""
        found = {}
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            try:
                process = pathlib.Path("/proc", pid)
                is_rank = b"llama_train" in process.joinpath("cmdline").read_bytes().split(b"\0")[0]
                variables = process.joinpath("environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_rank:
                rank = next(v for v in variables if v.startswith(b"RANK="))
                found[int(rank[len(b"RANK="):])] = int(pid)
        return found

    def end(self, timeout=120):
        """Waits for the end of the job. Returns its exit code and standard error."""
        errors = self.process.communicate(timeout=timeout)[1]
        return self.process.returncode, errors


# ---- Programs on the fake CUDA (tests/fake_cuda), and its reports.

FAKE_CUDA = BIN.parent / "lib" / "fake_cuda" / "libcuda.so.1"


class FakeRun:
    """A finished run: its process and the reports of its ranks, by rank."""
    def __init__(self, done, reports):
        self.done = done
        self.reports = reports


def train_on_fake_cuda(folder, arguments, dp=1, tp=1, replicas=1, cp=1, fault=""):
    """llama_train on a mesh of processes, each with a fake device."""
    command = [BIN / "llama_train", "--device", "cuda", "--dp", dp, "--cp", cp, "--tp", tp,
               "--dp-replicate", replicas, *arguments]
    return run_on_fake_cuda(folder, command, dp * cp * tp * replicas, fault)


def run_on_fake_cuda(folder, command, ranks, fault=""):
    """Runs a program in `ranks` processes, with any exit code. Ranks that were killed have no report."""
    stem = folder / "report"
    environment = dict(os.environ, LD_PRELOAD=str(FAKE_CUDA), TESSERA_FAKE_CUDA_REPORT=str(stem),
                       TESSERA_FAKE_CUDA_FAULT=fault, OMP_NUM_THREADS="1")
    done = run(on_ranks(ranks, command), env=environment, timeout=100)
    files = {rank: stem.with_name(f"report.{rank}.json") for rank in range(ranks)}
    return FakeRun(done, {rank: json.loads(file.read_text())
                      for rank, file in files.items() if file.exists()})
