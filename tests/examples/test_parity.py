"""llama_train on every mesh against one PyTorch process and against transformers."""
import json
import pathlib
import tempfile
import unittest

import programs

STEPS, BATCH = 20, 4


class Parity(unittest.TestCase):
    def run_case(self, config, sequence, meshes, steps=STEPS, batch=BATCH):
        """meshes: (dp, tp, flags) or (dp, tp, flags, replicas)."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            model = programs.make_model(folder, config)
            # Fewer tokens than the run takes: the last steps wrap around.
            count = (steps - 3) * batch * sequence + 1
            tokens = programs.write_tokens(folder / "t.bin",
                                           programs.text_tokens(count, config["vocab_size"]))
            data = ["--model", model, "--tokens", tokens, "--steps", steps, "--batch", batch,
                    "--seq", sequence, "--lr", 1e-3]
            programs.peer(["train", *data, "--metrics", folder / "peer.jsonl"])
            want = programs.read_metrics(folder / "peer.jsonl")
            for dp, tp, flags, *replicas in meshes:
                with self.subTest(dp=dp, tp=tp, flags=flags, replicas=replicas):
                    out = folder / f"{dp}x{tp}.jsonl"
                    done = programs.train([*data, "--metrics", out, *flags], dp, tp, *replicas)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.check_steps(programs.read_metrics(out), want)

    def check_steps(self, got, want):
        self.assertEqual(len(got), len(want))
        for ours, theirs in zip(got, want):
            step = ours["step"]
            self.assertLess(abs(ours["loss"] / theirs["loss"] - 1), 2e-4, f"loss of step {step}")
            self.assertLess(abs(ours["grad_norm"] / theirs["grad_norm"] - 1), 1e-3,
                            f"gradient norm of step {step}")

    def test_even_sizes_on_every_mesh(self):
        self.run_case(programs.SMALL, 64, [(1, 1, []), (4, 1, []), (2, 2, []), (1, 4, [])])

    def test_sizes_that_do_not_divide(self):
        self.run_case(programs.ODD, 80, [(1, 1, []), (4, 1, []), (2, 2, []), (1, 4, [])])

    def test_without_sequence_or_loss_parallelism(self):
        self.run_case(programs.SMALL, 64, [(2, 2, ["--no-sp"]), (2, 2, ["--no-loss-parallel"]),
                                           (1, 2, ["--no-sp", "--no-loss-parallel"])])

    def test_kinds_of_fsdp_and_what_they_combine_with(self):
        self.run_case(programs.ODD, 80, [
            (2, 1, ["--zero", 2, "--accumulate", 3], 2), (1, 2, ["--ac", "full"], 2),
            (2, 2, ["--zero", 2, "--offload", "--ac", "selective"]),
            (2, 2, ["--accumulate", 3, "--offload"]), (3, 1, ["--accumulate", 2, "--ac", "full"])],
            steps=6, batch=12)

    def test_tied_embeddings_and_head_dim(self):
        self.run_case(programs.TIED, 48, [(1, 1, []), (2, 2, []), (2, 1, []), (1, 2, [])])


class Transformers(unittest.TestCase):
    def exported_loss(self, folder, sequence, rows):
        import torch
        import transformers
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
        tokens = programs.text_tokens(rows * sequence + 1, model.config.vocab_size)
        x = torch.tensor([tokens[n * sequence:n * sequence + sequence + 1] for n in range(rows)])
        with torch.no_grad():
            logits = model(x[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).item()

    def check_export(self, config, dp, tp):
        sequence = 40
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            model = programs.make_model(folder, config)
            tokens = programs.write_tokens(
                folder / "t.bin", programs.text_tokens(4 * sequence + 1, config["vocab_size"]))
            data = ["--tokens", tokens, "--batch", 4, "--seq", sequence]
            done = programs.train(["--model", model, *data, "--steps", 5,
                                   "--save-hf", folder / "out"], dp, tp)
            self.assertEqual(done.returncode, 0, done.stderr)
            # The first loss of a run on the exported model is that model's loss.
            done = programs.train(["--model", folder / "out", *data, "--steps", 1, "--metrics",
                                   folder / "again.jsonl"])
            self.assertEqual(done.returncode, 0, done.stderr)
            ours = programs.read_metrics(folder / "again.jsonl")[0]["loss"]
            self.assertLess(abs(ours - self.exported_loss(folder, sequence, 4)), 1e-4)

    def test_loads_what_a_2d_mesh_exported(self):
        self.check_export(programs.ODD, 2, 2)

    def test_loads_tied_embeddings(self):
        self.check_export(programs.TIED, 2, 1)

    def test_generates_the_same_greedy_text(self):
        import torch
        import transformers
        with tempfile.TemporaryDirectory() as folder:
            model = programs.make_model(folder, programs.SMALL)
            done = programs.run([programs.BIN / "llama_generate", "--model", model, "--prompt",
                                 "The shell", "--max-tokens", 24, "--temperature", 0])
            self.assertEqual(done.returncode, 0, done.stderr)
            reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
            prompt = torch.tensor([list(b"The shell")])
            out = reference.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                     max_new_tokens=24, min_new_tokens=24, eos_token_id=None,
                                     pad_token_id=0)
            text = bytes(out[0].tolist()).decode("utf-8", "replace")
            self.assertEqual(done.stdout.rstrip("\n"), text)


if __name__ == "__main__":
    unittest.main()
