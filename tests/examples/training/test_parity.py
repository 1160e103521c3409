"""The same numbers on every mesh: tensor, data and context parallelism, initial weights, fp16 and bf16 moments."""

import hashlib
import os
import re

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
            (2, 2, ["--zero", 2, "--offload", "--ac", "selective:1"]), (3, 1, ["--accumulate", 2, "--offload", "--ac", "full"])],
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


MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (3, 1)]
# Changes only with the generator, its transforms, the initialisers or the names of parameters:
# then everybody's runs change, so do it knowingly.
GOLDEN = "826585b8668fe5ae88972c7f55aacb5d04d31a4707a652485e2490d0f5963438"


class Initialisation(programs.InFolder):
    def exported_bytes(self, dp, tp, seed=1, flags=()):
        config = programs.write_config(self.folder, programs.ODD | {"num_hidden_layers": 1})
        out = self.folder / f"{dp}x{tp}-{seed}"
        programs.train(["--config", config, "--seed", seed, "--steps", 0, "--batch", 12,
                        "--save-hf", out, *flags], dp, tp)
        return (out / "model.safetensors").read_bytes()

    def test_is_byte_equal_on_every_mesh_and_has_the_golden_hash(self):
        for dp, tp in MESHES:
            with self.subTest(dp=dp, tp=tp):
                digest = hashlib.sha256(self.exported_bytes(dp, tp)).hexdigest()
                self.assertEqual(digest, GOLDEN)

    def test_depends_on_the_seed(self):
        self.assertNotEqual(self.exported_bytes(1, 1, seed=1), self.exported_bytes(1, 1, seed=2))


STEPS = 6


class ContextParallel(programs.InFolder):
    def flags(self, run, steps=STEPS, config=programs.ODD):
        """Metrics go to a file of `run`."""
        return ["--config", programs.write_config(self.folder, config), "--tokens", self.tokens,
                "--steps", steps, "--batch", 4, "--seq", 24, "--lr", 3e-3, "--metrics",
                self.folder / f"{run}.jsonl"]

    def check_curve(self, run, want="alone"):
        got, want = (programs.read_metrics(self.folder / f"{name}.jsonl") for name in (run, want))
        self.assertEqual(len(got), len(want))
        for ours, theirs in zip(got, want):
            self.assertLess(abs(ours["loss"] / theirs["loss"] - 1), 2e-4, ours["step"])
            self.assertLess(abs(ours["grad_norm"] / theirs["grad_norm"] - 1), 1e-3, ours["step"])

    def test_trains_as_one_rank_does(self):
        programs.train(self.flags("alone"))
        for mesh, flags in (({"cp": 2}, []), ({"cp": 3}, ["--zero", 2]), ({"cp": 2, "tp": 2}, []),
                            ({"cp": 2, "dp": 2}, ["--ac", "full", "--accumulate", 2])):
            with self.subTest(mesh=mesh):
                programs.train([*self.flags("split"), *flags], **mesh,
                               env=dict(os.environ, TESSERA_DEBUG="0"))
                self.check_curve("split")
        comm = programs.read_metrics(self.folder / "split.jsonl")[-1]["comm"]
        # 2 layers, 2 micro-batches: in forward, and again for backward.
        self.assertEqual(comm["cp"]["all_gather"]["calls"], 8)
        self.assertEqual(comm["cp"]["reduce_scatter"]["calls"], 4)
        self.assertIn("dp_cp", comm)
        with self.subTest("resumed on another mesh"):
            saved = ["--checkpoint", self.folder / "steps"]
            programs.train([*self.flags("split", STEPS // 2), *saved], cp=2, tp=2)
            programs.train([*self.flags("split"), *saved, "--resume"], cp=2, replicas=2)
            self.check_curve("split")

    def test_counts_the_tokens_of_all_parts(self):
        """With a mask of documents some targets do not count, and not as many on each rank."""
        text = self.folder / "held.txt"
        text.write_text("The shell reads a line. It runs what the line says. " * 30)
        flags = ["--document-mask", "--eos-token", 5, "--eval-text", text]
        losses = []
        for run, mesh in (("alone", {}), ("split", {"cp": 2}), ("split", {"cp": 2, "dp": 2})):
            with self.subTest(mesh=mesh):
                done = programs.train([*self.flags(run, config=programs.SMALL), *flags], **mesh)
                losses.append(float(re.search(r"\(([\d.]+) a token", done.stdout)[1]))
                self.check_curve(run)
                self.assertAlmostEqual(losses[-1], losses[0], delta=2e-4)

    def test_refuses_what_does_not_go_with_it(self):
        for flags, message in ((["--cp", 5], "--seq 24 is not a multiple of 10, 2 x --cp 5"),
                               (["--cp", 2, "--dropout", 0.1], "--dropout is given with --cp 2"),
                               (["--cp", 2, "--lora-rank", 2, "--lora-dropout", 0.1], "--lora-dropout is given with --cp 2"),
                               (["--cp", 2], "--cp 2 is 2 ranks, but 1 is running")):
            self.refuse([programs.BIN / "llama_train", *self.flags("x"), *flags], message)


INITIAL_SCALE = 65536.0


class HalfPrecision(programs.InFolder):
    def rows(self, flags, dp=1, tp=1, replicas=1):
        metrics = self.folder / "m.jsonl"
        programs.train(["--config", self.config, "--tokens", self.tokens, "--metrics", metrics,
                        *flags], dp, tp, replicas)
        return programs.read_metrics(metrics)

    def test_losses_and_norms_are_those_of_fp32(self):
        flags = ["--steps", 4, "--batch", 4, "--seq", 32, "--param-dtype"]
        want = self.rows([*flags, "fp32"])
        self.assertNotIn("loss_scale", want[0])
        for mesh, more in (((1, 1), []), ((2, 2), []), ((2, 2), ["--loss-chunks", 4]),
                           ((1, 2, 2), ["--zero", 2, "--accumulate", 2, "--offload", "--ac", "full"])):
            for ours, theirs in zip(self.rows([*flags, "fp16", *more], *mesh), want):
                self.assertEqual((ours["loss_scale"], ours["skipped"]), (INITIAL_SCALE, False))
                self.assertLess(abs(ours["loss"] / theirs["loss"] - 1), 1e-3)
                self.assertLess(abs(ours["grad_norm"] / theirs["grad_norm"] - 1), 1e-2)

    def test_losses_with_narrow_moments_are_those_with_wide_ones(self):
        flags = ["--steps", 40, "--batch", 4, "--seq", 32, "--lr", 3e-3, "--moment-dtype"]
        wide = self.rows([*flags, "fp32"])
        narrow = self.rows([*flags, "bf16"])
        self.assertEqual(narrow[0]["loss"], wide[0]["loss"])
        self.assertNotEqual(narrow[-1]["loss"], wide[-1]["loss"])
        for ours, theirs in zip(narrow, wide):
            self.assertLess(abs(ours["loss"] / theirs["loss"] - 1), 5e-3)

    def test_biases_are_rounded_alike_whatever_is_kept(self):
        config = programs.write_config(self.folder, programs.SMALL | {"attention_bias": True, "mlp_bias": True})
        flags = ["--config", config, "--steps", 4, "--batch", 4, "--seq", 32, "--lr", 1e-2,
                 "--accumulate", 2, "--param-dtype", "bf16"]
        runs = [[(row["loss"], row["grad_norm"]) for row in self.rows([*flags, *more], tp=2)]
                for more in ([], ["--no-sp-regather"], ["--ac", "selective"], ["--ac", "full"])]
        for run in runs[1:]:
            self.assertEqual(run, runs[0])
