"""--ac auto: the least recomputation whose plan fits, in llama_plan, llama_train and bench_mfu."""
import json
import re
import unittest

import programs

RUN = ["--batch", 16, "--seq", 64]
KINDS = ("none", "selective", "full")
# Activations outweigh the weights, so that each kind takes another amount of memory.
DEEP = programs.SMALL | {"num_hidden_layers": 6}


class AutoCheckpointing(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.config = programs.write_config(self.folder, DEEP)

    def plan(self, *flags, dp=1):
        file = self.folder / "plan.json"
        programs.succeed([programs.BIN / "llama_plan", "--config", self.config, *RUN, "--dp", dp, "--device", "cpu", "--gpu",
                          "h100", "--json", file, *flags])
        return json.loads(file.read_text())

    def limits(self, dp=1):
        """By kind: GiB with which this kind is the least that fits."""
        peaks = [self.plan("--ac", kind, dp=dp)["peak_bytes"] for kind in KINDS]
        self.assertEqual(peaks, sorted(set(peaks), reverse=True))
        return {kind: peak / 2 ** 30 for kind, peak in zip(KINDS, peaks)}

    def train(self, *flags, dp=1):
        metrics = self.folder / "m.jsonl"
        done = programs.train(["--config", self.config, "--tokens", self.tokens, *RUN, "--steps", 2, "--metrics", metrics,
                               *flags], dp)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [(each["loss"], each["grad_norm"]) for each in programs.read_metrics(metrics)], done.stdout

    def test_a_plan_takes_the_least_that_fits(self):
        for kind, limit in self.limits().items():
            plan = self.plan("--ac", "auto", "--memory", repr(limit))
            self.assertEqual((plan["flags"]["--ac"], plan["fits"]), (kind, True))
        plan = self.plan("--ac", "auto", "--memory", 1e-6)
        self.assertEqual((plan["flags"]["--ac"], plan["fits"]), ("full", False))

    def test_a_plan_recomputes_only_as_many_blocks_as_needed(self):
        none, selective, full = self.limits().values()
        for more, less, kind in ((none, selective, "selective"), (selective, full, "full")):
            plan = self.plan("--ac", "auto", "--memory", repr((more + less) / 2))
            self.assertRegex(plan["flags"]["--ac"], rf"^{kind}:[1-5]$")
            self.assertTrue(plan["fits"])
        peaks = [self.plan("--ac", f"selective:{count}")["peak_bytes"] for count in range(1, 7)]
        self.assertEqual(peaks, sorted(set(peaks), reverse=True))
        self.assertEqual(peaks[-1], self.plan("--ac", "selective")["peak_bytes"])

    def test_a_run_takes_what_its_plan_takes(self):
        limits = self.limits(dp=2)
        part = "selective:3", (limits["none"] + limits["selective"]) / 2
        for kind, limit in [*limits.items(), part]:
            with self.subTest(kind):
                chosen, said = self.train("--ac", "auto", "--memory", repr(limit), dp=2)
                self.assertEqual(re.findall(r"^--ac auto: (\S+) ", said, re.MULTILINE), [kind])
                self.assertEqual(chosen, self.train("--ac", kind, dp=2)[0])

    def test_nothing_that_fits_is_said(self):
        _, said = self.train("--ac", "auto", "--memory", 1e-6)
        self.assertRegex(said, r"(?m)^--ac auto: full \(.*; no --ac fits\)$")

    def test_bench_mfu_shows_the_choice(self):
        limit = self.limits()["full"]
        programs.succeed([programs.BIN / "bench_mfu", "--config", self.config, "--batch", 16, "--seq", 64, "--steps", 2, "--warmup",
                          1, "--peak-flops", 1e11, "--ac", "auto", f"--flags=--memory {limit!r}", "--out", self.folder / "out"])
        run = json.loads((self.folder / "out/results.json").read_text())["runs"][0]
        self.assertEqual((run["ac"], run["error"]), ("full", None))


if __name__ == "__main__":
    unittest.main()
