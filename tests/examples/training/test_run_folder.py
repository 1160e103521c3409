"""The files that a run writes: --output-dir, and --tensorboard, read by the package tensorboard."""

import json
import shutil
import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
import programs


class RunFolder(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.run = self.folder / "run"
        # The paths are relative, as users give them.
        self.flags = ["--config", self.config.name, "--tokens", "t*.bin", "--steps", 6, "--batch", 4, "--seq", 16,
                      "--dropout", 0.1, "--shuffle", 5, "--lr", "1.2345678901234567e-3", "--schedule", "cosine",
                      "--betas", "0.8,0.99", "--ema", 0.5, "--zero", 2, "--no-sp", "--eval-tokens", self.tokens.name,
                      "--eval-every", 3, "--dp", 2, "--tp", 2]

    def start(self, *flags, ranks=4, **kwargs):
        command = programs.on_ranks(ranks, [programs.BIN / "llama_train", *flags])
        programs.succeed(command, **kwargs)

    def test_configuration_reproduces_the_run(self):
        self.start(*self.flags, "--output-dir", "run", cwd=self.folder)
        self.assertEqual({path.name for path in self.run.iterdir()},
                         {"config.toml", "metrics.jsonl", "run.json", "tensorboard"})
        again = self.folder / "elsewhere/again"
        self.start("--config-file", self.run / "config.toml", "--output-dir", again, cwd="/")
        same = programs.figures(self.run / "metrics.jsonl")
        self.assertEqual(len(same), 6)
        self.assertEqual(programs.figures(again / "metrics.jsonl"), same)
        records = [programs.read_metrics(run / "metrics.jsonl") for run in (self.run, again)]
        self.assertEqual(*[[record.get("eval_loss") for record in run] for run in records])
        texts = [(run / "config.toml").read_text().replace(str(run), "RUN") for run in (self.run, again)]
        self.assertEqual(*texts)
        self.assertEqual(json.loads((self.run / "run.json").read_text())["configuration"]["--weight-decay"], "0.1")

    def contents(self):
        """Returns the files of the run, without checkpoints, for which --resume makes a folder."""
        return {path: path.read_bytes() for path in self.run.rglob("*") if path.is_file() and path.parent.name != "checkpoints"}

    def test_other_runs_do_not_change_the_folder(self):
        """In the folder of a run without checkpoints, --resume auto repeats the run, or is refused for other flags."""
        one = ["--config", self.config, "--tokens", self.tokens, "--steps", 2, "--output-dir", self.run]
        self.start(*one, ranks=1)
        before = self.contents()
        for flags, end in (([], "; pass a new folder, or --resume to continue the run"),
                           (["--resume", "auto"], " with other flags and no checkpoint, so --resume auto can't continue the run; pass a new folder")):
            self.refuse([programs.BIN / "llama_train", *one, "--lr", 1, *flags],
                        f"llama_train: --output-dir {self.run} already has a run (config.toml){end}\n")
        self.assertEqual(self.contents(), before)
        again = self.folder / "again"
        for _ in range(2):
            self.start(*one, "--output-dir", again, "--checkpoint-every", 9, "--resume", "auto", ranks=1)
            shutil.rmtree(again / "checkpoints")
        self.assertEqual([path.name for path in again.glob("*.toml")], ["config.toml"])

    def test_one_of_several_concurrent_runs_uses_the_folder(self):
        command = [programs.BIN / "llama_train", "--config", self.config, "--tokens", self.tokens, "--steps", 2,
                   "--output-dir", self.run]
        runs = [subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for _ in range(3)]
        errors = [run.communicate(timeout=60)[1].decode() for run in runs]
        self.assertEqual(sorted(run.returncode for run in runs), [0, 1, 1])
        self.assertEqual(sum("already has a run (config.toml)" in error for error in errors), 2)

    def test_resumed_run_continues_in_the_same_folder(self):
        flags = ["--config", self.config, "--tokens", self.tokens, "--checkpoint-every", 2, "--output-dir", self.run]
        self.start(*flags, "--steps", 3, "--resume", "auto", ranks=1)
        self.start(*flags, "--steps", 5, "--resume", "auto", ranks=1)
        steps = [json.loads(line)["step"] for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual(steps, [1, 2, 3, 4, 5])
        self.assertTrue((self.run / "checkpoints/step-00000005").is_dir())
        for name, last in (("config.toml", 3), ("config-2.toml", 5)):
            self.assertIn(f"\nsteps = {last}\n", (self.run / name).read_text())
        self.assertEqual(len(list((self.run / "tensorboard").iterdir())), 2)
        for name in ("config.toml", "config-2.toml"):
            self.start("--config-file", self.run / name, "--output-dir", self.run, "--steps", 7, "--resume", "auto", ranks=1)
        self.assertIn("--output-dir THIS_FOLDER\n", (self.run / "config-4.toml").read_text())

    def test_error_names_a_folder_that_cannot_be_created(self):
        self.refuse([programs.BIN / "llama_train", "--config", self.config, "--tokens", self.tokens, "--output-dir",
                     self.tokens / "run"], self.tokens / "run")


class TensorBoard(programs.InFolder):
    def scalars(self):
        """{tag: [(step, value)]}"""
        events = EventAccumulator(str(self.folder / "run/tensorboard")).Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def test_metrics_have_torchtitans_names(self):
        programs.train(["--config", self.config, "--tokens", self.tokens, "--batch", 4, "--seq", 16, "--steps", 4, "--peak-flops",
                        1e12, "--eval-tokens", self.tokens, "--eval-every", 2, "--output-dir", self.folder / "run"], dp=2)
        records, scalars = programs.read_metrics(self.folder / "run/metrics.jsonl"), self.scalars()
        for tag, key, factor in (("loss_metrics/global_avg_loss", "loss", 1), ("grad_norm", "grad_norm", 1),
                                 ("lr", "lr", 1), ("throughput(tps)", "tokens_per_s", 1 / 2),
                                 ("tflops", "tflops", 1), ("mfu(%)", "mfu", 1), ("n_tokens_seen", "step", 64),
                                 ("time_metrics/end_to_end(s)", "step_time_s", 1),
                                 ("time_metrics/data_loading(s)", "data_time_s", 1),
                                 ("memory/max_resident(GiB)", "peak_memory_bytes", 2.0 ** -30)):
            with self.subTest(tag):
                self.assertEqual([step for step, _ in scalars[tag]], [1, 2, 3, 4])
                for (_, value), record in zip(scalars[tag], records):
                    self.assertAlmostEqual(value, factor * record[key], delta=1e-6 * abs(value))  # fp32
        (first, _), (second, loss) = scalars["validation_metrics/loss"]
        self.assertEqual((first, second), (2, 4))
        self.assertAlmostEqual(loss, records[3]["eval_loss"], delta=1e-5)

    def test_metrics_of_experts_are_in_all_outputs(self):
        run = self.folder / "run"
        programs.train(["--config", programs.write_config(self.folder, programs.MOE), "--tokens", self.tokens, "--batch", 4, "--seq", 16,
                        "--steps", 3, "--output-dir", run], ep=2)
        records, scalars = programs.read_metrics(run / "metrics.jsonl"), self.scalars()
        for key, tag in (("router_aux_loss", "load_balancing_loss"), ("router_z_loss", "z_loss"), ("expert_load", "largest_over_mean")):
            values = [record[key] for record in records]
            self.assertTrue(all(value > (0 if key == "router_z_loss" else 1) for value in values), values)
            self.assert_close([value for _, value in scalars[f"experts/{tag}"]], values)
        self.assertEqual([record["dropped_tokens"] for record in records], [0] * 3)
        programs.succeed([sys.executable, programs.ROOT / "tools/tessera_plot.py", "run", run / "metrics.jsonl", "--out", self.folder / "p.html"])
        page = (self.folder / "p.html").read_text()
        for title in ("Load of experts", "Load-balancing loss", "Router z-loss"):
            self.assertIn(title, page)
