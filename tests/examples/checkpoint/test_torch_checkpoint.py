"""Sharded checkpoints in both directions between Tessera and torch.distributed.checkpoint."""
import pathlib
import shutil
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import programs
from torch_checkpoint import read

SCRIPT = pathlib.Path(__file__).with_name("torch_checkpoint.py")
CONVERTER = programs.ROOT / "tools/from_torch_checkpoint.py"


def torch_checkpoint(*arguments):
    return programs.succeed([sys.executable, SCRIPT, *arguments])


def copy(dp, tp, source, target):
    """Runs checkpoint_copy: reads `source` onto a mesh and writes `target`."""
    return programs.succeed(programs.on_ranks(dp * tp, [programs.BIN / "checkpoint_copy", dp, tp, source, target]))


class WithTorchCheckpoint(programs.WithSharedFolder):
    """PyTorch writes a folder of the format `form`, and the whole tensors of the folder to a file."""
    form = None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        torch_checkpoint("save", cls.form, cls.shared / cls.form, cls.shared / "whole.safetensors")
        cls.whole = load_file(cls.shared / "whole.safetensors")
        cls.weights = [name for name in cls.whole if not name.startswith("optimizer.")]

    def expect_equal(self, file, names, beside=()):
        """`beside`: names of what is in the file and may have other values."""
        found = load_file(file)
        self.assertEqual(found.keys(), {*names, *beside})
        for name in names:
            ours, theirs = found[name], self.whole[name]
            self.assertEqual((ours.dtype, ours.shape), (theirs.dtype, theirs.shape), name)
            self.assertEqual(ours.numpy().tobytes(), theirs.numpy().tobytes(), name)


class TorchCheckpoint(WithTorchCheckpoint):
    form = "sharded"

    def test_loads_a_checkpoint_of_fsdp2(self):
        out = self.shared / "out.safetensors"
        copy(3, 1, self.shared / "sharded", out)
        self.expect_equal(out, self.whole)

    def test_torch_reads_tessera_checkpoints(self):
        copy(2, 2, self.shared / "whole.safetensors", self.shared / "run")
        torch_checkpoint("read", self.shared / "run" / "step-00000001", self.shared / "read.safetensors")
        self.expect_equal(self.shared / "read.safetensors", self.whole)

    def test_torch_reads_models_of_any_mesh(self):
        for name, mesh in (("llama3", {"replicas": 2, "tp": 2}), ("mixtral", {"dp": 2, "ep": 2})):
            run = self.shared / name
            run.mkdir()
            config = programs.write_config(run, programs.MODELS[name])
            tokens = programs.write_tokens(run / "t.bin", programs.text_tokens(500, 256))
            programs.train(["--config", config, "--tokens", tokens, "--steps", 1, "--batch", 4, "--seq", 8,
                            "--checkpoint", run, "--save-hf", run / "model"], **mesh)
            read(run / "step-00000001", run / "read.safetensors")
            found, weights = load_file(run / "read.safetensors"), load_file(run / "model/model.safetensors")
            for weight in weights:
                self.assertTrue(torch.equal(found[weight], weights[weight]), weight)
                self.assertTrue(found[f"optimizer.state.{weight}.exp_avg"].any(), weight)

    def test_consolidated_checkpoint_loads_like_a_model(self):
        torch_checkpoint("save", "consolidated", self.shared / "model", self.shared / "same.safetensors")
        copy(2, 2, self.shared / "model", self.shared / "weights.safetensors")
        self.expect_equal(self.shared / "weights.safetensors", self.weights, beside=self.whole)


class TorchsOwnForm(WithTorchCheckpoint):
    """What torch.distributed.checkpoint writes by itself: .metadata and .distcp."""
    form = "distcp"

    def convert(self, out, *arguments):
        return programs.run([sys.executable, CONVERTER, self.shared / "distcp", self.shared / out, *arguments])

    def test_the_error_names_the_converter(self):
        for command in ([programs.BIN / "tessera-ckpt", "info"], [programs.BIN / "checkpoint_copy", 1, 1]):
            with self.subTest(command[0].name):
                done = programs.run([*command, self.shared / "distcp", *([self.shared / "o"] if command[1] == 1 else [])])
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("is a checkpoint of torch.distributed.checkpoint", done.stderr)
                self.assertIn("from_torch_checkpoint.py", done.stderr)

    def test_weights_are_converted_to_a_model(self):
        done = self.convert("model", "--prefix", "model.=")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("left out", done.stdout)
        self.expect_equal(self.shared / "model/model.safetensors", self.weights)

    def test_weights_and_optimizer_are_converted_to_a_step(self):
        done = self.convert("step", "--prefix", "model.=", "--prefix", "optim.=optimizer.", "--step")
        self.assertEqual(done.returncode, 0, done.stderr)
        copy(2, 2, self.shared / "step", self.shared / "out.safetensors")
        self.expect_equal(self.shared / "out.safetensors", self.whole)

    def test_experts_are_converted_to_a_model(self):
        folder = self.shared / "mixtral"
        weights = programs.make_architecture(folder, programs.MODELS["mixtral"]).state_dict()
        (folder / "model.safetensors").unlink()
        dcp.save({"model": weights}, checkpoint_id=self.shared / "experts", no_dist=True)
        programs.succeed([sys.executable, CONVERTER, self.shared / "experts", folder, "--prefix", "model.="])
        programs.train(["--model", folder, "--steps", 0, "--save-hf", self.shared / "saved"], ep=4)
        saved = load_file(self.shared / "saved/model.safetensors")
        self.assertEqual(saved.keys(), weights.keys())
        for name, weight in weights.items():
            self.assertTrue(torch.equal(saved[name], weight), name)

    def test_refusals_are_one_line(self):
        for arguments, part in ((["--prefix", "modle.="], "no tensor is left"),
                                (["--prefix", "model.embed.=", "--prefix", "model.head.="], "to 'weight'")):
            with self.subTest(part):
                done = self.convert("refused", *arguments)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(part, done.stderr.splitlines()[-1])
        done = programs.run([sys.executable, CONVERTER, self.shared, self.shared / "o"])
        self.assertIn("has no .metadata", done.stderr)
        shutil.copytree(self.shared / "distcp", self.shared / "cut")
        (self.shared / "cut/__0_0.distcp").unlink()
        done = programs.run([sys.executable, CONVERTER, self.shared / "cut", self.shared / "none"])
        self.assertIn("__0_0.distcp", done.stderr.splitlines()[-1])
        self.assertNotIn("Traceback", done.stderr)
        self.assertEqual(list((self.shared / "none").iterdir()), [])
