"""PyTorch's operator database through torch.ops.tessera, on several ranks of this machine.

Every sample input of every operator is distributed in several placements; values and gradients are
compared with the plain operator's on one rank.

  operator_database.py --library build/lib/libtessera_torch.so [--nproc 4] [--mesh 2x2]
      [--samples 6] [--placements 3] [--every 1] [--only NAME,...] [--report FILE]

An operator counts as right if every sample in every placement is; refused if one raises an error on
all ranks alike; wrong if a value differs; hung if a rank does not come back. Exit code 1 for a wrong
or hung one. --every N takes each N-th operator: a fixed sample.
"""

import argparse
import collections
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

PATIENCE_S = 120


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--placements", type=int, default=3)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--report", default="")
    parser.add_argument("--worker-log", default="")
    return parser.parse_args()


# ---- one rank -----------------------------------------------------------------------------------


class Worker:
    def __init__(self, options):
        import torch
        from torch.utils._pytree import tree_flatten, tree_map

        self.torch, self.tree_map, self.tree_flatten = torch, tree_map, tree_flatten
        torch.set_num_threads(1)
        torch.ops.load_library(options.library)
        self.ops = torch.ops.tessera
        self.options = options
        self.shape = [int(size) for size in options.mesh.split("x")]
        names = [f"d{i}" for i in range(len(self.shape))]
        self.mesh = self.ops.init_device_mesh("cpu", self.shape, names)
        # Composite operators make plain tensors of their own, equal on all ranks.
        self.ops.set_replication(True)
        self.log = open(options.worker_log, "a")

    def write(self, **record):
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()

    def tensors(self, tree):
        return [x for x in self.tree_flatten(tree)[0] if isinstance(x, self.torch.Tensor)]

    def map(self, function, tree):
        return self.tree_map(lambda x: function(x) if isinstance(x, self.torch.Tensor) else x, tree)

    def placements(self, ndim, number):
        rest = len(self.shape) - 1
        choices = [["Replicate()"] * (rest + 1)]
        for dim in range(min(ndim, 2)):
            choices.append([f"Shard({dim})"] + ["Replicate()"] * rest)
        if ndim and rest:
            choices.append(["Shard(0)"] + [f"Shard({min(1, ndim - 1)})"] * rest)
            choices.append(["Replicate()"] * rest + [f"Shard({ndim - 1})"])
        return choices[number % len(choices)]

    def distribute(self, tensor, number):
        placements = self.placements(tensor.dim(), number)
        result = self.ops.distribute_tensor(tensor.detach().clone(), self.mesh, placements).detach()
        return result.requires_grad_() if tensor.requires_grad else result

    def copy(self, tensor):
        result = tensor.detach().clone()
        return result.requires_grad_() if tensor.requires_grad else result

    def whole(self, tensor):
        tensor = tensor.detach()
        return self.ops.full_tensor(tensor) if self.ops.is_distributed(tensor) else tensor

    def run(self, op, args, kwargs):
        self.torch.manual_seed(0)
        result = op.op(*args, **kwargs)
        inputs = [x for x in self.tensors((args, kwargs)) if x.requires_grad]
        outputs = [x for x in self.tensors(result) if x.requires_grad]
        gradients = []
        if inputs and outputs:
            sums = [x.abs().sum() if x.is_complex() else x.sum() for x in outputs]
            gradients = self.torch.autograd.grad(sums, inputs, allow_unused=True)
        return self.tensors(result), list(gradients)

    def difference(self, found, expected):
        found, expected = self.whole(found), expected.detach()
        if found.shape != expected.shape:
            return f"sizes {list(found.shape)} instead of {list(expected.shape)}"
        if found.dtype != expected.dtype:
            return f"type {found.dtype} instead of {expected.dtype}"
        if self.torch.allclose(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True):
            return ""
        return f"values differ by {(found.double() - expected.double()).abs().max():g}" \
            if not found.is_complex() else "values differ"

    def compare(self, found, expected):
        if len(found) != len(expected):
            return f"{len(found)} tensors instead of {len(expected)}"
        for ours, theirs in zip(found, expected):
            if ours is None or theirs is None:
                other = theirs if ours is None else ours
                if other is not None and self.whole(other).abs().max() > 0:
                    return "a gradient is missing"
                continue
            message = self.difference(ours, theirs)
            if message:
                return message
        return ""

    def check(self, op, sample, number):
        """(status, message) of one sample in one placement."""
        torch = self.torch
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        plain_args, plain_kwargs = self.map(self.copy, (args, kwargs))
        try:
            expected, expected_gradients = self.run(op, plain_args, plain_kwargs)
        except Exception as error:  # not a sample that the plain operator takes
            return "skipped", str(error)[:100]
        everything = self.tensors((plain_args, plain_kwargs)) + expected
        if any(x.layout != torch.strided for x in everything):
            return "skipped", "not strided"
        if any(x.dtype.itemsize == 1 and x.dtype.is_floating_point for x in everything):
            return "skipped", "8-bit floating point"
        if not self.tensors((args, kwargs)):
            return "skipped", "no tensor"
        try:
            ours, our_kwargs = self.map(lambda x: self.distribute(x, number), (args, kwargs))
            found, gradients = self.run(op, ours, our_kwargs)
        except Exception as error:
            return "refused", f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        if op.name in ("empty_like", "new_empty", "new_empty_strided", "empty_strided"):
            found, expected = [x * 0 for x in found], [x * 0 for x in expected]
            found = [self.whole(x).nan_to_num() for x in found]
            expected = [x.nan_to_num() for x in expected]
        message = self.compare(found, expected)
        if message:
            return "wrong", message
        message = self.compare(gradients, expected_gradients)
        return ("wrong", "gradient: " + message) if message else ("right", "")

    def samples(self, op):
        torch = self.torch
        types = op.supported_dtypes("cpu")
        preferred = [t for t in (torch.float32, torch.int64) if t in types]
        dtype = preferred[0] if preferred else sorted(types, key=str)[0]
        differentiable = op.supports_autograd and dtype.is_floating_point
        found = [s for _, s in zip(range(4 * self.options.samples),
                                   op.sample_inputs("cpu", dtype, requires_grad=differentiable))]
        step = max(1, len(found) // self.options.samples)
        return found[::step][: self.options.samples]

    def check_operator(self, index, op):
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        self.write(begin=index, name=name)
        counts, first = collections.Counter(), {}
        try:
            samples = self.samples(op) if op.supported_dtypes("cpu") else []
        except Exception as error:
            samples, first["skipped"] = [], str(error)[:100]
        for s, sample in enumerate(samples):
            for p in range(self.options.placements):
                status, message = self.check(op, sample, p + s)
                counts[status] += 1
                first.setdefault(status, f"sample {s}, placement {p + s}: {message}")
        order = ("wrong", "refused", "right", "skipped")
        status = next((x for x in order if counts[x]), "skipped")
        self.write(index=index, name=name, status=status, counts=counts, message=first.get(status, ""))

    def main(self):
        import warnings

        from torch.testing._internal.common_methods_invocations import op_db

        warnings.filterwarnings("ignore")
        only = set(filter(None, self.options.only.split(",")))
        for index, op in enumerate(op_db):
            skipped = index < self.options.start or index % self.options.every != 0
            if not skipped and (not only or op.name in only):
                self.check_operator(index, op)
        self.write(done=True)


# ---- the parent: starts the ranks, watches for hangs ---------------------------------------------


def start_ranks(options, start, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(options.nproc):
        environment = dict(
            os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.nproc),
            LOCAL_WORLD_SIZE=str(options.nproc), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            OMP_NUM_THREADS="1", TESSERA_TIMEOUT_S="20", TORCH_FR_BUFFER_SIZE="0")
        command = [sys.executable, __file__, "--library", options.library, "--mesh", options.mesh,
                   "--samples", str(options.samples), "--placements", str(options.placements),
                   "--every", str(options.every), "--only", options.only, "--start", str(start),
                   "--worker-log", str(folder / f"rank{rank}.jsonl")]
        error = open(folder / f"rank{rank}.err", "w")
        ranks.append(subprocess.Popen(command, env=environment, stdout=error, stderr=error))
    return ranks


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def watch(ranks, log):
    """Until all ranks have ended, one has died, or rank 0 makes no progress."""
    size, since = -1, time.monotonic()
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.2)
        now = log.stat().st_size if log.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        died = any(rank.poll() not in (None, 0) for rank in ranks)
        if died or time.monotonic() - since > PATIENCE_S:
            break
    for rank in ranks:
        rank.kill()
        rank.wait()


def run(options, folder):
    log, start, hung = folder / "rank0.jsonl", options.start, []
    while True:
        watch(start_ranks(options, start, folder), log)
        records = read_log(log)
        if records and records[-1].get("done"):
            return records, [read_log(path) for path in sorted(folder.glob("rank*.jsonl"))], hung
        begun = [r for r in records if "begin" in r]
        if not begun or begun[-1]["begin"] < start:
            sys.exit(f"the ranks did not start:\n{(folder / 'rank0.err').read_text()[-2000:]}")
        hung.append(begun[-1]["name"])
        start = begun[-1]["begin"] + 1


def main():
    options = arguments()
    if options.worker_log:
        Worker(options).main()
        return
    options.library = str(pathlib.Path(options.library).resolve())
    with tempfile.TemporaryDirectory() as folder:
        records, logs, hung = run(options, pathlib.Path(folder))
    results = [r for r in records if "status" in r]
    counts = collections.Counter(r["status"] for r in results)
    others = [{r["index"]: r for r in log if "status" in r} for log in logs[1:]]
    for record in results:
        if record["status"] in ("wrong", "refused"):
            print(f"{record['status']:8} {record['name']:40} {record['message']}")
        for rank, other in enumerate(others, 1):
            found = other.get(record["index"], {"status": "nothing", "message": ""})
            if found["status"] != record["status"] or found["message"] != record["message"]:
                print(f"         on rank {rank} {found['status']}: {found['message']}")
    for name in hung:
        print(f"hung     {name}")
    print(f"{counts['right']} right, {counts['wrong']} wrong, {counts['refused']} refused, "
          f"{len(hung)} hung, {counts['skipped']} skipped")
    if options.report:
        pathlib.Path(options.report).write_text(json.dumps(results, indent=1))
    sys.exit(1 if counts["wrong"] or hung else 0)


if __name__ == "__main__":
    main()
