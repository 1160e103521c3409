"""llama_train --fp8: it learns as bf16 does, on every mesh alike, and trains adapters."""
import json

import programs


# A model of which 64 divides all sizes but the vocabulary.
CONFIG = programs.SMALL | {"intermediate_size": 192, "vocab_size": 250}
LAYERS = 14


class Fp8(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.config = programs.write_config(self.folder, CONFIG)
        self.tokens = programs.write_tokens(self.folder / "t.bin", programs.text_tokens(5000, 250))

    def losses(self, flags, dp=1, tp=1, replicas=1):
        rows, said = programs.metrics_of(self.folder, ["--config", self.config, "--tokens", self.tokens, "--batch", 8, "--seq", 32,
                                                       "--lr", 3e-3, *flags], dp, tp, replicas)
        self.assertEqual(f"fp8: {LAYERS} of {LAYERS + 1} linear layers\n" in said, "--fp8" in flags)
        return [row["loss"] for row in rows]

    def test_fp8_loss_follows_the_bf16_loss(self):
        flags = ["--steps", 60, "--param-dtype", "bf16"]
        want, got = self.losses(flags), self.losses([*flags, "--fp8"])
        self.assertNotEqual(got[0], want[0])
        self.assertLess(want[-1], 0.9 * want[0])
        self.assert_close(got, want, 0.03)

    def test_every_mesh_equals_one_rank(self):
        flags = ["--steps", 4, "--fp8", "--verify"]
        want = self.losses(flags)
        for mesh, more in (((2, 2), ["--ac", "full"]), ((1, 2, 2), ["--no-sp", "--offload", "--zero", 2])):
            with self.subTest(mesh=mesh, more=more):
                self.assert_close(self.losses([*flags, *more], *mesh), want, 2e-3)

    def test_trains_adapters(self):
        losses = self.losses(["--steps", 20, "--fp8", "--lora-rank", 16])
        self.assertLess(losses[-1], losses[0])

    def test_refusals_are_one_line(self):
        small = self.folder / "small.json"
        small.write_text(json.dumps(CONFIG | {"hidden_size": 72, "intermediate_size": 100, "head_dim": 18}))
        self.refuse([programs.BIN / "llama_train", "--tokens", self.tokens, "--fp8", "--config", small], "--fp8 is given, but no "
                    "linear layer has two sizes that are multiples of 16; leave --fp8 out")
        self.refuse([programs.BIN / "llama_plan", "--config", self.config, "--fp8", "--gpu", "a100"],
                    "--fp8 is given, but a100 does not support FP8")
