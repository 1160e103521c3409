"""--tensorboard, read with TensorBoard's own reader."""
import shutil
import unittest

import programs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class TensorBoard(programs.InFolder):
    def train(self, *flags, dp=1):
        programs.train(["--config", self.config, "--tokens", self.tokens, "--batch", 4, "--seq", 16,
                        "--tensorboard", self.folder / "tb", "--metrics", self.folder / "m.jsonl", *flags], dp)

    def scalars(self):
        """{tag: [(step, value)]}"""
        events = EventAccumulator(str(self.folder / "tb")).Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def assert_shows(self, tag, values):
        shown = self.scalars()[tag]
        self.assertEqual([step for step, _ in shown], list(range(1, len(values) + 1)))
        for (_, value), want in zip(shown, values):
            self.assertAlmostEqual(value, want, delta=1e-6 * abs(want))  # fp32

    def test_shows_the_metrics_under_torchtitans_names(self):
        self.train("--steps", 4, "--peak-flops", 1e12, "--eval-tokens", self.tokens, "--eval-every", 2, dp=2)
        records = programs.read_metrics(self.folder / "m.jsonl")
        for tag, key, factor in (("loss_metrics/global_avg_loss", "loss", 1), ("grad_norm", "grad_norm", 1),
                                 ("lr", "lr", 1), ("throughput(tps)", "tokens_per_s", 1 / 2),
                                 ("tflops", "tflops", 1), ("mfu(%)", "mfu", 1),
                                 ("time_metrics/end_to_end(s)", "step_time_s", 1),
                                 ("time_metrics/data_loading(s)", "data_time_s", 1),
                                 ("memory/max_resident(GiB)", "peak_memory_bytes", 2.0 ** -30)):
            with self.subTest(tag):
                self.assert_shows(tag, [factor * record[key] for record in records])
        self.assert_shows("n_tokens_seen", [64 * step for step in range(1, 5)])
        evaluated = self.scalars()["validation_metrics/loss"]
        self.assertEqual([step for step, _ in evaluated], [2, 4])
        self.assertAlmostEqual(evaluated[1][1], records[3]["eval_loss"], delta=1e-5)

    def test_a_resumed_run_shows_each_step_once_and_keeps_the_older_file(self):
        saved = ["--checkpoint", self.folder / "steps", "--checkpoint-every", 2]
        self.train("--steps", 6, *saved)
        first = {path: path.read_bytes() for path in (self.folder / "tb").iterdir()}
        shutil.rmtree(self.folder / "steps/step-00000006")  # as if the run had been killed in step 6
        self.train("--steps", 7, *saved, "--resume", "--lr", 1e-4)
        self.assertEqual(len(list((self.folder / "tb").iterdir())), 2)
        for path, text in first.items():
            self.assertEqual(path.read_bytes(), text)
        records = programs.read_metrics(self.folder / "m.jsonl")
        self.assertEqual(len(records), 7)
        self.assert_shows("loss_metrics/global_avg_loss", [record["loss"] for record in records])
