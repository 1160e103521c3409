"""Every tutorial runs, alone and on several ranks."""
import json
import pathlib
import re
import tempfile
import unittest

import programs


def losses_of(output):
    return [float(loss) for loss in re.findall(r"\bloss:? +(-?\d\S*)", output)]


class Tutorials(unittest.TestCase):
    def run_tutorial(self, name, *arguments, on=(1, 4)):
        """The outputs on these numbers of ranks."""
        for ranks in on:
            with self.subTest(name, ranks=ranks):
                program = [programs.BIN / f"tutorial_{name}", *arguments]
                yield programs.succeed(programs.on_ranks(ranks, program), timeout=120).stdout

    def test_each_prints_what_it_found(self):
        equal = "every gradient is as one rank computes it"
        with tempfile.TemporaryDirectory() as folder:
            for name, arguments, on, patterns in (
                    ("02_distributed_tensor", (), (1,), ["row sum 0"]),
                    ("02_distributed_tensor", (), (4,), [r"\(dp=2, tp=2\)", r"\[Partial\(sum\)\] -> \[Shard\(0\)\]"]),
                    ("04_operators", (), (1,), ["the product is"]),
                    ("04_operators", (), (4,), [r"the product is \[Partial\(sum\)\], the softmax \[Shard\(1\)\], "
                                                r"the gradients \[Shard\(1\)\] and \[Shard\(0\)\]"]),
                    ("06_fsdp", (), (1, 4), ["(?m)^up: ", "(?m)^down: "]),
                    ("07_communicator", (), (1, 4), ["summed by ordered_sums"]),
                    ("11_experts", (), (2,), [r"one of \d+ alike", "(?m)^ +ep +all_gather "]),
                    # A rank of ep has no experts.
                    ("11_experts", (3, 4), (4,), ["step 20 loss"]),
                    ("12_losses", (), (1, 2, 4), [equal]),
                    ("13_own_parameters", (), (1, 2, 4), [equal]),
                    ("16_plain_inference", (folder,), (1, 3), ["the plain model computes the same bits"])):
                for output in self.run_tutorial(name, *arguments, on=on):
                    for pattern in patterns:
                        self.assertRegex(output, pattern)

    def test_losses_fall(self):
        for name in ("03_train_2d", "06_fsdp", "08_your_own_module"):
            for output in self.run_tutorial(name):
                losses = losses_of(output)
                self.assertEqual(len(losses), 20)
                self.assertLess(losses[-1], losses[0])

    def test_losses_are_those_of_one_rank(self):
        """`fall`: the last loss as a share of the first one. `early`: the tolerance of the first three steps, before rounding
        has been multiplied by the steps."""
        for name, on, count, fall, early, late in (
                ("01_data_parallel", (2, 3, 4), 5, 0.8, 1e-4, 1e-4), ("09_gpt2", (4,), 20, 0.9, 2e-5, 2e-3),
                ("11_experts", (4,), 20, 1, 1e-3, 1e-3), ("14_your_own_program", (2, 4), 10, 0.2, 2e-2, 2e-2),
                ("15_torch_nn", (2, 4), 20, 0.8, 1e-3, 1e-3)):
            alone, *others = self.run_tutorial(name, on=(1, *on))
            want = losses_of(alone)
            self.assertEqual(len(want), count)
            self.assertLess(want[-1], fall * want[0])
            for output in others:
                for step, (one, same) in enumerate(zip(want, losses_of(output), strict=True)):
                    self.assertAlmostEqual(one, same, delta=(early if step < 3 else late) * one, msg=f"{name}, step {step}")

    def test_initial_weights_of_gpt2_are_those_of_one_rank(self):
        alone, four = (re.search(r"sum of parameters (-?\d+\.\d{10}\d*)", output)[1] for output in self.run_tutorial("09_gpt2"))
        self.assertEqual(alone, four)

    def test_gpt2_refuses_ranks_that_do_not_divide_its_batch(self):
        done = programs.run(programs.on_ranks(3, [programs.BIN / "tutorial_09_gpt2"]), timeout=120)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("a batch of 8 rows can't be split over dp=3", done.stderr)
        self.assertNotIn("loss", done.stdout)

    def test_your_own_program_writes_the_requested_files(self):
        with tempfile.TemporaryDirectory() as folder:
            list(self.run_tutorial("14_your_own_program", folder, on=(2,)))
            out = pathlib.Path(folder)
            events = json.loads((out / "profile.json").read_text())["traceEvents"]
            names = {event.get("name") for event in events}
            self.assertTrue({"Curve: forward", "Curve: backward"} <= names)
            self.assertEqual(len(list((out / "board").iterdir())), 1)
