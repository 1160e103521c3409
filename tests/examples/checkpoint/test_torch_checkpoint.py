"""Sharded checkpoints in both directions between Tessera and torch.distributed.checkpoint."""
import pathlib
import sys
import unittest

import torch
from safetensors.torch import load_file

import programs
from torch_checkpoint import read

SCRIPT = pathlib.Path(__file__).with_name("torch_checkpoint.py")


def torch_checkpoint(*arguments):
    return programs.succeed([sys.executable, SCRIPT, *arguments])


def copy(dp, tp, source, target):
    """Reads onto a mesh and writes from there."""
    return programs.succeed(programs.on_ranks(dp * tp, [programs.BIN / "checkpoint_copy", dp, tp, source, target]))


class TorchCheckpoint(programs.WithSharedFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        torch_checkpoint("save", "sharded", cls.shared / "sharded", cls.shared / "whole.safetensors")
        cls.whole = load_file(cls.shared / "whole.safetensors")

    def expect_equal(self, file, names):
        found = load_file(file)
        self.assertEqual(found.keys(), self.whole.keys())
        for name in names:
            ours, theirs = found[name], self.whole[name]
            self.assertEqual((ours.dtype, ours.shape), (theirs.dtype, theirs.shape), name)
            self.assertEqual(ours.numpy().tobytes(), theirs.numpy().tobytes(), name)

    def test_what_fsdp2_saved_is_loaded(self):
        for mesh in ((2, 2), (3, 1)):
            with self.subTest(mesh=mesh):
                out = self.shared / "out.safetensors"
                copy(*mesh, self.shared / "sharded", out)
                self.expect_equal(out, self.whole)

    def test_torch_reads_what_was_saved_here(self):
        copy(2, 2, self.shared / "whole.safetensors", self.shared / "run")
        torch_checkpoint("read", self.shared / "run" / "step-00000001", self.shared / "read.safetensors")
        self.expect_equal(self.shared / "read.safetensors", self.whole)

    def test_torch_reads_a_llama_of_replicas_and_tensor_parallel_ranks(self):
        run = self.shared / "llama"
        run.mkdir()
        config = programs.write_config(run, programs.SMALL)
        tokens = programs.write_tokens(run / "t.bin", programs.text_tokens(500, 256))
        programs.train(["--config", config, "--tokens", tokens, "--steps", 1, "--batch", 4, "--seq", 8,
                        "--checkpoint", run, "--save-hf", run / "model"], replicas=2, tp=2)
        read(run / "step-00000001", run / "read.safetensors")
        found, weights = load_file(run / "read.safetensors"), load_file(run / "model/model.safetensors")
        for name, weight in weights.items():
            self.assertTrue(torch.equal(found[name], weight), name)
            self.assertTrue(found[f"optimizer.state.{name}.exp_avg"].any(), name)

    def test_what_torch_consolidated_is_a_model(self):
        torch_checkpoint("save", "consolidated", self.shared / "model", self.shared / "same.safetensors")
        copy(2, 2, self.shared / "model", self.shared / "weights.safetensors")
        weights = [name for name in self.whole if not name.startswith("optimizer.")]
        self.expect_equal(self.shared / "weights.safetensors", weights)


if __name__ == "__main__":
    unittest.main()
