#!/usr/bin/env python3
"""llama_plan's step time beside the measured one, on this CPU.

First it measures this machine with as many processes as there are ranks, one thread each, at the same
time: products (PyTorch's fp32 GEMM), attention, additions of large tensors, and collectives (bench_comm);
and writes these as a machine file. Then it plans and runs llama_train for each mesh and kind of checkpointing, and
prints the median step of both and the error of the estimate.

  benchmarks/bench_plan.py [--hidden 512 --layers 4 --batch 8 --seq 256 --ranks 2 --rounds 5] [--machine FILE.toml]
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "examples"))
import programs  # noqa: E402

WARM_UP = 2
# As in a step, a product finds its matrices in memory, not in a cache, and an operator's result is a new tensor.
RATES = """
import sys, time, torch
torch.set_num_threads(1)
hidden, seq = int(sys.argv[1]), int(sys.argv[2])
def rate(work, calls):
    times = []
    while len(times) < 3 or sum(times) < 2:
        start = time.perf_counter()
        for call in calls: call()
        times.append(time.perf_counter() - start)
    return work / sorted(times)[len(times) // 2]
def products(i):
    x, w, g = torch.randn(1024, hidden), torch.randn(3 * hidden, hidden), torch.randn(1024, 3 * hidden)
    return [lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x]
calls = [call for i in range(8) for call in products(i)]
large, other = torch.zeros(1 << 22), torch.ones(1 << 22)
q, k, v, g = (torch.randn(4, 8, seq, hidden // 8, requires_grad=i < 3) for i in range(4))
def attend():
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(y, (q, k, v), g)
print(rate(2 * 1024 * hidden * 3 * hidden * len(calls), calls),
      rate(3.5 * 2 * 4 * 8 * seq * seq * (hidden // 8), [attend]),
      rate(3 * large.nbytes, [lambda: large + other]))
"""


def rates(ranks, hidden, seq):
    """FLOP/s of products and of attention, and bytes a second of other operators, of the slowest of processes at the
    same time."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    processes = [subprocess.Popen([sys.executable, "-c", RATES, str(hidden), str(seq)], stdout=subprocess.PIPE,
                                  text=True, env=environment) for _ in range(ranks)]
    figures = [[float(word) for word in process.communicate()[0].split()] for process in processes]
    return [min(column) for column in zip(*figures)]


def links(ranks):
    """Bytes a second of a ring, and seconds of the smallest collective."""
    text = programs.succeed(programs.on_ranks(ranks, [programs.BIN / "bench_comm"])).stdout
    rows = [(kind, int(size), float(us)) for kind, size, us in
            re.findall(r"(?m)^(all_gather|reduce_scatter) +(\d+) +([\d.]+)", text)]
    most, least = max(row[1] for row in rows), min(row[1] for row in rows)
    seconds = statistics.mean(us for _, size, us in rows if size == most) * 1e-6
    return most * (ranks - 1) / ranks / seconds, statistics.mean(us for _, size, us in rows if size == least) * 1e-6


def write_machine(path, ranks, hidden, seq):
    flops, attention, memory = rates(ranks, hidden, seq)
    link, latency = links(ranks) if ranks > 1 else (1e9, 0.0)
    path.write_text(f'name = "this CPU, {ranks} ranks"\nmemory_bytes = 1e15\nreserved_bytes = 0\n'
                    f"flops_half = {flops:e}\nflops_fp32 = {flops:e}\nproduct_share = 1\n"
                    f"attention_share = {attention / flops:f}\n"
                    f"memory_bandwidth = {memory:e}\nmemory_share = 1\noperator_latency_s = 5e-6\n"
                    f"ranks_per_node = {ranks}\nlink_bandwidth = {link:e}\nnetwork_bandwidth = {link:e}\n"
                    f"network_share = 1\nlink_latency_s = {latency:e}\nnetwork_latency_s = {latency:e}\n")


def estimated(arguments, machine, folder):
    plan = folder / "plan.json"
    programs.succeed([programs.BIN / "llama_plan", *arguments, "--device", "cpu", "--gpu", machine, "--json", plan])
    return json.loads(plan.read_text())["step_time_s"]


def measured(arguments, ranks, tokens, rounds, folder):
    metrics = folder / "m.jsonl"
    metrics.unlink(missing_ok=True)
    programs.succeed(programs.on_ranks(ranks, [programs.BIN / "llama_train", *arguments, "--tokens", tokens, "--metrics",
                                               metrics, "--steps", WARM_UP + rounds]),
                     env=dict(os.environ, OMP_NUM_THREADS="1"))
    return statistics.median(row["step_time_s"] for row in programs.read_metrics(metrics)[WARM_UP:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 4), ("batch", 8), ("seq", 256), ("ranks", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--machine", type=pathlib.Path, help="an earlier machine file, in place of measuring")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        machine = args.machine or folder / "machine.toml"
        if not args.machine:
            write_machine(machine, args.ranks, args.hidden, args.seq)
            print(machine.read_text())
        config = programs.write_config(folder, programs.SMALL | {
            "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers,
            "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": args.seq})
        tokens = programs.write_tokens(folder / "t.bin", programs.text_tokens(200_000, 256))
        print("| flags | planned | measured | error |\n|---|---|---|---|")
        for dp in sorted({1, args.ranks}):
            for ac in ("none", "selective", "full"):
                flags = ["--dp", dp, "--tp", args.ranks // dp, "--ac", ac]
                common = ["--config", config, "--batch", args.batch, "--seq", args.seq, *flags]
                plan = estimated(common, machine, folder)
                real = measured(common, args.ranks, tokens, args.rounds, folder)
                print(f"| `{' '.join(map(str, flags))}` | {plan:.3f} s | {real:.3f} s | {100 * (plan / real - 1):+.0f} % |",
                      flush=True)


if __name__ == "__main__":
    main()
