"""llama_train --verify: before the first step, a mesh is compared with one rank."""
import json
import pathlib
import re
import tempfile
import unittest

import programs

EQUAL = re.compile(r"verify: 29 modules and 21 parameters equal one rank's \(largest difference (\S+) of the largest value\)")


class Verify(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        config = programs.write_config(self.folder, programs.SMALL)
        text = self.folder / "text"
        text.write_text("A mesh computes what one rank does.\n" * 200)
        self.flags = ["--config", config, "--text", text, "--steps", 2, "--batch", 4, "--seq", 32]

    def output(self, *flags, **mesh):
        return programs.train([*self.flags, "--verify", *flags], **mesh).stdout

    def test_finds_every_mesh_equal(self):
        for mesh, flags in (({}, []), ({"tp": 2}, ["--no-sp", "--no-loss-parallel"]),
                            ({"dp": 2, "tp": 2}, ["--dropout", 0.1, "--zero", 2, "--accumulate", 2]),
                            ({"replicas": 2, "tp": 2}, ["--ac", "selective", "--document-mask", "--eos-token", 10])):
            with self.subTest(mesh=mesh, flags=flags):
                found = EQUAL.search(self.output(*flags, **mesh))
                self.assertIsNotNone(found)
                self.assertLess(float(found.group(1)), 1e-5)

    def test_allows_what_rounding_makes_in_half_types(self):
        for flags in (["--param-dtype", "bf16", "--reduce-dtype", "bf16"], ["--param-dtype", "fp16"]):
            with self.subTest(flags=flags):
                self.assertRegex(self.output(*flags, tp=2, dp=2), EQUAL)

    def test_says_that_outputs_of_split_sequences_are_not_compared(self):
        self.assertIn("verify: the loss and 21 parameters equal one rank's", self.output(cp=2, tp=2))
        self.assertIn("outputs are not compared", self.output("--document-mask", "--eos-token", 10, cp=2, dp=2))

    def test_looks_at_adapters_alone_where_these_are_trained(self):
        self.assertIn("verify: 57 modules and 28 parameters equal",
                      self.output("--lora-rank", 2, "--lora-dropout", 0.1, tp=2))

    def test_finds_split_sequences_of_replicas_equal(self):
        self.assertIn("verify: the loss and 21 parameters equal one rank's", self.output(replicas=2, cp=2))

    def test_finds_heads_that_several_ranks_compute_equal(self):
        few = programs.write_config(self.folder, programs.SMALL | {"num_key_value_heads": 2})
        self.assertRegex(self.output("--config", few, tp=4), EQUAL)
        self.assertIn("verify: 57 modules and 28 parameters equal", self.output("--config", few, "--lora-rank", 2, tp=4))

    def test_changes_nothing_of_the_training(self):
        steps = []
        for verified in ([], ["--verify"]):
            metrics = self.folder / f"metrics{len(steps)}.jsonl"
            programs.train([*self.flags, "--dropout", 0.1, "--metrics", metrics, *verified], dp=2, tp=2)
            steps.append([(step["loss"], step["grad_norm"], step["comm"])
                          for step in map(json.loads, metrics.read_text().splitlines())])
        self.assertEqual(*steps)

    def test_names_a_gradient_that_is_not_summed_on_every_rank(self):
        done = programs.run(programs.on_ranks(2, [programs.BIN / "llama_unsummed_norm", "--tp", 2, *self.flags,
                                                  "--verify"]))
        self.assertEqual(done.returncode, 1)
        errors = [line for line in done.stderr.splitlines() if "verify: " in line]
        self.assertIn(len(errors), (1, 2), done.stderr)  # the launcher may end the other rank before it prints its line
        self.assertRegex(errors[0], r"\[rank \d\] llama_unsummed_norm: verify: the gradient of parameter "
                                    r"'model\.norm\.weight', \[64\] on \(dp=1, tp=2\) as .* is not one rank's: "
                                    r"at \[.*; all outputs, .*are equal, so look at what computes this gradient")
        self.assertNotIn("step:", done.stdout)
