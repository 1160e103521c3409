"""The stages of scripts/gpu/run that check values. An exception ends only its stage."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

from context import HERE, for_programs, llama_train


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
    with tempfile.TemporaryDirectory() as folder:
        llama_train(context, [*flags, "--steps", 0, "--save-hf", f"{folder}/model"])
        return pathlib.Path(folder, "model", "model.safetensors").read_bytes()


def small_run(context):
    """Returns the flags of a run that is short enough to be repeated on a CPU in seconds."""
    steps, seq = (2, 16) if context.rehearse else (20, 128)
    return ["--config", context.config("small"), "--batch", 8, "--seq", seq], ["--steps", steps]


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


# The checks on several ranks: name, flags and number of ranks.
KINDS_OF_RANKS = [("FSDP", "--dp 2", 2), ("TP", "--tp 2", 2), ("2-D", "--dp 2 --tp 2", 4),
                  ("context parallelism", "--cp 2", 2), ("HSDP", "--dp 2 --dp-replicate 2", 4), ("activation checkpointing", "--dp 2 --tp 2 --ac full", 4),
                  ("offload", "--dp 2 --offload", 2)]
IN_BF16 = ("FSDP", "TP", "2-D")


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
    """Compares the losses of several ranks on one GPU, for each kind of training, with one CPU process in fp32."""
    base, steps = small_run(context)
    on_cpu = llama_train(context, [*base, *steps])
    nccl = nccl_shares_the_card(context)
    base += [] if nccl else ["--backend", "gloo"]

    def compare(kind, dtype, bound, rows):
        difference = worst(rows, on_cpu)
        context.add("ranks", f"{kind}, {dtype}, {'NCCL' if nccl else 'staged'}, to a CPU", difference, "relative",
                    ok=difference < bound)

    # A rehearsal leaves out the flags of the other kinds of training.
    for kind, mesh, count in KINDS_OF_RANKS[2:3] if context.rehearse else KINDS_OF_RANKS:
        flags = [*base, *steps, *mesh.split()]
        compare(kind, "fp32", 1e-3, llama_train(context, [*flags, *FP32], count, several_hosts=nccl))
        if kind in IN_BF16:
            compare(kind, "bf16", 3e-2, llama_train(context, [*flags, "--device", "cuda"], count, several_hosts=nccl))
    compare("saved and resumed", "fp32", 1e-3, resumed(context, [*base, *FP32, "--dp", 2], steps[1], nccl))


def resumed(context, flags, steps, nccl):
    """Returns the metrics of a run that saves a checkpoint halfway, and of a run that continues from it."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--checkpoint", folder]
        first = llama_train(context, [*flags, "--steps", steps // 2], 2, several_hosts=nccl)
        return first + llama_train(context, [*flags, "--steps", steps, "--resume"], 2, several_hosts=nccl)


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
