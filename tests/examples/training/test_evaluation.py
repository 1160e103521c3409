"""Held-out loss during training: --eval-every, --eval-text, --eval-tokens."""
import gzip
import re

import programs

STEPS = 5


class Evaluation(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.held_out = programs.write_tokens(self.folder / "held_out.bin", programs.text_tokens(700, 250))

    def run_with(self, name, flags, dp=1, tp=1, steps=STEPS):
        """Trains a model. Returns the file of metrics, the exported weights, and the held-out loss that is printed."""
        run = self.folder / name
        done = programs.train(["--config", self.config, "--tokens", self.tokens, "--steps", steps, "--batch", 4,
                               "--seq", 16, "--dropout", 0.1, "--metrics", run / "m.jsonl", "--save-hf",
                               run / "model", *flags], dp, tp)
        printed = re.search(r"held-out loss: .*?([0-9.]+) a token", done.stdout)
        weights = (run / "model/model.safetensors").read_bytes()
        return run / "m.jsonl", weights, printed and float(printed[1])

    def evaluations(self, metrics):
        return {r["step"]: r["eval_loss"] for r in programs.read_metrics(metrics) if "eval_loss" in r}

    def test_evaluation_does_not_change_the_training(self):
        held_out = ["--eval-tokens", self.held_out, "--zero", 2, "--accumulate", 2, "--ema", 0.5, "--ac", "full"]
        want, weights, loss = self.run_with("without", held_out, dp=2, tp=2)
        got, same_weights, same_loss = self.run_with("with", [*held_out, "--eval-every", 2], dp=2, tp=2)
        self.assertEqual(programs.figures(got), programs.figures(want))
        self.assertEqual(*[[r["comm"] for r in programs.read_metrics(m)] for m in (got, want)])
        self.assertEqual((same_weights, same_loss), (weights, loss))
        self.assertEqual(self.evaluations(want), {})
        evaluated = self.evaluations(got)
        self.assertEqual(list(evaluated), [2, 4, STEPS])
        self.assertAlmostEqual(evaluated[STEPS], loss, delta=1e-4)

    def test_nats_per_byte_count_only_evaluated_tokens(self):
        """The first 32 batches have long tokens, the rest of the file has short ones."""
        import tokenizers_of_kinds as kinds
        tokenizer = kinds.gpt2("the same words " * 1000)
        tokenizer.save(str(self.folder / "tokenizer.json"))
        text = programs.write(self.folder / "held_out.txt", "the same words " * 1000 + "qx" * 20_000)
        zipped = self.folder / "held_out.txt.gz"
        zipped.write_bytes(gzip.compress(text.read_bytes()))
        config = programs.write_config(self.folder, programs.SMALL | {"vocab_size": tokenizer.get_vocab_size()})
        done = programs.train(["--config", config, "--text", text, "--tokenizer", self.folder / "tokenizer.json", "--steps", 1,
                               "--batch", 2, "--seq", 16, "--eval-text", zipped])
        found = re.search(r"held-out loss: ([0-9.]+) nats/byte \(([0-9.]+) a token, (\d+) tokens", done.stdout)
        per_byte, loss, tokens = float(found[1]), float(found[2]), int(found[3])
        self.assertEqual(tokens, 32 * 2 * 16)
        ids = tokenizer.encode(text.read_text()).ids[1:tokens + 1]
        self.assertAlmostEqual(per_byte, loss * tokens / len(tokenizer.decode(ids)), delta=2e-4)

    def test_non_finite_loss_ends_the_run(self):
        import numpy
        from safetensors.numpy import load_file, save_file
        self.run_with("run", [], steps=1)
        model, name = self.folder / "run/model", "model.layers.1.mlp.up_proj.weight"
        weights = load_file(model / "model.safetensors")
        weights[name][-1] = numpy.nan  # the last rank has these elements
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        for dp in 1, 2:
            with self.subTest(dp=dp):
                done = programs.fail(programs.on_ranks(dp, [
                    programs.BIN / "llama_train", "--dp", dp, "--model", model, "--steps", 0, "--batch", 4, "--seq", 16,
                    "--eval-tokens", self.held_out]))
                self.assertRegex(done.stderr, "held-out loss after step 0 is -?nan; the parameter " + re.escape(name))
