#!/usr/bin/env python3
"""llama_plan's step time beside the measured one, on this CPU.

First `llama_plan --calibrate` measures a run with dp alone, one thread a rank, and writes this machine's file. Then it
plans and runs llama_train for each mesh of so many ranks and kind of checkpointing, and prints the median step of both and
their ratio.

  benchmarks/bench_plan.py [--hidden 512 --layers 4 --vocab 256 --kv-heads 8 --batch 8 --seq 256 --ranks 2 --rounds 5]
                           [--ac none full] [--machine FILE.toml]
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "examples"))
import programs  # noqa: E402

WARM_UP = 2


def succeed_on(ranks, command):
    programs.succeed(programs.on_ranks(ranks, command), env=dict(os.environ, OMP_NUM_THREADS="1"))


def estimated(arguments, machine, folder):
    plan = folder / "plan.json"
    programs.succeed([programs.BIN / "llama_plan", *arguments, "--device", "cpu", "--gpu", machine, "--json", plan])
    return json.loads(plan.read_text())["step_time_s"]


def measured(arguments, ranks, tokens, rounds, folder):
    metrics = folder / "m.jsonl"
    metrics.unlink(missing_ok=True)
    succeed_on(ranks, [programs.BIN / "llama_train", *arguments, "--tokens", tokens, "--metrics", metrics, "--steps",
                       WARM_UP + rounds])
    return statistics.median(row["step_time_s"] for row in programs.read_metrics(metrics)[WARM_UP:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 4), ("vocab", 256), ("kv-heads", 8), ("batch", 8), ("seq", 256),
                          ("ranks", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ac", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--machine", type=pathlib.Path, help="an earlier machine file, in place of measuring")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        machine = args.machine or folder / "machine.toml"
        config = programs.write_config(folder, programs.SMALL | {
            "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers,
            "num_attention_heads": 8, "num_key_value_heads": args.kv_heads, "vocab_size": args.vocab,
            "max_position_embeddings": args.seq})
        tokens = programs.write_tokens(folder / "t.bin", programs.text_tokens(200_000, 256))
        step = ["--config", config, "--batch", args.batch, "--seq", args.seq]
        if not args.machine:
            succeed_on(args.ranks, [programs.BIN / "llama_plan", *step, "--dp", args.ranks, "--calibrate", machine])
            print(machine.read_text())
        print("| flags | planned | measured | ratio |\n|---|---|---|---|")
        for dp in (dp for dp in range(args.ranks, 0, -1) if args.ranks % dp == 0):
            for ac in args.ac:
                flags = ["--dp", dp, "--tp", args.ranks // dp, "--ac", ac]
                plan = estimated([*step, *flags], machine, folder)
                real = measured([*step, *flags], args.ranks, tokens, args.rounds, folder)
                print(f"| `{' '.join(map(str, flags))}` | {plan:.3f} s | {real:.3f} s | {plan / real:.2f} |", flush=True)


if __name__ == "__main__":
    main()
