#!/usr/bin/env python3
"""Step time of llama_train beside PyTorch's FSDP2 + DTensor on the same files, in one run.

Both sides train the same model from the same weights and tokens, with sequence and loss parallelism,
one thread a rank. Rounds alternate, so that a machine whose speed drifts slows both alike; each
round's figure is the median step (the first steps left out), and the ratio is taken pair by pair.

  benchmarks/bench_step.py [--dp 2 --tp 2 --hidden 256 --layers 6 --batch 8 --seq 256 --rounds 3]
"""
import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "examples"))
import programs  # noqa: E402


def config_of(args):
    return programs.SMALL | {
        "hidden_size": args.hidden, "intermediate_size": args.hidden * 8 // 3 // 16 * 16,
        "num_hidden_layers": args.layers, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": args.vocab, "max_position_embeddings": args.seq}


def median_step(command, metrics, skip):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=1800)
    rows = programs.read_metrics(metrics)
    if not rows:
        raise SystemExit(f"{command} wrote no metrics:\n{done.stderr[-2000:]}")
    return statistics.median(row["step_time_s"] for row in rows[skip:]), rows[-1]["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dp", 2), ("tp", 2), ("hidden", 256), ("layers", 6), ("vocab", 2048),
                          ("batch", 8), ("seq", 256), ("steps", 10), ("rounds", 3), ("threads", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    args = parser.parse_args()
    world = args.dp * args.tp
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = programs.make_model(folder, config_of(args))
        count = args.steps * args.batch * args.seq + 1
        tokens = programs.write_tokens(folder / "t.bin", programs.text_tokens(count, args.vocab))
        common = ["--model", model, "--tokens", tokens, "--steps", args.steps, "--batch", args.batch,
                  "--seq", args.seq, "--dp", args.dp, "--tp", args.tp]
        ours = [programs.BIN / "tessera-run", "--nproc", world, "--", programs.BIN / "llama_train",
                *common, "--metrics", folder / "ours.jsonl"]
        theirs = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", world,
                  programs.PEER, "train", *common, "--threads", args.threads, "--metrics",
                  folder / "theirs.jsonl"]
        for i in range(args.rounds):
            a, loss_a = median_step(ours, folder / "ours.jsonl", 2)
            b, loss_b = median_step(theirs, folder / "theirs.jsonl", 2)
            ratios.append(b / a)
            print(f"round {i + 1}: tessera {a * 1e3:8.1f} ms   pytorch {b * 1e3:8.1f} ms   "
                  f"ratio {b / a:5.2f}   final loss {loss_a:.5f} / {loss_b:.5f}", flush=True)
    print(f"median ratio (pytorch / tessera): {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
