"""The stages of scripts/gpu/run that check values. An exception ends only its stage."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import launch
from context import HERE, check, for_programs, llama_train


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


def worst(rows, others):
    """Returns the largest relative difference of losses."""
    return max(abs(row["loss"] - other["loss"]) / max(abs(other["loss"]), 1e-9)
               for row, other in zip(rows, others, strict=True))


def initial_weights(context, flags):
    """Returns the bytes of the weights before the first step."""
    with context.scratch() as folder:
        llama_train(context, [*flags, "--steps", 0, "--save-hf", f"{folder}/model"])
        return pathlib.Path(folder, "model", "model.safetensors").read_bytes()


def small_run(context, model="small"):
    """Returns the flags of a run that is short enough to be repeated on a CPU in seconds. Any number of ranks of meshes()
    divides the batch."""
    steps, seq = (2, 16) if context.rehearse else (20, 128)
    batch = max(8, 2 ** (context.cards.bit_length() - 1))
    return ["--config", context.config(model), "--batch", batch, "--seq", seq], ["--steps", steps]


FP32 = ["--device", "cuda", "--param-dtype", "fp32"]


def parity(context):
    """Compares the losses of 20 steps on GPU and CPU. The initial weights must be bitwise equal."""
    base, steps = small_run(context)
    same = initial_weights(context, [*base, *FP32]) == initial_weights(context, base)
    context.add("parity", "initial weights, GPU to CPU", "equal" if same else "different", ok=same)
    on_gpu = llama_train(context, [*base, *steps, *FP32])
    on_cpu = llama_train(context, [*base, *steps])
    context.add("parity", "fp32, GPU to CPU", worst(on_gpu, on_cpu), "relative", ok=worst(on_gpu, on_cpu) < 1e-3)
    in_bf16 = llama_train(context, [*base, *steps, "--device", "cuda"])
    context.add("parity", "bf16 to fp32", worst(in_bf16, on_gpu), "relative", ok=worst(in_bf16, on_gpu) < 3e-2)


# The checks on several ranks: name, flags and the smallest number of ranks n. {half} is n / 2; TP has at most 8 ranks,
# the number of the small model's heads.
KINDS_OF_RANKS = [("FSDP", "--dp {n}", 2), ("TP", "--tp {heads} --dp {groups}", 2), ("2-D", "--dp {half} --tp 2", 4),
                  ("context parallelism", "--cp {n}", 2), ("HSDP", "--dp {half} --dp-replicate 2", 4),
                  ("activation checkpointing", "--dp {half} --tp 2 --ac full", 4), ("offload", "--dp {n} --offload", 2),
                  ("experts", "--dp {half} --ep 2", 4)]
IN_BF16 = ("FSDP", "TP", "2-D")


def meshes(context):
    """Returns (kind, flags, number of ranks): each kind on 2, 4, 8 and more ranks up to the number of cards, or on one card on
    its smallest number of ranks. A rehearsal has one kind, on as many ranks as possible. The fake CUDA cannot run experts,
    because it does not compute the router's choices, which are the sizes of the next operands."""
    found = []
    for kind, flags, fewest in KINDS_OF_RANKS:
        counts = [2**i for i in range(1, 11) if fewest <= 2**i and context.fits(2**i)] if context.cards > 1 else [fewest]
        found += [(kind, flags.format(n=n, half=n // 2, heads=min(n, 8), groups=n // min(n, 8)).split(), n) for n in counts]
    return [max(found, key=lambda row: (row[2], row[0] == "2-D", row[0] == "FSDP"))] if context.rehearse else found


def nccl_shares_the_card(context):
    """Whether NCCL allows several ranks on one GPU. Otherwise the ranks communicate by Gloo, through host memory."""
    base, _ = small_run(context)
    try:
        llama_train(context, [*base, *FP32, "--dp", 2, "--steps", 1], ranks=2, several_hosts=True)
    except RuntimeError as error:
        context.add("ranks", "NCCL between ranks of one card", f"no: {str(error)[-300:]}")
        return False
    context.add("ranks", "NCCL between ranks of one card", "yes")
    return True


def ranks(context):
    """Compares the losses of several ranks, for each kind of training, with one CPU process in fp32. Each rank has its own
    card, or all ranks share the only card."""
    share = context.cards == 1
    nccl = not share or nccl_shares_the_card(context)
    settings = {"several_hosts": share and nccl}
    base, steps = small_run(context)
    experts, _ = small_run(context, "tiny-moe")
    on_cpu = {"small": llama_train(context, [*base, *steps])}
    if not context.rehearse:
        on_cpu["experts"] = llama_train(context, [*experts, *steps])
    staged = [] if nccl else ["--backend", "gloo"]

    def compare(kind, count, dtype, bound, rows):
        difference = worst(rows, on_cpu["experts" if kind == "experts" else "small"])
        backend = "NCCL" if nccl and not context.backend(count) else "staged"
        context.add("ranks", f"{kind} on {count} ranks, {dtype}, {backend}, to a CPU", difference, "relative",
                    ok=difference < bound)

    for kind, mesh, count in meshes(context):
        flags = [*(experts if kind == "experts" else base), *staged, *steps, *mesh]
        compare(kind, count, "fp32", 1e-3, llama_train(context, [*flags, *FP32], count, **settings))
        if kind in IN_BF16 and not (context.rehearse and count > 4):
            compare(kind, count, "bf16", 3e-2, llama_train(context, [*flags, "--device", "cuda"], count, **settings))
    count = max([count for _, _, count in meshes(context) if context.cards > 1], default=2)
    count = min(count, 2 * context.hosts) if context.rehearse else count
    compare("saved and resumed", count, "fp32", 1e-3, resumed(context, [*base, *staged, *FP32], steps[1], count, settings))


def resumed(context, flags, steps, count, settings):
    """Returns the metrics of a run with FSDP that saves a checkpoint halfway, and of a run with tensor parallelism that
    continues from it."""
    with context.scratch() as folder:
        flags = [*flags, "--checkpoint", folder]
        first = llama_train(context, [*flags, "--dp", count, "--steps", steps // 2], count, **settings)
        then = [*flags, "--dp", count // 2, "--tp", 2, "--steps", steps, "--resume"]
        return first + llama_train(context, then, count, **settings)


def collectives(context):
    """Measures collectives between all cards, whose values must be right also in a rehearsal."""
    program = [sys.executable, HERE / "collectives.py", *(["--small"] if context.rehearse else []),
               *context.backend(context.cards)]
    done = launch.torchrun(context, program, context.cards, context.environment())
    check(done, "collectives.py")
    for row in launch.rows(done):
        context.add("collectives", **row)
    context.add_judged("collectives", "values", "right", ok=True)


def gpu_test(context):
    """Compares with the CPU: Tessera's kernels bitwise, the functions of a model within rounding. The fake CUDA computes
    only the kernels."""
    filters = ["--gtest_filter=*RandomNumbers*:Dropout*"] if context.rehearse else []
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        done = subprocess.run([HERE / "bin" / "gpu_test", f"--gtest_output=json:{report}", *filters],
                              env=for_programs(context), stdout=sys.stderr)
        for suite in json.loads(report.read_text())["testsuites"]:
            for test in suite["testsuite"]:
                passed = "failures" not in test
                context.add_judged("gpu_test", f"{suite['name']}.{test['name']}",
                                   "passed" if passed else test["failures"][0]["failure"], ok=passed)
    done.check_returncode()


def sanitizer(context):
    """Runs compute-sanitizer: finds out-of-bounds accesses of a small step, and races in the shared memory of Tessera's
    kernels. cuDNN's attention is excluded, because racecheck reports hazards in it, or fails."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or context.rehearse:
        context.add("sanitizer", "memcheck, racecheck", "not run: " + ("rehearsal" if context.rehearse else "no compute-sanitizer"))
        return
    llama_train(context, ["--config", context.config("small"), "--device", "cuda", "--steps", 1, "--batch", 1,
                          "--seq", 32], prefix=[tool, "--tool", "memcheck", "--error-exitcode", 9])
    context.add("sanitizer", "memcheck", "clean", ok=True)
    done = subprocess.run([tool, "--tool", "racecheck", "--error-exitcode", "9", HERE / "bin" / "gpu_test",
                           "--gtest_filter=-*ttention*"], env=for_programs(context), stdout=sys.stderr)
    context.add("sanitizer", "racecheck", "clean" if done.returncode == 0 else "hazards", ok=done.returncode == 0)
