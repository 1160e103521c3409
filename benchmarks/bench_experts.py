#!/usr/bin/env python3
"""Compares training steps of a small Mixtral on 2 ranks: llama_train with --ep 2 and with --dp 2, and the Mixtral of
`transformers` under PyTorch's FSDP2 on Gloo (peer/torch_mixtral.py). All three start from the same weights and take the same tokens.
In each round the three run in turns; the result of a run is the median time of its steps. The losses of the first step must be equal
within 1e-4.
  benchmarks/bench_experts.py [--rounds 5] [--out benchmarks/results/experts.json]
"""
import argparse
import pathlib
import statistics
import sys
import tempfile

import bench_step
import results
from bench_step import programs

WORLD = 2
MODEL = {"model_type": "mixtral", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
         "max_position_embeddings": 256, "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": None}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("seq", 256), ("steps", 8), ("rounds", 5)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--out", type=pathlib.Path, help="writes the raw results of each round")
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        programs.make_architecture(folder / "model", MODEL)
        tokens = programs.write_tokens(folder / "t.bin", programs.text_tokens(args.steps * args.batch * args.seq + 1, MODEL["vocab_size"]))
        metrics = folder / "metrics.jsonl"
        common = ["--model", folder / "model", "--tokens", tokens, "--steps", args.steps, "--batch", args.batch, "--seq", args.seq]
        sides = {"ep": bench_step.ours(f"--ep {WORLD}", common, metrics, WORLD), "dp": bench_step.ours(f"--dp {WORLD}", common, metrics, WORLD),
                 "transformers": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", WORLD,
                                  programs.PEER.with_name("torch_mixtral.py"), "train", "--metrics", metrics, *common, "--dp", WORLD]}
        for i in range(args.rounds):
            rounds.append({})
            for side, command in sides.items():
                rows, peak = bench_step.run(command, metrics)
                seconds = statistics.median(row["step_time_s"] for row in rows[bench_step.WARM_UP:])
                rounds[-1] |= {f"{side}_s": seconds, f"{side}_peak_bytes": peak, f"{side}_loss": [rows[0]["loss"], rows[-1]["loss"]]}
                print(f"round {i + 1}: {side:12} {seconds * 1e3:8.1f} ms {peak / 2**20:6.0f} MiB   loss {rows[0]['loss']:.6f}, "
                      f"{rows[-1]['loss']:.6f}", flush=True)
            losses = [rounds[-1][f"{side}_loss"][0] for side in sides]
            if max(losses) - min(losses) > 1e-4:
                raise SystemExit(f"the losses of the first step differ: {losses}")
    for side in ("ep", "dp"):
        ratios = sorted(row["transformers_s"] / row[f"{side}_s"] for row in rounds)
        print(f"transformers / tessera {side} {WORLD}: median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}")
    if args.out:
        results.write(args.out, {"model": MODEL, "rounds": rounds})


if __name__ == "__main__":
    main()
