#!/usr/bin/env python3
"""Converts a checkpoint of torch.distributed.checkpoint (.metadata, .distcp) to safetensors.

    from_torch_checkpoint.py CHECKPOINT OUT [--prefix FROM=TO ...] [--step]

Needs PyTorch, and memory for the largest tensor. Writes OUT/model.safetensors, which
checkpoint::load_hugging_face reads. With --step, writes shards that checkpoint::load reads, including
the optimizer's state. --prefix selects the tensors whose names begin with FROM, and replaces FROM by
TO. Names are the keys of the saved state dict joined by dots. For {"model": ..., "optim": ...}, pass
  --prefix model.=                                       for the weights
  --step --prefix model.= --prefix optim.=optimizer.     for a step
Values that are not tensors are left out and listed.

CHECKPOINT's .metadata is a pickle, which can run any code: convert only your own checkpoints.
"""
import argparse
import json
import os
import struct
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Types by their names in safetensors. Older versions of PyTorch lack some of the types.
DTYPES = {getattr(torch, name): text for name, text in (
    ("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16"), ("complex64", "C64"),
    ("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8"), ("bool", "BOOL"),
    ("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"), ("uint8", "U8"),
    ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("float8_e8m0fnu", "F8_E8M0"),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ"), ("float8_e5m2fnuz", "F8_E5M2FNUZ")) if hasattr(torch, name)}


def renamed(name, prefixes):
    """Returns the new name of a tensor, or None if the tensor is left out."""
    for old, new in prefixes:
        if name.startswith(old):
            return new + name[len(old):]
    return None if prefixes else name


def chosen(described, prefixes):
    """Returns {name in the file: name in the checkpoint}, sorted, and the names that are left out."""
    names, left_out = {}, []
    for name, each in sorted(described.items()):
        new = renamed(name, prefixes)
        if not isinstance(each, TensorStorageMetadata) or new is None:
            left_out.append(name)
            continue
        if not new or new in names:
            sys.exit(f"error: --prefix renames '{name}' to " + (f"'{new}', the new name of '{names[new]}'" if new else "''") + "; correct --prefix")
        if each.properties.dtype not in DTYPES:
            sys.exit(f"error: '{name}' is of type {each.properties.dtype}, which safetensors does not support")
        names[new] = name
    if not names:
        sys.exit(f"error: no tensor is left of {len(described)} entries (the first is "
                 f"'{min(described, default='')}'); correct --prefix")
    return dict(sorted(names.items())), left_out


def header_of(described, names, is_step):
    header, begin = {}, 0
    if is_step:
        offsets = {new: {"saved_offsets": [0] * len(described[name].size)} for new, name in names.items()}
        header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(offsets)}
    for new, name in names.items():
        each = described[name]
        end = begin + each.size.numel() * each.properties.dtype.itemsize
        header[new] = {"dtype": DTYPES[each.properties.dtype], "shape": list(each.size),
                       "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def read(reader_of, described, name):
    tensor = torch.empty(described.size, dtype=described.properties.dtype)
    dcp.load({name: tensor}, storage_reader=reader_of(), no_dist=True)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def convert(checkpoint, out, prefixes, is_step):
    def reader_of():
        return dcp.FileSystemReader(checkpoint)

    described = reader_of().read_metadata().state_dict_metadata
    names, left_out = chosen(described, prefixes)
    os.makedirs(out, exist_ok=True)
    target = os.path.join(out, "shard-00001-model-00001-of-00001.safetensors" if is_step else "model.safetensors")
    if os.path.exists(target):
        sys.exit(f"error: '{target}' already exists; pass another folder")
    header = header_of(described, names, is_step)
    try:
        with open(target + ".part", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for name in names.values():
                file.write(read(reader_of, described[name], name))
            file.flush()
            os.fsync(file.fileno())
        os.replace(target + ".part", target)
    finally:
        if os.path.exists(target + ".part"):
            os.remove(target + ".part")
    print(f"{target}: {len(names)} tensors")
    if left_out:
        print(f"left out: {len(left_out)} ({', '.join(left_out[:5])}{', ...' if len(left_out) > 5 else ''})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--prefix", action="append", default=[], metavar="FROM=TO")
    parser.add_argument("--step", action="store_true")
    arguments = parser.parse_args()
    if not os.path.exists(os.path.join(arguments.checkpoint, ".metadata")):
        sys.exit(f"error: '{arguments.checkpoint}' has no .metadata; pass the folder that dcp.save wrote")
    wrong = [prefix for prefix in arguments.prefix if "=" not in prefix]
    if wrong:
        sys.exit(f"error: --prefix {wrong[0]} has no '='; pass FROM=TO, such as 'model.=' to remove 'model.'")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    prefixes = [prefix.split("=", 1) for prefix in arguments.prefix]
    try:
        convert(arguments.checkpoint, arguments.out, prefixes, arguments.step)
    except (Exception, CheckpointException) as error:
        reason = str(error).strip().split("\n")[-1]
        sys.exit(f"error: '{arguments.checkpoint}' can't be converted to '{arguments.out}': {type(error).__name__}: "
                 f"{reason}; check both folders, and copy a damaged checkpoint again")


if __name__ == "__main__":
    main()
