#!/usr/bin/env python3
"""Compares step time and memory of llama_train with PyTorch's FSDP2 + DTensor on the same files, in one run.
Both sides train the same model from the same weights and tokens, with sequence and loss parallelism,
one thread per rank. Rounds alternate between the sides, so that changes of the machine's speed affect
both. A round's figure is its median step time (without the first steps), and the ratio is computed
per pair of rounds. Memory is the largest resident set of any rank (the kernel's VmHWM). The fraction of
step time that llama_train waits for data is also printed.
  benchmarks/bench_step.py [--dp 2 --tp 2 --hidden 256 --layers 6 --batch 8 --seq 256 --rounds 3]
Another script may replace the peer: torch.distributed.run starts it with --peer-args (in which {metrics}
is the JSONL file to write) and the flags --model --tokens --steps --batch --seq --dp --tp --threads.
--flags are passed to llama_train, for example --flags='--zero 2'. With --against, the other side is
llama_train with these flags instead of the peer. With --against-bin, the other side is llama_train of another build:
--against-bin OLD/build/bin compares a source tree with an earlier tree.
"""
import argparse
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import results

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "examples"))
import programs  # noqa: E402

WARM_UP = 2
POLL_SECONDS = 0.1


def config_of(args):
    return programs.SMALL | {
        "hidden_size": args.hidden, "intermediate_size": args.hidden * 8 // 3 // 16 * 16,
        "num_hidden_layers": args.layers, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": args.vocab, "max_position_embeddings": args.seq}


def resident_peaks(launcher):
    """Returns VmHWM of each rank in bytes. The ranks of both launchers are child processes of the launcher."""
    peaks = {}
    try:
        children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for pid in children:
            for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peaks[pid] = int(line.split()[1]) * 1024
    except OSError:
        pass  # the process has ended
    return peaks


def run(command, metrics):
    """The metrics of all steps, and the largest peak memory of a rank in bytes."""
    command = [str(part) for part in command]
    peaks = {}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            peaks |= resident_peaks(process.pid)
            time.sleep(POLL_SECONDS)
        errors.seek(0)
        rows = programs.read_metrics(metrics) if metrics.exists() else []
        if len(rows) <= WARM_UP:
            raise SystemExit(f"{shlex.join(command)} made {len(rows)} steps:\n"
                             + errors.read().decode(errors="replace")[-2000:])
    metrics.unlink()
    return rows, max(peaks.values())


def measure(command, metrics):
    """Median step time in seconds, the fraction spent waiting for data (None if a side does not report it), the
    last loss, and the largest peak memory of a rank in bytes."""
    rows, peak = run(command, metrics)
    steps = rows[WARM_UP:]
    seconds = sum(row["step_time_s"] for row in steps)
    waited = sum(row["data_time_s"] for row in steps) / seconds if "data_time_s" in steps[0] else None
    return statistics.median(row["step_time_s"] for row in steps), waited, rows[-1]["loss"], peak


def ours(flags, common, metrics, world, folder=programs.BIN):
    return [folder / "tessera-run", "--nproc", world, "--", folder / "llama_train",
            *common, "--metrics", metrics, *shlex.split(flags)]


def theirs(args, common, metrics, world):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", world, args.peer,
            *shlex.split(args.peer_args.format(metrics=metrics)), *common,
            "--dp", args.dp, "--tp", args.tp, "--threads", args.threads]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dp", 2), ("tp", 2), ("hidden", 256), ("layers", 6), ("vocab", 2048),
                          ("batch", 8), ("seq", 256), ("steps", 10), ("rounds", 3), ("threads", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--peer", type=pathlib.Path, default=programs.PEER)
    parser.add_argument("--peer-args", default="train --metrics {metrics}")
    parser.add_argument("--flags", default="")
    parser.add_argument("--against")
    parser.add_argument("--against-bin", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="writes the raw results of each round")
    return parser.parse_args()


def sides(args, common, metrics, world):
    """Returns the commands of the two sides."""
    mesh = f"--dp {args.dp} --tp {args.tp} "
    other_build = args.against_bin is not None
    if args.against is None and not other_build:
        # PyTorch saves the gathered activations of sequence parallelism, so llama_train saves them, too.
        return (ours(mesh + "--no-sp-regather " + args.flags, common, metrics, world),
                theirs(args, common, metrics, world))
    flags = args.against if args.against is not None else mesh + args.flags
    return (ours(mesh + args.flags, common, metrics, world),
            ours(flags, common, metrics, world, args.against_bin if other_build else programs.BIN))


def main():
    args = parse_arguments()
    world = args.dp * args.tp
    ratios, rounds = [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = programs.make_model(folder, config_of(args))
        count = args.steps * args.batch * args.seq + 1
        tokens = programs.write_tokens(folder / "t.bin", programs.text_tokens(count, args.vocab))
        metrics = folder / "metrics.jsonl"
        common = ["--model", model, "--tokens", tokens, "--steps", args.steps, "--batch", args.batch,
                  "--seq", args.seq]
        first, second = sides(args, common, metrics, world)
        for i in range(args.rounds):
            a, waited, loss_a, peak_a = measure(first, metrics)
            b, _, loss_b, peak_b = measure(second, metrics)
            ratios.append(b / a)
            rounds.append({"tessera_s": a, "other_s": b, "tessera_peak_bytes": peak_a, "other_peak_bytes": peak_b,
                           "tessera_loss": loss_a, "other_loss": loss_b})
            print(f"round {i + 1}: tessera {a * 1e3:8.1f} ms {peak_a / 2**20:6.0f} MiB   "
                  f"other {b * 1e3:8.1f} ms {peak_b / 2**20:6.0f} MiB   ratio {b / a:5.2f}   "
                  f"final loss {loss_a:.5f} / {loss_b:.5f}   tessera waited for data {waited:.3%}", flush=True)
    print(f"median ratio (other / tessera): {statistics.median(ratios):.2f}")
    if args.out:
        results.write(args.out, {"rounds": rounds})


if __name__ == "__main__":
    main()
