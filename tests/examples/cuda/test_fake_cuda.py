"""llama_train with many kinds of flags on the fake CUDA, which shows calls of CUDA and NCCL without a GPU."""
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sysconfig
import tempfile

import numpy as np
import pytest
from safetensors.numpy import load_file

import programs

pytestmark = pytest.mark.skipif(not programs.FAKE_CUDA.exists(),
                                reason="built without CUDA's headers")


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of training. Each pair of features occurs in some case, but not every combination."""
    name: str
    dp: int = 1
    tp: int = 1
    replicas: int = 1
    cp: int = 1
    dtype: str = "bf16"
    flags: str = ""

    @property
    def mesh(self):
        return {"dp": self.dp, "tp": self.tp, "replicas": self.replicas, "cp": self.cp}

    @property
    def ranks(self):
        return self.dp * self.tp * self.replicas * self.cp

    @property
    def staged(self):
        return "gloo" in self.flags

    @property
    def nccl(self):
        return self.ranks > 1 and not self.staged


CASES = [
    Case("one_rank", dtype="fp32", flags="--ac selective --document-mask --eos-token 0"),
    Case("dp", dp=3, flags="--ac full --optimizer muon --moment-dtype bf16"),
    Case("cp", cp=2),
    Case("cp_fp32", cp=2, dtype="fp32", flags="--ac selective"),
    Case("zero2_fp16", dp=2, dtype="fp16", flags="--zero 2 --accumulate 2"),
    Case("tp_no_sp", tp=2, dtype="fp32", flags="--no-sp --no-loss-parallel --accumulate 2 --lora-rank 4"),
    Case("dp_tp", dp=2, tp=2, dtype="fp16", flags="--ac full --dropout 0.1 --ema 0.9"),
    Case("replicas_tp", tp=2, replicas=2, flags="--zero 2 --ac selective --checkpoint {folder}/c"),
    Case("bf16_sums", dp=2, replicas=2, flags="--accumulate 2 --reduce-dtype bf16 --lora-rank 4 --lora-dropout 0.1"),
    Case("offload", dp=2, flags="--offload --accumulate 2 --ac full"),
    Case("gloo", dp=2, tp=2, flags="--backend gloo --zero 2 --accumulate 2"),
]
NCCL = [case for case in CASES if case.nccl]
# Numbers of steps. All steps after the first two are alike; in those, the allocator and NCCL do more.
EARLY, LATE = 3, 5


def of_cases(cases):
    """A test for each case."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


@functools.cache
def home():
    """Returns a temporary folder, which is removed when the tests end."""
    return tempfile.TemporaryDirectory(prefix="fake-cuda-")


@functools.cache
def inputs():
    folder = pathlib.Path(home().name)
    programs.write_tokens(folder / "t.bin", programs.text_tokens(5000, 256))
    return folder, programs.write_config(folder, programs.SMALL)


def arguments(case, steps, folder):
    folder_of_inputs, config = inputs()
    return ["--config", config, "--tokens", folder_of_inputs / "t.bin", "--steps", steps, "--batch", 24, "--seq", 32,
            "--param-dtype", case.dtype, "--metrics", folder / "m.jsonl", *case.flags.format(folder=folder).split()]


@functools.cache
def on_cuda(case, steps):
    folder = pathlib.Path(tempfile.mkdtemp(dir=inputs()[0]))
    run = programs.train_on_fake_cuda(folder, arguments(case, steps, folder), **case.mesh)
    run.metrics = folder / "m.jsonl"
    return run


@functools.cache
def traffic_on_cpu(case):
    """Returns for each mesh dimension the bytes of a step, by collective."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=inputs()[0]))
    programs.train(arguments(case, EARLY, folder), **case.mesh)
    dims = programs.read_metrics(folder / "m.jsonl")[-1]["comm"].values()
    return [{name: use["bytes"] for name, use in dim.items()} for dim in dims]


def train_config(case, changes, *flags, steps=EARLY):
    folder = pathlib.Path(tempfile.mkdtemp(dir=inputs()[0]))
    config = programs.write_config(folder, programs.SMALL | changes)
    return programs.train_on_fake_cuda(folder, [*arguments(case, steps, folder), "--config", config, *flags], **case.mesh)


def reports(case, steps=LATE):
    """Returns the reports of all ranks. No rank may have been killed, because it would have no report."""
    found = on_cuda(case, steps).reports
    assert len(found) == case.ranks
    return [found[rank] for rank in range(case.ranks)]


def a_step(case, count, rank=0):
    """Returns how much one step adds to the number that `count` returns for a rank's report."""
    early, late = (count(reports(case, steps)[rank]) for steps in (EARLY, LATE))
    return (late - early) / (LATE - EARLY)


def host_syncs(report):
    return sum(row["count"] for row in report["host_syncs"])


def in_order(rows):
    return sorted(rows, key=lambda row: sorted(row.items()))


@of_cases(CASES)
def test_run_completes(case):
    for steps in (EARLY, LATE):
        done = on_cuda(case, steps).done
        assert done.returncode == 0, done.stderr
        assert f"step: {steps:2}" in done.stdout


def test_initial_weights_equal_the_cpus():
    """The fake runs the kernel that fills matrices at random, but not the kernel that fills norms with ones."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=inputs()[0]))
    flags = ["--config", inputs()[1], "--seed", 3, "--steps", 0, "--save-hf"]
    done = programs.train_on_fake_cuda(folder, [*flags, folder / "cuda"], dp=2, tp=2).done
    assert done.returncode == 0, done.stderr
    programs.train([*flags, folder / "cpu"])
    on_cuda, on_cpu = (load_file(folder / device / "model.safetensors") for device in ("cuda", "cpu"))
    matrices = [name for name, weight in on_cpu.items() if weight.ndim == 2]
    assert matrices and on_cuda.keys() == on_cpu.keys()
    for name in matrices:
        assert np.array_equal(on_cuda[name], on_cpu[name]), name


@of_cases(CASES)
def test_calls_are_valid_and_ranks_use_their_own_device(case):
    """If a thread of a rank made a context on the device of another rank, that device would lose some hundred MiB."""
    for rank, report in enumerate(reports(case)):
        assert report["violations"] == []
        assert {row["device"] for row in report["streams"]} == {rank}
        assert [row["device"] for row in report["contexts"]] == [rank], report["contexts"]


@of_cases(NCCL)
def test_groups_are_destroyed_in_the_same_order(case):
    """NCCL may wait for all ranks of a host when a communicator ends."""
    ends = []
    for report in reports(case):
        assert {row["ended_by"] for row in report["communicators"]} == {"destroy"}
        ended = sorted(report["communicators"], key=lambda row: row["ended"])
        ends.append([row["id"] for row in ended])
    for one, other in itertools.combinations(ends, 2):
        assert [end for end in one if end in other] == [end for end in other if end in one]


# The names of collectives in a CPU run, by NCCL's names. NCCL sends an all-to-all as separate parts.
COLLECTIVES = {name: name for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast")}
COLLECTIVES["send"] = "all_to_all"


def moved(report, index, name):
    """Bytes of a collective over the communicator that was made as number `index`."""
    group = report["communicators"][index]["id"]
    return sum(row["bytes"] for row in report["collectives"]
               if (row["communicator"], row["collective"]) == (group, name))


@of_cases(NCCL)
def test_nccl_traffic_equals_the_cpu_run(case):
    groups = []
    for index in range(len(reports(case)[0]["communicators"])):
        bytes_of = {counted: a_step(case, lambda report: moved(report, index, name))
                    for name, counted in COLLECTIVES.items()}
        groups.append({name: count for name, count in bytes_of.items() if count > 0})
    assert in_order(group for group in groups if group) == in_order(traffic_on_cpu(case))


@of_cases([case for case in CASES if not case.nccl])
def test_other_backends_use_no_nccl(case):
    assert reports(case)[0]["communicators"] == []


@of_cases(NCCL)
def test_groups_share_no_stream(case):
    """With a stream for each group, a gather over dp runs beside the collectives over tp and beside kernels."""
    report = reports(case)[0]
    streams = {}
    for row in report["collectives"]:
        streams.setdefault(row["stream"], set()).add(row["communicator"])
    assert all(len(communicators) == 1 for communicators in streams.values()), streams
    assert all(row["launches"] == 0 for row in report["streams"] if row["stream"] in streams)


@of_cases(NCCL)
def test_nccl_collectives_are_aligned_and_have_high_priority(case):
    """NCCL moves single bytes, many times slower, from unaligned addresses or of types of one byte. A rank's part of a vector
    is short and may be unaligned. The collectives of every layer have a high priority."""
    for row in reports(case)[0]["collectives"]:
        assert row["priority"] < 0 or row["collective"] not in ("all_gather", "reduce_scatter"), row
        assert row["unaligned"] == 0 and row["unaligned_part"] < 128 and row["type"] not in ("int8", "uint8"), row


@of_cases([case for case in NCCL if case.tp == case.cp == 1])
def test_gradients_are_reduced_in_the_requested_type(case):
    rows = [row for row in reports(case)[0]["collectives"] if row["collective"] == "reduce_scatter" or
            row["collective"] == "all_reduce" and row["bytes"] > 1000]
    assert {row["type"] for row in rows} == {"bf16" if "--reduce-dtype bf16" in case.flags else "fp32"}


@of_cases([case for case in CASES if not case.staged])
def test_host_waits_once_a_step(case):
    """The host waits for the metrics; with loss scaling also for whether a gradient has overflowed. With offload, the
    gradients of each backward come to the host, and their norm goes to NCCL and back."""
    others = 1 if case.dtype == "fp16" else 0
    if "--offload" in case.flags:
        others = 4 if "--accumulate 2" in case.flags else 3
    assert a_step(case, host_syncs) <= 1 + others


# What a step on dp=2 x tp=2 may ask of a device, with libtorch 2.15: launches, matrix products among them, and copies, of a
# layer and of the rest (embedding, head and loss, optimizer). A change that needs more says why; one that needs less lowers them.
LAYER, REST = 46, 51


def work(report):
    return (sum(report["launches"].values()) + sum(report["gemms"].values()) +
            sum(stream["copies"] for stream in report["streams"]))


def test_step_stays_within_its_budget():
    of_layers = {}
    for layers in (2, 4):
        case = Case(f"budget_{layers}", dp=2, tp=2)
        counts = {steps: work(train_config(case, {"num_hidden_layers": layers}, steps=steps).reports[0])
                  for steps in (EARLY, LATE)}
        of_layers[layers] = (counts[LATE] - counts[EARLY]) / (LATE - EARLY)
    layer = (of_layers[4] - of_layers[2]) / 2
    rest = of_layers[2] - 2 * layer
    assert layer <= LAYER and rest <= REST, f"a layer takes {layer}, the rest of a step {rest}"


@of_cases(CASES)
def test_memory_does_not_grow(case):
    for figure in ("allocations", "active"):
        assert a_step(case, lambda report: report["device_memory"][figure]) == 0
    # The peak counts the memory of tensors; the allocator itself takes memory in blocks of some MiB.
    peaks = {row["peak_active_bytes"] for row in programs.read_metrics(on_cuda(case, LATE).metrics)[EARLY - 1:]}
    # Attention keeps statistics for each document, and batches differ in their number of documents.
    of_documents = 64 << 10 if "--document-mask" in case.flags else 0
    assert max(peaks) - min(peaks) <= of_documents, peaks


@of_cases([case for case in CASES if case.name == "dp"])
def test_pinned_memory_and_events_are_reused(case):
    """Three batches are pinned: the one in use, one that is being copied, and the next one. Lanes and collectives
    take their events from a pool; libtorch makes some events of its own."""
    early, late = (reports(case, steps)[0] for steps in (EARLY, 4 * LATE))
    assert late["pinned_memory"]["allocations"] - early["pinned_memory"]["allocations"] <= 4
    assert 2 * late["calls"]["cudaEventCreate"] < late["calls"]["cudaEventRecord"], late["calls"]


# For each back end of attention, a part of its kernels' names; "math" computes batched products.
KERNELS = {"flash": "flash_fwd", "efficient": "fmha", "math": "in a batch"}


@of_cases(CASES)
def test_attention_runs_as_logged(case):
    logged = re.search(r"attention: (\w+)", on_cuda(case, LATE).done.stdout)[1]
    report = reports(case)[0]
    used = {name for name, kernel in KERNELS.items()
            if any(kernel in call for call in [*report["launches"], *report["gemms"]])}
    assert used == {logged}


def test_auto_checkpointing_uses_the_device_memory():
    case = Case("auto", dp=2, flags="--ac auto")
    assert "--ac auto: none (" in on_cuda(case, EARLY).done.stdout


def launches_of(*parts):
    """Returns a function that counts a report's launches of kernels with one of `parts` in their names."""
    return lambda report: sum(count for name, count in report["launches"].items()
                              if any(part in name for part in parts))


def launches(*parts):
    """Returns how many launches of such kernels a step has in the case cp, which recomputes nothing."""
    return a_step(next(case for case in CASES if case.name == "cp"), launches_of(*parts))


def test_split_sequences_use_flash_attention():
    """The first of two ranks computes its head by one call and its tail by two, the last one all of its tokens by two.
    No kernel makes a mask."""
    case = next(case for case in CASES if case.name == "cp")
    for rank, calls in enumerate((3, 2)):
        flash = a_step(case, launches_of("flash_fwd_kernel"), rank)
        assert flash == calls * programs.SMALL["num_hidden_layers"]
        assert a_step(case, launches_of("triu_tril", "fmha"), rank) == 0


WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}


@pytest.mark.parametrize("changes, flags, tp", [
    ({}, "--document-mask --eos-token 187", 2), (WINDOW, "", 1), (WINDOW, "--document-mask --eos-token 187", 2),
], ids=["documents", "window", "documents_in_a_window"])
def test_documents_and_windows_use_flash_without_a_mask(changes, flags, tp):
    case = Case("packed", tp=tp)
    run = train_config(case, changes, *flags.split())
    assert run.done.returncode == 0, run.done.stderr
    assert "attention: flash" in run.done.stdout
    launches = run.reports[0]["launches"]
    layers = programs.SMALL["num_hidden_layers"]
    assert sum(count for name, count in launches.items() if "flash_fwd" in name) == EARLY * layers
    assert run.reports[0]["violations"] == []
    masks = [name for name in launches if re.search("fmha|triu_tril", name)]
    assert masks == []


def test_math_attention_is_refused_unless_it_is_allowed():
    """The memory-efficient kernel takes no heads of 6 features in fp32."""
    case = Case("math", dtype="fp32")
    odd = {"hidden_size": 24, "head_dim": 6, "num_attention_heads": 4, "num_key_value_heads": 4}
    refused = train_config(case, odd).done
    assert refused.returncode != 0
    assert "has no fused kernel" in refused.stderr and "--allow-math-attention" in refused.stderr
    allowed = train_config(case, odd, "--allow-math-attention").done
    assert allowed.returncode == 0, allowed.stderr
    assert "attention: math" in allowed.stdout


def test_deterministic_training_has_an_algorithm_for_every_operator():
    run = train_config(Case("deterministic", dp=2, tp=2), {}, "--deterministic", "--ac", "selective", "--document-mask",
                       "--eos-token", 187)
    assert run.done.returncode == 0, run.done.stderr
    assert "attention: flash, deterministic" in run.done.stdout
    backward = [name for name in run.reports[0]["launches"] if "flash_bwd_dot_do_o" in name]
    assert backward


def test_fused_operators_are_one_launch_each():
    """No fused operator runs as several kernels of libtorch."""
    layers = programs.SMALL["num_hidden_layers"]
    # The backward computes the norms again, and computes the products of silu_mul together with their gradients.
    expected = {"silu_mul_kernel": layers, "silu_mul_backward_kernel": layers,
                "rms_norm_kernel": 4 * layers + 2, "rms_norm_backward_kernel": 2 * layers + 1,
                "rms_norm_weight_kernel": 2 * layers + 1,
                "rotary_kernel": 2 * layers,  # forward and backward, each of queries and keys
                "embedding_kernel": 1, "embedding_backward_kernel": 1, "embedding_backward_rows_kernel": 1,
                "cross_entropy_kernel": 1, "cross_entropy_backward_kernel": 1}
    assert {name: launches("::" + name + "<") for name in expected} == expected
    assert launches("silu_kernel", "sigmoid", "rsqrt", "log_softmax", "compare_scalar_kernel<long>") == 0


def test_clipping_and_the_update_are_four_launches():
    """Clipping needs no pass that multiplies the gradients, and one launch casts the gradients of a unit."""
    for kernel in ("square_sums_kernel", "sum_kinds_kernel", "clip_norm_kernel", "adamw_kernel"):
        assert launches("::" + kernel) == 1, kernel
    assert launches("BinaryOpScalarTensorFunctor") == launches("FusedAdam") == 0
    units = programs.SMALL["num_hidden_layers"] + 2  # the embedding, and the norm with the head
    assert launches("::pack_kernel<c10::BFloat16, float>") <= units


def test_every_exit_is_clean():
    """Runs end several times (TESSERA_EXITS), because an abort at exit would only happen sometimes."""
    count = int(os.environ.get("TESSERA_EXITS", 3))
    case = Case("exit", dp=2, tp=2)
    for _ in range(count):
        done = train_config(case, {}, steps=1).done
        assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr


def test_fake_has_every_symbol_that_libtorch_needs():
    """A call that the fake lacks would go to NVIDIA's library, with handles that are not its own."""
    def symbols(library, kind):
        names = subprocess.run(["nm", "-D", kind, library], capture_output=True, text=True, check=True)
        return {line.split()[-1].split("@")[0] for line in names.stdout.splitlines()}

    offered = symbols(programs.FAKE_CUDA, "--defined-only")
    libtorch = pathlib.Path(sysconfig.get_path("purelib"), "torch", "lib")
    wanted = set()
    for library in (libtorch / "libtorch_cuda.so", libtorch / "libc10_cuda.so",
                    programs.FAKE_CUDA.parents[1] / "libtessera_cuda.so"):
        wanted |= {name for name in symbols(library, "--undefined-only")
                   if re.match(r"(__cuda|cuda|cublas|nccl|cu[A-Z])", name)}
    assert wanted - offered == set()
