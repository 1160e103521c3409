"""The stages of scripts/gpu/run that measure speed. An exception ends only its stage."""
import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import launch
from context import HERE, OutOfMemory, check, for_programs, llama_train, read, vocabulary_of, write_tokens


def ceilings(context):
    """Runs with the machine's torch in a separate process, because it may run on the fake CUDA."""
    flags = ["--small"] if context.rehearse else []
    done = subprocess.run([sys.executable, HERE / "ceilings.py", *flags], env=context.environment(),
                          stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        context.add("ceilings", **json.loads(line))


@dataclasses.dataclass(frozen=True)
class Shape:
    model: str
    batch: int
    seq: int
    ac: str = "none"
    dp: int = 1
    tp: int = 1

    @property
    def ranks(self):
        return self.dp * self.tp

    def name(self):
        mesh = f" dp={self.dp} tp={self.tp}" if self.ranks > 1 else ""
        return f"{self.model} B={self.batch} T={self.seq} ac={self.ac}{mesh}"

    def on_cards(self, dp, tp=1):
        """Returns this shape of one card on a mesh of cards, with the same number of sequences for each card."""
        return dataclasses.replace(self, batch=self.batch * dp * tp, dp=dp, tp=tp)


# The most important shape is first.
SHAPES = [Shape("1b", 4, 4096), Shape("1b", 8, 4096), Shape("1b", 8, 4096, "selective"), Shape("1b", 8, 4096, "full"),
          Shape("3b", 2, 4096), Shape("3b", 4, 4096, "selective"), Shape("8b-4-layers", 4, 4096),
          Shape("8b-4-layers", 4, 4096, "selective")]


def sizes(context, shape):
    """Returns the numbers of warm-up steps and measured steps, the batch size and the sequence length."""
    return (1, 2, 2 * shape.dp, 128) if context.rehearse else (5, 15, shape.batch, shape.seq)


# Patterns of kernel names. The first pattern that matches decides the family of a kernel.
FAMILIES = {"products": "gemm|cutlass|nvjet|xmma|cublas", "attention": "flash|fmha|attention",
            "collectives": "nccl", "our own": "tessera", "optimizer": "multi_tensor|adam", "copies": "memcpy|memset|copy|cat",
            "reductions": "reduce|softmax|norm", "elementwise": "elementwise|vectorized"}


def family_of(name):
    return next((family for family, names in FAMILIES.items() if re.search(names, name, re.IGNORECASE)), "others")


def busy_time(spans):
    """Returns the total length of the union of (begin, end) intervals."""
    busy, until = 0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0, end - max(begin, until))
        until = max(until, end)
    return busy


def profile(context, shape):
    """Profiles one step with libtorch's profiler: the kernels' time by family, and the time in which no kernel runs."""
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
    for key, unit, scale in (("step_time_s", "ms a step", 1e3), ("tokens_per_s", "tokens/s", 1), ("mfu", "MFU, %", 1),
                             ("mfu_causal", "MFU, causal, %", 1), ("peak_memory_bytes", "GiB, peak", 2**-30)):
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            context.add(stage, shape.name(), statistics.median(values) * scale, unit)


@contextlib.contextmanager
def power_and_clock():
    """Reads nvidia-smi twice a second in the scope: a list of (W, MHz, degrees C), empty without nvidia-smi."""
    readings = []
    if not shutil.which("nvidia-smi"):
        yield readings
        return
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm,temperature.gpu", "--format=csv,noheader,nounits", "--id=0", "-lms", "500"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        yield readings
        process.terminate()
        for line in process.stdout.read().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be incomplete
                power, clock, temperature = map(float, line.split(","))
                readings.append((power, clock, temperature))


def train(context, shape):
    warm, measured, batch, seq = sizes(context, shape)
    with power_and_clock() as readings:
        try:
            rows = llama_train(context, ["--config", context.config(shape.model), "--device", "cuda", "--steps",
                                         warm + measured, "--batch", batch, "--seq", seq, "--ac", shape.ac,
                                         "--dp", shape.dp, "--tp", shape.tp], shape.ranks)
        except OutOfMemory:
            context.add("train", shape.name(), "out of memory")
            return
    add_medians(context, "train", shape, rows[warm:])
    add_readings(context, "train", shape.name(), readings)


def add_readings(context, stage, what, readings):
    """Adds the medians of the last third of the readings: earlier readings include loading and the first steps."""
    for figures, unit in zip(zip(*readings[-len(readings) // 3:]), ("W", "MHz", "degrees C")):
        context.add(stage, what, statistics.median(figures), unit)


def peer_steps(context, shape, flags, warm_seconds=0, steps=None):
    warm, measured, batch, seq = sizes(context, shape)
    config = context.config(shape.model)
    with context.scratch() as folder:
        values = {"--config": config, "--tokens": write_tokens(pathlib.Path(folder), vocabulary_of(config)),
                  "--warm": warm, "--warm-seconds": warm_seconds, "--steps": steps or measured, "--batch": batch,
                  "--seq": seq, "--ac": shape.ac}
        command = [sys.executable, HERE / "torch_step.py", *flags,
                   *(str(part) for item in values.items() for part in item)]
        if shape.ranks > 1:
            done = launch.torchrun(context, [*command, *context.backend(shape.ranks)], shape.ranks, context.environment())
        else:
            done = subprocess.run(command, env=context.environment(), capture_output=True, text=True)
    check(done, f"torch_step.py {shape.name()}")
    return launch.rows(done)


def measured_step(context, shape):
    """Returns the median step time in seconds that the stage `train` measured for a shape; 0.25 s before that stage."""
    times = [row["value"] / 1e3 for row in read(context.results)
             if (row["stage"], row["what"], row.get("unit")) == ("train", shape.name(), "ms a step")]
    return times[-1] if times else 0.25


def our_steps(context, shape, warm_seconds, steps):
    warm = max(sizes(context, shape)[0], math.ceil(warm_seconds / measured_step(context, shape)))
    _, _, batch, seq = sizes(context, shape)
    return llama_train(context, ["--config", context.config(shape.model), "--device", "cuda", "--steps", warm + steps,
                                 "--batch", batch, "--seq", seq, "--ac", shape.ac])[warm:]


def compare(context, shape):
    """One round of the comparison with PyTorch: each side reads the same tokens, warms the card for 30 s and takes 50
    steps. The sides of a round follow one another; several rounds give the spread."""
    warm_seconds, steps, compiled = (0, 2, []) if context.rehearse else (30, 50, ["--compile"])
    sides = {"Tessera": lambda: our_steps(context, shape, warm_seconds, steps),
             "PyTorch": lambda: peer_steps(context, shape, [*compiled, "--parallel", "none"], warm_seconds, steps),
             "PyTorch, FSDP2": lambda: peer_steps(context, shape, compiled, warm_seconds, steps)}
    for side, take_steps in sides.items():
        with power_and_clock() as readings:
            try:
                rows = take_steps()
            except OutOfMemory:
                context.add("compare", side, "out of memory")
                continue
        times = [row["step_time_s"] * 1e3 for row in rows]
        for name, figure in (("min", min), ("median", statistics.median), ("max", max)):
            context.add("compare", side, figure(times), f"ms a step, {name}")
        memory = [row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes")]
        if memory:
            context.add("compare", side, max(memory) / 2**30, "GiB, peak")
        if "attention" in rows[0]:
            context.add("compare", side, rows[0]["attention"], "attention")
        add_readings(context, "compare", side, readings)


def peer(context, shape):
    """The same steps with compiled PyTorch, on several cards with FSDP2. If they do not fit on the GPU, the batch is halved
    until they do; tokens/s and MFU are still comparable. A batch that another item measures is not repeated."""
    # The fake CUDA cannot run the kernels of torch.compile.
    flags = ["--parallel", "fsdp" if shape.ranks > 1 else "none", *([] if context.rehearse else ["--compile"])]
    while True:
        try:
            add_medians(context, "peer", shape, peer_steps(context, shape, flags))
            return
        except OutOfMemory:
            context.add("peer", shape.name(), "out of memory")
        shape = dataclasses.replace(shape, batch=shape.batch // 2)
        measured = {row["what"] for row in read(context.results) if row["stage"] == "peer"}
        if shape.batch < shape.dp or shape.name() in measured:
            return


def copy_ceiling(context):
    """Returns the copy speed in bytes/s that the stage `ceilings` measured; None if that stage has not run."""
    copies = [row["value"] for row in read(context.results) if (row["stage"], row["what"]) == ("ceilings", "copy")]
    return copies[-1] * 1e12 if copies else None


def kernels(context):
    """Compares the fused kernels with ATen's operators: median times, and their speed as a fraction of the speed of a
    copy."""
    # 16384 tokens, so that the operands do not fit into a cache. Each of the 20 calls of an
    # iteration is measured for 1 ms.
    flags = ["64", "--benchmark_min_time=1e-9"] if context.rehearse else ["16384", "--benchmark_min_time=0.001"]
    done = subprocess.run([HERE / "bin" / "bench_kernels", "cuda", *flags, "--benchmark_format=json"],
                          env=for_programs(context), stdout=subprocess.PIPE, text=True, check=True)
    ceiling = copy_ceiling(context)
    for row in json.loads(done.stdout)["benchmarks"]:
        if row["aggregate_name"] == "median":
            name = row["run_name"].split("/repeats:")[0]
            context.add("kernels", name, row["real_time"], "us")
            if ceiling:
                context.add("kernels", name, 100 * row["bytes_per_second"] / ceiling, "% of the speed of a copy")
