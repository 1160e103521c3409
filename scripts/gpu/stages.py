"""The stages of scripts/gpu/run. Each adds rows to the results; what it raises ends that stage alone."""
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FAKE = HERE / "lib" / "fake_cuda" / "libcuda.so.1"


def add(results, **row):
    with open(results, "a") as out:
        out.write(json.dumps(row) + "\n")


@dataclasses.dataclass
class Context:
    results: pathlib.Path
    quick: bool
    rehearse: bool

    def add(self, stage, what, value, unit="", ok=None):
        """A rehearsal computes no values, so it judges none."""
        add(self.results, stage=stage, what=what, value=value, unit=unit, ok=None if self.rehearse else ok,
            rehearsed=self.rehearse)

    def environment(self):
        environment = dict(os.environ)
        if self.rehearse:
            environment["LD_PRELOAD"] = str(FAKE)
        return environment

    def config(self, name):
        return HERE / "configs" / ("small.json" if self.rehearse else f"{name}.json")


def torch_folders():
    """The folders of the libraries that libtorch loads, of this machine's python3."""
    import torch
    root = pathlib.Path(torch.__file__).parent
    return [root / "lib", *sorted((root.parent / "nvidia").glob("*/lib"))]


def write_tokens(folder, count=1 << 18):
    """An llm.c shard: phrases that come again, so that there is something to learn."""
    tokens = [(i * i // 7 + i % 13) % 512 for i in range(count)]
    path = folder / "tokens.bin"
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + struct.pack(f"<{count}H", *tokens))
    return path


def for_programs(context):
    """The environment of our programs. Not for Python: its torch must find its own libraries."""
    paths = [HERE / "lib", *torch_folders()]
    return context.environment() | {"LD_LIBRARY_PATH": ":".join(map(str, paths))}


def llama_train(context, flags, ranks=1, prefix=()):
    """The metrics of a run of llama_train."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        metrics = folder / "m.jsonl"
        program = [HERE / "bin" / "llama_train", "--tokens", write_tokens(folder), "--metrics", metrics, *flags]
        launcher = [HERE / "bin" / "tessera-run", "--nproc", ranks, "--"] if ranks > 1 else []
        done = subprocess.run([str(part) for part in [*prefix, *launcher, *program]], env=for_programs(context),
                              capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"llama_train {' '.join(map(str, flags))}: exit code {done.returncode}\n"
                               f"{done.stdout[-1000:]}{done.stderr[-2000:]}")
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def versions(context):
    import torch
    built_for = (HERE / "torch-version").read_text().strip()
    context.add("versions", "torch", torch.__version__, ok=torch.__version__ == built_for)
    context.add("versions", "CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")
    query = "name,driver_version,clocks.sm,clocks.mem,power.limit,ecc.mode.current"
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True)
        context.add("versions", query, done.stdout.strip())
    llama_train(context, ["--config", context.config("small"), "--device", "cuda", "--steps", 1])
    context.add("versions", "llama_train loads and ends", "yes", ok=True)


def ceilings(context):
    """By the machine's torch, in a separate process: it may run on the fake."""
    flags = ["--small"] if context.rehearse else ["--quick"] if context.quick else []
    done = subprocess.run([sys.executable, HERE / "ceilings.py", *flags], env=context.environment(),
                          stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        context.add("ceilings", **json.loads(line))


def worst(rows, others):
    """The largest relative difference of losses."""
    return max(abs(row["loss"] - other["loss"]) / max(abs(other["loss"]), 1e-9)
               for row, other in zip(rows, others, strict=True))


def initial_weights(context, flags):
    """The bytes of the weights before the first step."""
    with tempfile.TemporaryDirectory() as folder:
        llama_train(context, [*flags, "--steps", 0, "--save-hf", f"{folder}/model"])
        return pathlib.Path(folder, "model", "model.safetensors").read_bytes()


def parity(context):
    """Losses of 20 steps: CPU and GPU, and several ranks that share one GPU over staged Gloo. And the
    weights that they begin with, which are the same bits on both."""
    steps, seq = (2, 16) if context.rehearse else (20, 128)
    base = ["--config", HERE / "configs" / "small.json", "--batch", 8, "--seq", seq]
    flags = [*base, "--steps", steps]
    fp32 = ["--device", "cuda", "--param-dtype", "fp32"]
    same = initial_weights(context, [*base, *fp32]) == initial_weights(context, base)
    context.add("parity", "initial weights, GPU to CPU", "equal" if same else "different", ok=same)
    on_gpu = llama_train(context, [*flags, *fp32])
    on_cpu = llama_train(context, flags)
    context.add("parity", "fp32, GPU to CPU", worst(on_gpu, on_cpu), "relative", ok=worst(on_gpu, on_cpu) < 1e-3)
    in_bf16 = llama_train(context, [*flags, "--device", "cuda"])
    context.add("parity", "bf16 to fp32", worst(in_bf16, on_gpu), "relative", ok=worst(in_bf16, on_gpu) < 3e-2)
    meshes = [["--dp", 2]] if context.quick else [["--dp", 2], ["--tp", 2], ["--dp", 2, "--tp", 2]]
    for mesh in meshes:
        ranks = 4 if len(mesh) == 4 else 2
        # Several ranks see one GPU as their own.
        rows = llama_train(context, [*flags, *fp32, *mesh, "--backend", "gloo"], ranks)
        difference = worst(rows, on_gpu)
        context.add("parity", f"{' '.join(map(str, mesh))}, staged, to one rank", difference, "relative",
                    ok=difference < 1e-3)


def gpu_test(context):
    """Our kernels bit by bit, and the functions of a model within rounding, against the CPU. The fake CUDA computes
    the first alone."""
    filters = ["--gtest_filter=*RandomNumbers*:Dropout*"] if context.rehearse else []
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        done = subprocess.run([HERE / "bin" / "gpu_test", f"--gtest_output=json:{report}", *filters],
                              env=for_programs(context), stdout=sys.stderr)
        for suite in json.loads(report.read_text())["testsuites"]:
            for test in suite["testsuite"]:
                passed = "failures" not in test
                add(context.results, stage="gpu_test", what=f"{suite['name']}.{test['name']}",
                    value="passed" if passed else test["failures"][0]["failure"], ok=passed)
    done.check_returncode()


def sanitizer(context):
    """compute-sanitizer over a small step: out-of-bounds accesses, races in shared memory."""
    tool = shutil.which("compute-sanitizer")
    for check in ("memcheck", "racecheck"):
        if tool is None or context.rehearse:
            context.add("sanitizer", check, "not run: " + ("rehearsal" if context.rehearse else "no compute-sanitizer"))
            continue
        prefix = [tool, "--tool", check, "--error-exitcode", 9, "--kernel-name-exclude", "regex:cutlass|cudnn"]
        llama_train(context, ["--config", HERE / "configs" / "small.json", "--device", "cuda", "--steps", 1,
                              "--batch", 1, "--seq", 32], prefix=prefix)
        context.add("sanitizer", check, "clean", ok=True)


@dataclasses.dataclass
class Shape:
    model: str
    batch: int
    seq: int
    ac: str = "none"
    in_quick: bool = False

    def name(self, batch, seq):
        return f"{self.model} B={batch} T={seq} ac={self.ac}"


SHAPES = [Shape("1b", 4, 4096, in_quick=True), Shape("1b", 8, 4096), Shape("1b", 8, 4096, "selective"),
          Shape("1b", 8, 4096, "full"), Shape("3b", 2, 4096), Shape("3b", 4, 4096, "selective"),
          Shape("8b-4-layers", 4, 4096), Shape("8b-4-layers", 4, 4096, "selective")]


def sizes(context, shape):
    """Steps that are not measured, those that are, batch and sequence."""
    steps = (1, 2) if context.rehearse else (5, 10 if context.quick else 15)
    return *steps, *((2, 128) if context.rehearse else (shape.batch, shape.seq))


# Patterns of kernel names, tried in this order.
FAMILIES = {"products": "gemm|cutlass|nvjet|xmma|cublas", "attention": "flash|fmha|attention",
            "collectives": "nccl", "our own": "tessera", "optimizer": "multi_tensor|adam", "copies": "memcpy|memset|copy|cat",
            "reductions": "reduce|softmax|norm", "elementwise": "elementwise|vectorized"}


def family_of(name):
    return next((family for family, names in FAMILIES.items() if re.search(names, name, re.IGNORECASE)), "others")


def busy_time(spans):
    """The length of the union of (begin, end)."""
    busy, until = 0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0, end - max(begin, until))
        until = max(until, end)
    return busy


def profile(context):
    """One step by libtorch's profiler: the kernels' time by family, and how long none of them runs."""
    shape = SHAPES[0]
    warm, _, batch, seq = sizes(context, shape)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "profile.json")
        llama_train(context, ["--config", context.config(shape.model), "--device", "cuda", "--steps", warm + 1,
                              "--batch", batch, "--seq", seq, "--profile", file])
        events = json.loads(file.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    context.add("profile", "kernels and copies", len(kernels), "a step", ok=len(kernels) > 0)
    if not kernels:
        return
    times = collections.Counter()
    for kernel in kernels:
        times[family_of(kernel["name"])] += kernel["dur"] / 1e3
    for family, time in times.most_common():
        context.add("profile", family, time, "ms a step")
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in kernels]
    idle = max(end for _, end in spans) - min(begin for begin, _ in spans) - busy_time(spans)
    context.add("profile", "between kernels", idle / 1e3, "ms a step")


def add_medians(context, stage, shape, rows):
    _, _, batch, seq = sizes(context, shape)
    for key, unit, scale in (("step_time_s", "ms a step", 1e3), ("tokens_per_s", "tokens/s", 1),
                             ("mfu", "MFU, %", 1), ("peak_memory_bytes", "GiB, peak", 2**-30)):
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            context.add(stage, shape.name(batch, seq), statistics.median(values) * scale, unit)


@contextlib.contextmanager
def power_and_clock():
    """What nvidia-smi reads twice a second meanwhile: a list of (W, MHz), empty where there is none."""
    readings = []
    if not shutil.which("nvidia-smi"):
        yield readings
        return
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "--id=0", "-lms", "500"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        yield readings
        process.terminate()
        for line in process.stdout.read().splitlines():
            with contextlib.suppress(ValueError):  # the last one may be cut off
                power, clock = map(float, line.split(","))
                readings.append((power, clock))


def train(context):
    for shape in SHAPES:
        if shape.in_quick or not context.quick:
            warm, measured, batch, seq = sizes(context, shape)
            with power_and_clock() as readings:
                rows = llama_train(context, ["--config", context.config(shape.model), "--device", "cuda", "--steps",
                                             warm + measured, "--batch", batch, "--seq", seq, "--ac", shape.ac])
            add_medians(context, "train", shape, rows[warm:])
            # The last third is of steps: loading and the first steps come before.
            for figures, unit in zip(zip(*readings[-len(readings) // 3:]), ("W", "MHz")):
                context.add("train", shape.name(batch, seq), statistics.median(figures), unit)


def peer(context, *flags, stage="peer"):
    """The same steps on PyTorch, where it does what llama_train does: without checkpointing of activations."""
    for shape in SHAPES:
        # A rehearsal gains nothing from more than one: they are all small there.
        if shape.in_quick or (shape.ac == "none" and not context.rehearse):
            warm, measured, batch, seq = sizes(context, shape)
            values = {"--config": context.config(shape.model), "--warm": warm, "--steps": measured, "--batch": batch,
                      "--seq": seq}
            command = [sys.executable, HERE / "peer.py", *flags, *(str(part) for item in values.items() for part in item)]
            done = subprocess.run(command, env=context.environment(), stdout=subprocess.PIPE, text=True, check=True)
            add_medians(context, stage, shape, [json.loads(line) for line in done.stdout.splitlines()])


def compiled_peer(context):
    """PyTorch's steps by torch.compile, whose kernels the fake CUDA cannot run."""
    if context.rehearse:
        context.add("compiled_peer", "torch.compile", "not run: rehearsal")
    else:
        peer(context, "--compile", stage="compiled_peer")


def copy_ceiling(context):
    """Bytes/s, of the stage ceilings of these results; None without it."""
    rows = map(json.loads, context.results.read_text().splitlines())
    return next((row["value"] * 1e12 for row in rows if row["stage"] == "ceilings" and row["what"] == "copy"), None)


def kernels(context):
    """The fused kernels beside ATen's operators: medians, and of them the share that they reach of the
    speed of a copy."""
    flags = ["64", "--benchmark_min_time=1e-9"] if context.rehearse else ["16384", "--benchmark_min_time=0.02"]
    done = subprocess.run([HERE / "bin" / "bench_kernels", "cuda", *flags, "--benchmark_format=json"],
                          env=for_programs(context), stdout=subprocess.PIPE, text=True, check=True)
    ceiling = copy_ceiling(context)
    for row in json.loads(done.stdout)["benchmarks"]:
        if row["aggregate_name"] == "median":
            name = row["run_name"].split("/repeats:")[0]
            context.add("kernels", name, row["real_time"], "us")
            if ceiling:
                context.add("kernels", name, 100 * row["bytes_per_second"] / ceiling, "% of the speed of a copy")
