"""tessera-ckpt: differences by exit code, bounded memory; exports with the tokenizer's files."""
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import programs

MIB = 1 << 20
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen."
# A program that measures a command: the peak of a child process is at least that of the process that starts it.
PEAK = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"""


def ckpt(*arguments):
    return programs.run([programs.BIN / "tessera-ckpt", *arguments])


def save_shards(folder, state):
    """Writes a folder of safetensors shards as torch.distributed.checkpoint does."""
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True), no_dist=True)
    return folder


class CheckpointTool(programs.WithFolder):
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
        programs.train(["--model", model, "--steps", 0, "--save-hf", self.folder / "saved"])
        other = self.folder / "other.model"  # the tokenizer's format follows from the content of the file
        other.write_text((model / "tokenizer.json").read_text())
        config = programs.write_config(self.folder, programs.SMALL)
        programs.train(["--config", config, "--tokenizer", other, "--steps", 0, "--save-hf", self.folder / "new",
                        "--save-hf-dtype", "bf16"])
        self.assertTrue((self.folder / "new/tokenizer.json").exists())
        # The config.json that the model was trained with names no dtype.
        self.assertEqual(transformers.AutoConfig.from_pretrained(self.folder / "new").dtype, torch.bfloat16)
        self.assertEqual({tensor.dtype for tensor in load_file(self.folder / "new/model.safetensors").values()},
                         {torch.bfloat16})
        # The export has one tokenizer and generation_config.json, but no other file of the model's folder.
        (self.folder / "alone").mkdir()
        alone = other.rename(self.folder / "alone/tokenizer.json")
        programs.train(["--model", model, "--tokenizer", alone, "--steps", 0, "--save-hf", self.folder / "mixed"])
        self.assertEqual({file.name for file in (self.folder / "mixed").iterdir()},
                         {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"})
        out = self.folder / "saved"
        loaded = transformers.AutoTokenizer.from_pretrained(out)
        self.assertEqual(loaded(TEXT)["input_ids"], tokenizer(TEXT)["input_ids"])
        self.assertEqual(loaded.eos_token, "</s>")
        self.assertTrue((out / "generation_config.json").exists())

    def test_bad_arguments_are_one_line(self):
        step = save_shards(self.folder / "step", {"w": torch.ones(3)})
        done = ckpt("verfy", step)
        self.assertEqual(done.returncode, 2)
        self.assertIn("unknown subcommand 'verfy'; did you mean verify?", done.stderr)

    def test_diff_exit_code_reports_differences(self):
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
        done = programs.succeed([sys.executable, "-c", PEAK, programs.BIN / "tessera-ckpt", "diff", step, step])
        self.assertLess(int(done.stdout.split()[-1]), 256 * MIB)
