"""The model of checkpoint_copy in PyTorch, saved and read by torch.distributed.checkpoint.

    torch_checkpoint.py save sharded|consolidated|distcp FOLDER FILE
    torch_checkpoint.py read FOLDER FILE

save: after steps of AdamW on two ranks, by FSDP2; FILE gets the whole tensors. read: those of a
step, or of shards.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

RANKS = 2


class Net(nn.Module):
    """The model of checkpoint_copy; 2 does not divide its sizes."""
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.middle = nn.Linear(5, 7)
        self.head = nn.Linear(5, 11, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden).sum() + self.middle(hidden).square().sum()


def trained_state():
    torch.manual_seed(1)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(3):
        net(torch.arange(step, step + 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(net, optimizer)
    return {**weights, "optimizer": {"state": state["state"]}}


def flat(state, prefix=""):
    """Returns the whole tensors of model and optimizer by their names in a checkpoint."""
    if isinstance(state, dict):
        return {name: tensor for key in state for name, tensor in flat(state[key], f"{prefix}{key}.").items()}
    whole = state.full_tensor() if isinstance(state, DTensor) else state
    return {prefix[:-1]: whole.detach().clone()}


def save(rank, kind, folder, file):
    dist.init_process_group("gloo", init_method=f"file://{file}.store", rank=rank, world_size=RANKS)
    state = trained_state()
    whole = flat(state)
    if kind == "distcp":  # PyTorch's own format, whose files also hold values that are no tensors
        model = {name: state[name] for name in state if name != "optimizer"}
        dcp.save({"model": model, "optim": state["optimizer"], "step": 3}, checkpoint_id=folder)
    else:
        save_by_hugging_face(state, kind, folder)
    if rank == 0:
        save_file(whole, file)
    dist.destroy_process_group()
    # Without this, a thread of libtorch sometimes aborts the process, because it needs the interpreter while that ends.
    os._exit(0)


def save_by_hugging_face(state, kind, folder):
    # PyTorch's consolidation replaces scalars by zeros, such as the step counts of the optimizer.
    kept = state if kind == "sharded" else {name: state[name] for name in state if name != "optimizer"}
    dcp.save(kept, storage_writer=HuggingFaceStorageWriter(
        folder, save_distributed=True, enable_consolidation=kind == "consolidated"))


def read(folder, file):
    described = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.full(each.size, -1, dtype=each.properties.dtype) for name, each in described.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    save_file(state, file)


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    if sys.argv[1] == "save":
        torch.multiprocessing.spawn(save, sys.argv[2:], nprocs=RANKS)
    else:
        read(*sys.argv[2:])
