"""llama_train --cp: sequences that are split train as whole ones do."""
import os
import re
import unittest

import programs

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

    def test_evaluates_as_one_rank_does(self):
        text = self.folder / "held.txt"
        text.write_text("The shell reads a line. It runs what the line says. " * 30)
        flags = [*self.flags("held", 2, programs.SMALL), "--eval-text", text]
        losses = [float(re.search(r"\(([\d.]+) a token", programs.train(flags, cp=cp).stdout)[1])
                  for cp in (1, 2)]
        self.assertAlmostEqual(*losses, delta=2e-4)

    def refused(self, *flags):
        done = programs.run([programs.BIN / "llama_train", *self.flags("x"), *flags])
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("\n"), 1)
        return done.stderr

    def test_refuses_what_does_not_go_with_it(self):
        self.assertIn("--seq 24 is not a multiple of 10, 2 x --cp 5", self.refused("--cp", 5))
        self.assertIn("--dropout is given with --cp 2", self.refused("--cp", 2, "--dropout", 0.1))
        self.assertIn("--lora-dropout is given with --cp 2",
                      self.refused("--cp", 2, "--lora-rank", 2, "--lora-dropout", 0.1))
        self.assertIn("--cp 2 is 2 ranks, but 1 is running", self.refused("--cp", 2))
