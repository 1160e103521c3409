"""llama_train on every mesh against one PyTorch process and against transformers."""
import json
import pathlib
import unittest

import programs

STEPS, BATCH = 20, 4


class Parity(programs.InFolder):
    def run_case(self, config, sequence, meshes, steps=STEPS, batch=BATCH):
        """meshes: (dp, tp, flags) or (dp, tp, flags, replicas)."""
        model = programs.make_model(self.folder, config)
        # Fewer tokens than the run takes: the last steps wrap around.
        count = (steps - 3) * batch * sequence + 1
        tokens = programs.write_tokens(self.folder / "few.bin",
                                       programs.text_tokens(count, config["vocab_size"]))
        data = ["--model", model, "--tokens", tokens, "--steps", steps, "--batch", batch,
                "--seq", sequence, "--lr", 1e-3]
        programs.peer(["train", *data, "--metrics", self.folder / "peer.jsonl"])
        want = programs.read_metrics(self.folder / "peer.jsonl")
        for dp, tp, flags, *replicas in meshes:
            with self.subTest(dp=dp, tp=tp, flags=flags, replicas=replicas):
                out = self.folder / f"{dp}x{tp}.jsonl"
                programs.train([*data, "--metrics", out, *flags], dp, tp, *replicas)
                self.check_steps(programs.read_metrics(out), want)

    def check_steps(self, got, want):
        self.assertEqual(len(got), len(want))
        for ours, theirs in zip(got, want):
            step = ours["step"]
            self.assertLess(abs(ours["loss"] / theirs["loss"] - 1), 2e-4, f"loss of step {step}")
            self.assertLess(abs(ours["grad_norm"] / theirs["grad_norm"] - 1), 1e-3,
                            f"gradient norm of step {step}")

    # Each flag is in a row, beside others.
    def test_even_sizes(self):
        self.run_case(programs.SMALL, 64, [
            (1, 1, []), (4, 1, ["--loss-chunks", 3]), (2, 2, ["--no-sp"]), (1, 4, ["--no-loss-parallel"]),
            (1, 2, ["--no-sp", "--no-loss-parallel", "--zero", 2])])

    def test_sizes_that_do_not_divide(self):
        self.run_case(programs.ODD, 80, [
            (1, 4, []), (2, 2, []), (2, 1, ["--zero", 2, "--accumulate", 3], 2), (1, 2, ["--ac", "full"], 2),
            (2, 2, ["--zero", 2, "--offload", "--ac", "selective"]), (3, 1, ["--accumulate", 2, "--offload", "--ac", "full"])],
            steps=6, batch=12)

    def test_tied_embeddings_and_head_dim(self):
        self.run_case(programs.TIED, 48, [
            (2, 2, []), (2, 2, ["--loss-chunks", 5, "--no-sp"]), (1, 2, ["--loss-chunks", 2, "--accumulate", 2, "--zero", 2])],
            steps=8)


class Optimizers(programs.InFolder):
    """Every mesh trains as one rank does, and each flag changes something."""
    FLAGS = [["--optimizer", "sgd", "--momentum", 0.8, "--z-loss", 0.1, "--label-smoothing", 0.2],
             ["--optimizer", "muon", "--decay-matrices-only", "--weight-decay", 10, "--shuffle", 3],
             ["--betas", "0.7,0.8", "--eps", 1e-3, "--schedule", "wsd", "--decay-ratio", 0.5, "--min-lr", 1e-4],
             ["--moment-dtype", "bf16", "--weight-decay", 30],
             ["--lora-rank", 2, "--lora-dropout", 0.5, "--dropout", 0.3, "--accumulate", 2]]

    def test_train_as_one_rank_does(self):
        seen = set()
        for flags in self.FLAGS:
            with self.subTest(flags):
                runs = []
                for dp, tp in ((1, 1), (2, 2)):
                    out = self.folder / f"{dp}.jsonl"
                    programs.train(["--config", self.config, "--tokens", self.tokens, "--steps", 6,
                                    "--seq", 32, "--lr", 1e-2, *flags, "--metrics", out], dp, tp)
                    runs.append([step["loss"] for step in programs.read_metrics(out)])
                for one, four in zip(*runs):
                    self.assertAlmostEqual(one, four, delta=2e-4 * one)
                self.assertNotIn(runs[0][-1], seen)
                seen.add(runs[0][-1])


class Transformers(programs.InFolder):
    def exported_loss(self, sequence, rows):
        import torch
        import transformers
        model = transformers.LlamaForCausalLM.from_pretrained(self.folder / "out", dtype=torch.float32)
        tokens = programs.text_tokens(rows * sequence + 1, model.config.vocab_size)
        x = torch.tensor([tokens[n * sequence:n * sequence + sequence + 1] for n in range(rows)])
        with torch.no_grad():
            logits = model(x[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).item()

    def check_export(self, config, dp, tp):
        sequence = 40
        model = programs.make_model(self.folder, config)
        tokens = programs.write_tokens(
            self.folder / "few.bin", programs.text_tokens(4 * sequence + 1, config["vocab_size"]))
        data = ["--tokens", tokens, "--batch", 4, "--seq", sequence]
        out, metrics = self.folder / "out", self.folder / "again.jsonl"
        programs.train(["--model", model, *data, "--steps", 5, "--save-hf", out], dp, tp)
        # The first loss of a run on the exported model is that model's loss.
        programs.train(["--model", out, *data, "--steps", 1, "--metrics", metrics])
        ours = programs.read_metrics(metrics)[0]["loss"]
        self.assertLess(abs(ours - self.exported_loss(sequence, 4)), 1e-4)

    def test_loads_what_a_2d_mesh_exported(self):
        self.check_export(programs.ODD, 2, 2)

    def test_loads_tied_embeddings(self):
        self.check_export(programs.TIED, 2, 1)

    def test_generates_the_same_greedy_text(self):
        import torch
        import transformers
        model = programs.make_model(self.folder, programs.SMALL)
        done = programs.succeed([programs.BIN / "llama_generate", "--model", model, "--prompt",
                             "The shell", "--max-tokens", 24, "--temperature", 0])
        reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        prompt = torch.tensor([list(b"The shell")])
        out = reference.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                 max_new_tokens=24, min_new_tokens=24, eos_token_id=None,
                                 pad_token_id=0)
        text = bytes(out[0].tolist()).decode("utf-8", "replace")
        self.assertEqual(done.stdout.rstrip("\n"), text)

    def test_begins_and_ends_a_text_as_its_files_say(self):
        import torch
        import transformers
        begin = 7
        config = programs.SMALL | {"bos_token_id": begin}
        model = programs.make_model(self.folder, config)
        reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        prompt = torch.tensor([[begin, *b"The shell"]])

        def generated(end):
            out = reference.generate(prompt, attention_mask=torch.ones_like(prompt),
                                     do_sample=False, max_new_tokens=24, eos_token_id=end,
                                     pad_token_id=0)
            return out[0].tolist()[1:]

        # The greedy text's own sixth token ends it, if it is not among those before.
        whole = generated(None)
        end = next(token for i, token in enumerate(whole) if i >= 13 and token not in whole[9:i])
        (pathlib.Path(model) / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [end, 255]}))
        done = programs.succeed([programs.BIN / "llama_generate", "--model", model, "--prompt",
                                 "The shell", "--max-tokens", 24, "--temperature", 0])
        ended = generated([end, 255])
        self.assertEqual(ended[-1], end)
        self.assertLess(len(ended), len(whole))
        text = bytes(ended[:-1]).decode("utf-8", "replace")
        self.assertEqual(done.stdout.rstrip(), text.rstrip())
