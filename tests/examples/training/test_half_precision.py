"""fp16 with dynamic loss scaling: the numbers are fp32's, and a step that overflows is left out. Moments in bf16."""
import unittest

import programs

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

    # A token a rank: its gradient is not divided by a number of tokens, and the first scales are
    # too large for it.
    OVERFLOWING = ["--seq", 1, "--batch", 2, "--param-dtype", "fp16"]

    def test_the_scale_falls_until_steps_count(self):
        for mesh in ((2, 1), (1, 2, 2)):
            with self.subTest(mesh):
                rows = self.rows([*self.OVERFLOWING, "--steps", 6], *mesh)
                self.assertTrue(rows[0]["skipped"])
                self.assertFalse(rows[-1]["skipped"])
                scale = INITIAL_SCALE
                for row in rows:
                    self.assertEqual(row["loss_scale"], scale)
                    self.assertEqual(row["grad_norm"] is None, row["skipped"])
                    scale *= 0.5 if row["skipped"] else 1

    def test_a_step_left_out_changes_no_weight(self):
        files = []
        for steps in (0, 1):
            out = self.folder / f"after-{steps}"
            programs.train(["--config", self.config, "--tokens", self.tokens, "--save-hf", out,
                            *self.OVERFLOWING, "--steps", steps], 2)
            files.append((out / "model.safetensors").read_bytes())
        self.assertEqual(*files)
