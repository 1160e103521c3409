"""llama_train --ac auto takes as much memory as its plan says. test_plan_search.py tests the choice of llama_plan."""
import json
import re

import programs

RUN = ["--batch", 16, "--seq", 64]
# Activations take more memory than weights, so that the peaks of all kinds of checkpointing differ.
DEEP = programs.SMALL | {"num_hidden_layers": 6}


class AutoCheckpointing(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.config = programs.write_config(self.folder, DEEP)

    def peak(self, ac, dp=1):
        """In GiB."""
        file = self.folder / "plan.json"
        programs.succeed([programs.BIN / "llama_plan", "--config", self.config, *RUN, "--dp", dp, "--device", "cpu", "--gpu",
                          "h100", "--json", file, "--ac", ac])
        return json.loads(file.read_text())["peak_bytes"] / 2 ** 30

    def train(self, *flags):
        rows, said = programs.metrics_of(
            self.folder, ["--config", self.config, "--tokens", self.tokens, *RUN, "--steps", 2, *flags], dp=2)
        return [(each["loss"], each["grad_norm"]) for each in rows], said

    def test_run_chooses_the_checkpointing_of_its_plan(self):
        none, selective = (self.peak(kind, dp=2) for kind in ("none", "selective"))
        for kind, limit, end in (("none", none, ""), ("selective:3", (none + selective) / 2, ""), ("full", 1e-6, "; no --ac fits")):
            with self.subTest(kind):
                chosen, said = self.train("--ac", "auto", "--memory", repr(limit))
                # One rank says it.
                self.assertEqual(re.findall(rf"(?m)^--ac auto: (\S+) \(.* GiB{end}\)$", said), [kind])
                self.assertEqual(chosen, self.train("--ac", kind)[0])

    def test_bench_mfu_shows_the_choice(self):
        limit = self.peak("full")
        programs.succeed([programs.BIN / "bench_mfu", "--config", self.config, *RUN, "--steps", 2, "--warmup", 1, "--peak-flops",
                          1e11, "--ac", "auto", f"--flags=--memory {limit!r}", "--out", self.folder / "out"])
        run = json.loads((self.folder / "out/results.json").read_text())["runs"][0]
        self.assertEqual((run["ac"], run["error"]), ("full", None))
