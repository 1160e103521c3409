"""What a run says of its memory: by rank, unit and kind."""
import json
import os
import unittest

import programs


def total(kinds, key):
    return sum(kind[key] for kind in kinds.values())


class MemoryReport(programs.InFolder):
    def report(self, *more, dp=2, tp=1, config=None):
        config = programs.write_config(self.folder, config or programs.SMALL)
        programs.train(["--config", config, "--tokens", self.tokens, "--batch", 12, "--seq", 16,
                        "--steps", 3, "--memory-report", self.folder / "memory.json", "--metrics",
                        self.folder / "m.jsonl", *more], dp, tp,
                       env=dict(os.environ, OMP_NUM_THREADS="1"))
        return (json.loads((self.folder / "memory.json").read_text())["ranks"],
                programs.read_metrics(self.folder / "m.jsonl"))

    def test_units_add_up_to_the_peak(self):
        ranks, metrics = self.report(config=programs.ODD)
        self.assertEqual([rank["place"] for rank in ranks], ["dp=0, tp=0", "dp=1, tp=0"])
        for rank in ranks:
            peak = rank["peak_bytes"]
            self.assertEqual(total(rank["kinds"], "at_peak"), peak)
            self.assertEqual(sum(total(unit, "at_peak") for unit in rank["units"].values()), peak)
        record = metrics[ranks[0]["step"] - 1]
        self.assertLess(abs(ranks[0]["peak_bytes"] / record["peak_active_bytes"] - 1), 0.02)

    def test_a_unit_has_its_shards_moments_and_gradients(self):
        ranks, _ = self.report()
        c = programs.SMALL
        matrices = 4 * c["hidden_size"] ** 2 + 3 * c["hidden_size"] * c["intermediate_size"]
        block = 4 * (matrices + 2 * c["hidden_size"])  # bytes in fp32
        units = ranks[0]["units"]
        for layer in (0, 1):
            unit = units[f"unit 'model.layers.{layer}'"]
            self.assertEqual(unit["parameters"]["most"], block // 2)
            counters = 9 * 4  # AdamW's steps, of each parameter
            self.assertEqual(unit["optimizer"]["most"], block + counters)
            norm = 4 * c["hidden_size"]  # this rank's own gradient of one, kept to tell whose NaN it was
            self.assertEqual(unit["gradients"]["most"], block // 2 + norm)
            self.assertEqual(unit["gathered parameters"]["most"], block)
            self.assertGreater(unit["activations"]["most"], 0)
        self.assertNotIn("optimizer", units[""])

    def test_state_that_a_load_made_is_the_optimizers(self):
        for more in (["--steps", 2], ["--steps", 5, "--resume"]):
            ranks, _ = self.report("--checkpoint", self.folder / "steps", *more)
            units = ranks[0]["units"]["unit 'model.layers.0'"]
            self.assertGreater(units["optimizer"]["most"], 2 * units["parameters"]["most"], more)

    def test_fp16_has_its_optimizer(self):
        ranks, _ = self.report("--param-dtype", "fp16")
        kinds = ranks[0]["kinds"]
        self.assertGreater(kinds["optimizer"]["most"], 1.9 * kinds["parameters"]["most"])

    def test_nothing_is_written_where_no_step_is_left(self):
        flags = ["--config", programs.write_config(self.folder, programs.SMALL), "--tokens", self.tokens, "--batch", 4,
                 "--seq", 16, "--steps", 2, "--checkpoint", self.folder / "steps", "--resume", "auto"]
        outputs = [self.folder / name for name in ("trace", "profile", "memory")]
        programs.train(flags)
        done = programs.train([*flags, "--trace", outputs[0], "--profile", outputs[1], "--memory-report", outputs[2]])
        self.assertIn("llama_train: warning: no step is left after step 2: no trace, profile or memory report is written\n",
                      done.stderr)
        self.assertFalse(any(path.exists() for path in outputs))

    def test_checkpointing_leaves_fewer_activations(self):
        def activations(*flags):
            ranks, _ = self.report(*flags, dp=1)
            return ranks[0]["units"]["unit 'model.layers.0'"]["activations"]["most"]
        self.assertLess(activations("--ac", "full"), activations() / 4)

    def test_the_plan_gives_the_same_bytes_of_each_kind(self):
        flags = ["--ac", "full"]
        ranks, _ = self.report(*flags, config=programs.ODD)
        plan = self.folder / "plan.json"
        programs.succeed([programs.BIN / "llama_plan", "--config", self.folder / "config.json",
                          "--batch", 12, "--seq", 16, "--dp", 2, "--json", plan, *flags])
        planned = json.loads(plan.read_text())["kinds"][0]
        for kind in ("parameters", "gradients", "optimizer", "activations"):
            self.assertLess(
                abs(planned[f"{kind}_bytes"] / ranks[0]["kinds"][kind]["most"] - 1), 0.02, kind)
