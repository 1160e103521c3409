"""One rank: runs the cases of an operator as the parent asks for them and reports each."""
import math
import os
import random
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import samples

# The first line of an exception of libtorch is followed by one with this; the library's own has none.
LIBTORCH_TRACE = "Exception raised from"


class NotComparable(Exception):
    pass


def describe(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:400]}"


def is_refusal(error):
    return type(error) is RuntimeError and LIBTORCH_TRACE not in str(error)


def copy(tensor):
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def transposed(tensor):
    """The same values, with the first dimension innermost in memory and the last outermost."""
    if tensor.dim() < 2 or tensor.layout != torch.strided:
        return tensor
    value = tensor.detach().transpose(0, -1).contiguous().transpose(0, -1)
    return value.requires_grad_(tensor.requires_grad)


def difference(found, expected, tolerance):
    """Why a gathered result is not the expected one, or nothing."""
    if not isinstance(expected, torch.Tensor):
        close = isinstance(expected, float) and isinstance(found, float) and math.isclose(
            found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return "" if close or found == expected else f"{found} instead of {expected}"
    if not isinstance(found, torch.Tensor):
        return f"{found} instead of a tensor"
    if found.shape != expected.shape:
        return f"sizes {list(found.shape)} instead of {list(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"type {found.dtype} instead of {expected.dtype}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    finite = expected[torch.isfinite(expected)].abs()
    scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
    if torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        return ""
    return f"values differ by {(found - expected).abs().max().item():g}"


class Rank:
    def __init__(self, options):
        self.options = options
        torch.set_num_threads(1)
        self.ops = torch.ops.tessera
        names = [f"d{i}" for i in range(len(options.mesh))]
        self.mesh = self.ops.init_device_mesh("cpu", options.mesh, names)
        # Composite operators make plain tensors, equal on all ranks.
        self.ops.set_replication(True)

    def distribute(self, tensor, placements):
        value = tensor.detach().clone()
        if self.options.transposed and value.dim() > 1:
            last = value.dim() - 1
            swap = {"Shard(0)": f"Shard({last})", f"Shard({last})": "Shard(0)"}
            turned = value.transpose(0, last).contiguous()
            turned = self.ops.distribute_tensor(turned, self.mesh, [swap.get(p, p) for p in placements])
            result = turned.transpose(0, last).detach()
        else:
            result = self.ops.distribute_tensor(value, self.mesh, placements).detach()
        return result.requires_grad_(tensor.requires_grad)

    def full_value(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        value = self.ops.full_tensor(value) if self.ops.is_distributed(value) else value
        return value.resolve_conj().resolve_neg()

    def loss(self, outputs):
        """A weighted sum, so that no gradient is that of a constant."""
        total = 0
        for x in outputs:
            weight = torch.cos(torch.arange(x.numel(), dtype=torch.float32)).reshape(x.shape) + 0.5
            weight = self.distribute(weight, ["Replicate()"] * len(self.options.mesh)) \
                if self.ops.is_distributed(x) else weight
            total = total + ((x.abs() if x.is_complex() else x) * weight).sum()
        return total

    def forward_backward(self, op, sample, args, kwargs):
        """(results, gradients, the stage of an error, the error)."""
        torch.manual_seed(0)
        random.seed(0)
        self.ops.manual_seed(0)
        results, gradients, stage = [], [], "forward"
        try:
            result = samples.variant_of(op, self.options.variant)(*args, **kwargs)
            written = {"inplace": args[0], "out": kwargs.get("out")}.get(self.options.variant, [])
            results = tree_leaves((result, written))
            stage = "backward"
            inputs = [x for x in samples.tensors((args, kwargs)) if x.requires_grad]
            process = sample.output_process_fn_grad or (lambda x: x)
            outputs = [x for x in samples.tensors(process(result)) if x.requires_grad] if inputs else []
            twice = self.options.variant == "double" and op.supports_gradgrad
            if outputs:
                gradients = torch.autograd.grad(self.loss(outputs), inputs, allow_unused=True, create_graph=twice)
            again = [x for x in gradients if twice and x is not None and x.requires_grad]
            if again:
                gradients += torch.autograd.grad(self.loss(again), inputs, allow_unused=True)
        except Exception as error:
            return results, gradients, stage, error
        return results, gradients, stage, None

    def reference(self, op, sample, arguments):
        """What a single device gives; a random operator: the library with replicated arguments."""
        args, kwargs = samples.map_tensors(copy, arguments)
        results, gradients, stage, error = self.forward_backward(op, sample, args, kwargs)
        if error and stage == "forward":
            raise NotComparable("fails on plain tensors: " + describe(error))
        everything = samples.tensors((arguments, results))
        if not samples.tensors(arguments):
            raise NotComparable("takes no tensor")
        if any(x.layout != torch.strided for x in everything):
            raise NotComparable("sparse or nested tensors")
        if any(x.dtype.itemsize == 1 and x.dtype.is_floating_point for x in everything):
            raise NotComparable("8-bit floating point")
        if op.name not in samples.RANDOM:
            return results, gradients, error
        replicated = ["Replicate()"] * len(self.options.mesh)
        args, kwargs = samples.map_tensors(lambda x: self.distribute(x, replicated), arguments)
        results, gradients, _, error = self.forward_backward(op, sample, args, kwargs)
        if error:
            raise error
        return [self.full_value(x) for x in results], [self.full_value(x) for x in gradients], None

    def compare(self, found, expected):
        tolerance = 1e-3 if self.options.variant == "double" else 1e-4
        if len(found) != len(expected):
            return f"{len(found)} results instead of {len(expected)}"
        for ours, theirs in zip(found, expected):
            if ours is None and theirs is None:
                continue
            if ours is None or theirs is None:
                if (theirs if ours is None else ours).abs().max() > 0:
                    return "a gradient is missing"
                continue
            message = difference(ours, self.full_value(theirs), tolerance)
            if message:
                return message
        return ""

    def check(self, op, sample, assignment):
        """(class, message) of one sample in one assignment of placements."""
        arguments = ((sample.input, *sample.args), dict(sample.kwargs))
        try:
            if self.options.transposed:
                arguments = samples.map_tensors(transposed, arguments)
            expected, expected_gradients, reference_error = self.reference(op, sample, arguments)
            given = iter(assignment)
            args, kwargs = samples.map_tensors(lambda x: self.distribute(x, next(given)), arguments)
        except NotComparable as reason:
            return "not comparable", str(reason)
        except Exception as error:
            return ("refused" if is_refusal(error) else "error"), describe(error)
        found, gradients, stage, error = self.forward_backward(op, sample, args, kwargs)
        if error and not (reference_error and stage == "backward"):
            return ("refused" if is_refusal(error) else "error"), f"{stage}: {describe(error)}"
        if op.name in samples.UNINITIALISED:
            sizes = [list(x.shape) for x in found] == [list(x.shape) for x in expected]
            return ("right", "") if sizes else ("wrong", "other sizes")
        # Gathering is collective: all of it comes before a comparison that may differ by rank.
        found = [self.full_value(x) for x in found]
        gradients = [self.full_value(x) for x in gradients]
        message = self.compare(found, expected)
        if not message and not reference_error:
            message = self.compare(gradients, expected_gradients)
            message = "gradient: " + message if message else ""
        return ("wrong", message) if message else ("right", "")

    def check_operator(self, index, channel):
        op = op_db[index]
        try:
            if self.options.even and op.name in samples.OUT_OF_BOUNDS:
                raise NotComparable("its samples read past the end of even sizes")
            if samples.variant_of(op, self.options.variant) is None:
                raise NotComparable("has no such variant")
            made = samples.samples(op, self.options.samples, self.options.variant)
        except Exception as error:
            made = []
            channel.send(("not comparable", "no samples: " + describe(error), ""))
            channel.recv()
        for s, sample in enumerate(made):
            seed = f"{samples.full_name(op)}/{s}"
            for assignment in samples.placements(sample, self.options.mesh, self.options.even,
                                                 self.options.partial, self.options.placements, seed):
                try:
                    with torch.inference_mode(self.options.variant == "inference"):
                        status, message = self.check(op, sample, assignment)
                except Exception as error:
                    status, message = "error", "comparison: " + describe(error)
                channel.send((status, message, f"sample {s}, {assignment}"))
                channel.recv()  # the ranks continue together
                if status == "not comparable":
                    break
        channel.send(None)


def main(rank, port, options, channel):
    output = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks),
        LOCAL_WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TESSERA_TIMEOUT="15")
    warnings.filterwarnings("ignore")
    worker = Rank(options)
    channel.send("ready")
    while (index := channel.recv()) is not None:
        worker.check_operator(index, channel)
