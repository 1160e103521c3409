"""What is run: operators of PyTorch's database, their sample inputs, the placements of these."""
import itertools
import random

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

# PyTorch's test_dtensor_ops.py makes sizes even in this way.
EVEN_SIZES = {"L": 24, "M": 12, "S": 4, "XS": 2}
UNEVEN_SIZES = {"L": 20, "M": 10, "S": 5, "XS": 3}

UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                 "new_empty_strided", "resize_", "resize_as_"}
# Made for S = 5 alone.
OUT_OF_BOUNDS = {"_segment_reduce"}
# Their values are compared with those of replicated arguments: the library's numbers are its own.
RANDOM = {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal",
          "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform", "nn.functional.alpha_dropout",
          "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
          "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
          "nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward",
          "nn.functional.rrelu", "nn.functional.scaled_dot_product_attention", "pca_lowrank",
          "svd_lowrank"}


def use_sizes(even):
    for name, size in (EVEN_SIZES if even else UNEVEN_SIZES).items():
        setattr(common_methods_invocations, name, size)


def full_name(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def select(names, every):
    """[(index in the database, full name)]; `names` are full names, or those without a variant."""
    chosen = [(i, full_name(op)) for i, op in enumerate(op_db)
              if not names or full_name(op) in names or op.name in names]
    return chosen[::every]


def sample_type(op):
    types = op.supported_dtypes("cpu")
    preferred = [t for t in (torch.float32, torch.int64) if t in types]
    return preferred[0] if preferred else min(types, key=str, default=None)


def variant_of(op, variant):
    """What is called; None where the operator has no such variant."""
    special = {"inplace": op.get_inplace(), "out": op.op if op.supports_out else None}
    return special.get(variant, op.op)


def with_out(op, sample):
    """The sample with out= tensors of the sizes of its result."""
    result = op.op(sample.input, *sample.args, **sample.kwargs)
    empty = map_tensors(torch.zeros_like, result)
    out = empty if isinstance(empty, torch.Tensor) else tuple(empty)
    return SampleInput(sample.input, args=sample.args, kwargs={**sample.kwargs, "out": out})


def samples(op, limit, variant):
    """At most `limit` sample inputs, spread over the first ones that the database makes."""
    dtype = sample_type(op)
    if dtype is None:
        return []
    differentiable = op.supports_autograd and dtype.is_floating_point and variant in ("function", "double")
    torch.manual_seed(0)
    random.seed(0)
    made = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    found = list(itertools.islice(made, 6 * limit))
    step = max(1, -(-len(found) // limit))
    # Neighbours often differ in a flag alone, and what runs without a gradient may depend on it
    # (return_indices of pooling): an odd step takes both of its values.
    found = found[:: step | 1 if variant == "nograd" else step]
    return [with_out(op, sample) for sample in found] if variant == "out" else found


def map_tensors(function, tree):
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, tree)


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def tensor_choices(tensor, mesh, even, partial):
    """Every placement list of one argument: replicated, sharded or, if asked for, a partial sum, on
    each mesh dimension."""
    per_dim = []
    for ranks in mesh:
        shardable = [d for d, size in enumerate(tensor.shape) if not even or size and size % ranks == 0]
        per_dim.append(["Replicate()"] + [f"Shard({d})" for d in shardable])
        if partial and tensor.dtype != torch.bool:
            per_dim[-1].append("Partial()")
    choices = [list(c) for c in itertools.product(*per_dim)]
    if even and len(mesh) > 1:  # two dimensions that split the same one must both divide it
        choices = [c for c in choices if len(set(c)) == len(c) or c[0] == "Replicate()"]
    return choices


def placements(sample, mesh, even, partial, limit, seed):
    """At most `limit` assignments of placements to the tensor arguments, in the order of
    `tensors(sample)`: all first dimensions sharded, or all partial, then drawn from all combinations."""
    arguments = tensors((sample.input, sample.args, sample.kwargs))
    choices = [tensor_choices(x, mesh, even, partial) for x in arguments]
    draw = random.Random(seed)
    first = [c[min(1, len(c) - 1)] for c in choices] if not partial else [c[-1] for c in choices]
    drawn = [[draw.choice(c) for c in choices] for _ in range(3 * limit)]
    unique = {str(assignment): assignment for assignment in [first, *drawn]}
    return list(unique.values())[:limit]
