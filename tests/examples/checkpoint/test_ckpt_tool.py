"""tessera-ckpt: exports that transformers loads, differences by exit code, bounded memory."""
import pathlib
import sys
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import programs

MIB = 1 << 20
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen."
# A separate process: a child's peak is at least that of the process which starts it.
PEAK = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"""


def ckpt(*arguments):
    return programs.run([programs.BIN / "tessera-ckpt", *arguments])


def save_shards(folder, state):
    """As torch.distributed.checkpoint leaves them."""
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True), no_dist=True)
    return folder


class CheckpointTool(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def test_export_is_loaded_by_transformers(self):
        import transformers
        model = programs.make_model(self.folder, programs.SMALL)
        weights = load_file(model / "model.safetensors")
        step = save_shards(self.folder / "step", weights | {"optimizer.state.x.step": torch.ones(())})
        out = self.folder / "out"
        done = ckpt("export-hf", step, out, "--config", model / "config.json", "--dtype", "bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
        for name, tensor in weights.items():
            self.assertTrue(torch.equal(loaded[name], tensor.bfloat16()), name)

    def test_exports_have_the_tokenizer_of_the_model(self):
        import tokenizers
        import transformers
        model = programs.make_model(self.folder, programs.SMALL)
        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator([TEXT] * 9, vocab_size=256, special_tokens=["<s>", "</s>"], show_progress=False)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>")
        tokenizer.save_pretrained(model)
        (model / "generation_config.json").write_text('{"eos_token_id": 1}')
        step = save_shards(self.folder / "step", load_file(model / "model.safetensors"))
        done = ckpt("export-hf", step, self.folder / "exported", "--model", model)
        self.assertEqual(done.returncode, 0, done.stderr)
        programs.train(["--model", model, "--steps", 0, "--save-hf", self.folder / "saved"])
        other = self.folder / "other.model"  # whose content says what it is
        other.write_text((model / "tokenizer.json").read_text())
        config = programs.write_config(self.folder, programs.SMALL)
        programs.train(["--config", config, "--tokenizer", other, "--steps", 0, "--save-hf", self.folder / "new",
                        "--save-hf-dtype", "bf16"])
        self.assertTrue((self.folder / "new/tokenizer.json").exists())
        # The configuration that it was trained by says no type.
        self.assertEqual(transformers.AutoConfig.from_pretrained(self.folder / "new").dtype, torch.bfloat16)
        self.assertEqual({tensor.dtype for tensor in load_file(self.folder / "new/model.safetensors").values()},
                         {torch.bfloat16})
        # One tokenizer, the model's generation_config.json, and no other file of the model's.
        (self.folder / "alone").mkdir()
        alone = other.rename(self.folder / "alone/tokenizer.json")
        programs.train(["--model", model, "--tokenizer", alone, "--steps", 0, "--save-hf", self.folder / "mixed"])
        self.assertEqual({file.name for file in (self.folder / "mixed").iterdir()},
                         {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"})
        for name in ("exported", "saved"):
            out = self.folder / name
            loaded = transformers.AutoTokenizer.from_pretrained(out)
            self.assertEqual(loaded(TEXT)["input_ids"], tokenizer(TEXT)["input_ids"])
            self.assertEqual(loaded.eos_token, "</s>")
            self.assertTrue((out / "generation_config.json").exists())
        done = ckpt("export-hf", step, model, "--model", model)
        self.assertEqual(done.returncode, 2)
        self.assertIn("would replace the weights of --model, which is the same folder", done.stderr)
        (self.folder / "steps/step-00000003").mkdir(parents=True)
        for checkpoint in (step, self.folder / "steps"):
            done = ckpt("export-hf", step, checkpoint, "--model", model)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"export-hf to '{checkpoint}' would write into a checkpoint", done.stderr)
        # Again, but not with another tokenizer.
        self.assertEqual(ckpt("export-hf", step, self.folder / "exported", "--model", model).returncode, 0)
        (model / "tokenizer_config.json").write_text("{}")
        done = ckpt("export-hf", step, self.folder / "exported", "--model", model)
        self.assertEqual(done.returncode, 2)
        self.assertIn("has another tokenizer_config.json than", done.stderr)

    def test_bad_arguments_are_one_line(self):
        step = save_shards(self.folder / "step", {"w": torch.ones(3)})
        for arguments, error in (((step, self.folder / "out", "--config", self.folder / "none"), "none"),
                                 ((self.folder, self.folder / "out", "--config", __file__), "no checkpoint in"),
                                 ((step, self.folder / "out"), "pass --config FILE, or --model DIR"),
                                 ((step, self.folder / "out", "--config", __file__, "--model", self.folder),
                                  "--config and --model are both given"),
                                 ((step, self.folder / "out", "--config", __file__), "not a JSON object")):
            done = ckpt("export-hf", *arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(error, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertFalse((self.folder / "out").exists())
        done = ckpt("verfy", step)
        self.assertEqual(done.returncode, 2)
        self.assertIn("unknown subcommand 'verfy'; did you mean verify?", done.stderr)

    def test_a_limit_of_file_sizes_is_a_line(self):
        step = save_shards(self.folder / "step", {"w": torch.ones(MIB)})
        config = programs.write_config(self.folder, programs.SMALL)
        export = [programs.BIN / "tessera-ckpt", "export-hf", step, self.folder / "out", "--config", config]
        done = programs.run(["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *export])
        self.assertEqual(done.returncode, 2)
        self.assertIn("File too large", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_a_warning_is_a_line_too(self):
        damaged = self.folder / "step-00000002"
        damaged.mkdir()
        (damaged / "manifest.json").write_text("{}")
        done = ckpt("info", self.folder)
        self.assertEqual(done.returncode, 2)
        warning, error = done.stderr.splitlines()
        self.assertTrue(warning.startswith("tessera-ckpt: warning: a step is passed over: the manifest "), warning)
        self.assertIn("there is no checkpoint in", error)

    def test_differences_are_the_exit_code(self):
        one = save_shards(self.folder / "one", {"a": torch.ones(3), "b": torch.ones(2)})
        other = save_shards(self.folder / "other", {"a": torch.tensor([1.0, 1.5, 1.0]), "b": torch.ones(2)})
        same = ckpt("diff", one, one)
        self.assertEqual((same.returncode, same.stdout), (0, "the tensors are equal\n"))
        different = ckpt("diff", one, other)
        self.assertEqual(different.returncode, 1)
        self.assertEqual(different.stdout, "a: largest difference 0.5, relative 0.333333\n")

    def test_memory_is_bounded(self):
        step = save_shards(self.folder / "step", {"rows": torch.rand(48 * MIB // 4096, 1024),
                                                  "row": torch.rand(1, 48 * MIB // 4),
                                                  "halves": torch.rand(1, 24 * MIB // 2).bfloat16()})
        config = programs.write_config(self.folder, programs.SMALL)
        for arguments in (("export-hf", step, self.folder / "out", "--config", config), ("diff", step, step)):
            done = programs.succeed([sys.executable, "-c", PEAK, programs.BIN / "tessera-ckpt", *arguments])
            self.assertLess(int(done.stdout.split()[-1]), 256 * MIB, arguments)
