"""--output-dir: the folder of a run, and the file in it that makes the run again."""
import json
import re
import shutil
import subprocess
import unittest

import programs
import training_runs


class RunFolder(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.run = self.folder / "run"
        # Relative, as a user gives them.
        self.flags = ["--config", self.config.name, "--tokens", "t*.bin", "--steps", 6, "--batch", 4, "--seq", 16,
                      "--dropout", 0.1, "--shuffle", 5, "--lr", "1.2345678901234567e-3", "--schedule", "cosine",
                      "--betas", "0.8,0.99", "--ema", 0.5, "--zero", 2, "--no-sp", "--eval-tokens", self.tokens.name,
                      "--eval-every", 3, "--dp", 2, "--tp", 2]

    def start(self, *flags, ranks=4, **kwargs):
        command = programs.on_ranks(ranks, [programs.BIN / "llama_train", *flags])
        return programs.run(command, **kwargs)

    def assert_ends_well(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_its_configuration_makes_the_run_again(self):
        self.assert_ends_well(self.start(*self.flags, "--output-dir", "run", cwd=self.folder))
        self.assertEqual({path.name for path in self.run.iterdir()},
                         {"config.toml", "metrics.jsonl", "run.json", "tensorboard"})
        again = self.folder / "elsewhere/again"
        self.assert_ends_well(self.start("--config-file", self.run / "config.toml", "--output-dir", again, cwd="/"))
        same = training_runs.figures(self.run / "metrics.jsonl")
        self.assertEqual(len(same), 6)
        self.assertEqual(training_runs.figures(again / "metrics.jsonl"), same)
        records = [programs.read_metrics(run / "metrics.jsonl") for run in (self.run, again)]
        self.assertEqual(*[[record.get("eval_loss") for record in run] for run in records])
        texts = [(run / "config.toml").read_text().replace(str(run), "RUN") for run in (self.run, again)]
        self.assertEqual(*texts)
        self.assertEqual(json.loads((self.run / "run.json").read_text())["configuration"]["--weight-decay"], "0.1")

    def test_its_configuration_has_every_flag(self):
        one = ["--config", self.config, "--tokens", self.tokens, "--steps", 1]
        self.assert_ends_well(self.start(*one, "--output-dir", self.run, ranks=1))
        text = (self.run / "config.toml").read_text()
        usage = programs.succeed([programs.BIN / "llama_train", "--help-all"]).stdout
        names = set(re.findall(r"^  (?:-\w,)?--([a-z0-9-]+)", usage, re.MULTILINE)) - {"help", "help-all", "config-file"}
        self.assertGreater(len(names), 60)
        listed = set(re.findall(r"^(?:# )?([a-z0-9-]+) (?:=|is not given)", text, re.MULTILINE))
        self.assertEqual(names - listed, set())

    def test_another_run_leaves_it_alone(self):
        one = ["--config", self.config, "--tokens", self.tokens, "--steps", 2, "--output-dir", self.run]
        self.assert_ends_well(self.start(*one, ranks=1))
        before = {path: path.read_bytes() for path in self.run.rglob("*") if path.is_file()}
        done = self.start(*one, "--lr", 1, ranks=1)
        self.assertEqual((done.returncode, done.stderr),
                         (1, f"llama_train: --output-dir {self.run} has a run already (config.toml); give a new "
                             "folder, or --resume to continue that run\n"))
        self.assertEqual({path: path.read_bytes() for path in self.run.rglob("*") if path.is_file()}, before)

    def test_one_of_several_simultaneous_runs_gets_it(self):
        command = [programs.BIN / "llama_train", "--config", self.config, "--tokens", self.tokens, "--steps", 2,
                   "--output-dir", self.run]
        runs = [subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for _ in range(3)]
        errors = [run.communicate(timeout=60)[1].decode() for run in runs]
        self.assertEqual(sorted(run.returncode for run in runs), [0, 1, 1])
        self.assertEqual(sum("has a run already (config.toml)" in error for error in errors), 2)

    def test_a_resumed_run_continues_in_it(self):
        flags = ["--config", self.config, "--tokens", self.tokens, "--checkpoint-every", 2, "--output-dir", self.run]
        self.assert_ends_well(self.start(*flags, "--steps", 3, "--resume", "auto", ranks=1))
        self.assert_ends_well(self.start(*flags, "--steps", 5, "--resume", "auto", ranks=1))
        steps = [json.loads(line)["step"] for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual(steps, [1, 2, 3, 4, 5])
        self.assertTrue((self.run / "checkpoints/step-00000005").is_dir())
        for name, last in (("config.toml", 3), ("config-2.toml", 5)):
            self.assertIn(f"\nsteps = {last}\n", (self.run / name).read_text())
        self.assertEqual(len(list((self.run / "tensorboard").iterdir())), 2)
        for name in ("config.toml", "config-2.toml"):
            self.assert_ends_well(self.start("--config-file", self.run / name, "--output-dir", self.run, "--steps", 7,
                                             "--resume", "auto", ranks=1))
        self.assertIn("--output-dir THIS_FOLDER\n", (self.run / "config-4.toml").read_text())

    def test_a_run_that_resumes_nothing_is_no_other_run(self):
        """--resume auto in the folder of a run without checkpoints: that run again, or an error."""
        one = ["--config", self.config, "--tokens", self.tokens, "--steps", 2, "--output-dir", self.run]
        self.assert_ends_well(self.start(*one, ranks=1))
        before = (self.run / "metrics.jsonl").read_bytes()
        done = self.start(*one, "--resume", "auto", "--lr", 1, ranks=1)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertIn("has a run already (config.toml) with other flags, and no checkpoint that --resume auto continues", done.stderr)
        self.assertEqual((self.run / "metrics.jsonl").read_bytes(), before)
        again = self.folder / "again"
        for _ in range(2):
            self.assert_ends_well(self.start(*one, "--output-dir", again, "--checkpoint-every", 9, "--resume", "auto", ranks=1))
            shutil.rmtree(again / "checkpoints")
        self.assertEqual([path.name for path in again.glob("*.toml")], ["config.toml"])

    def test_a_folder_that_cannot_be_made_is_said(self):
        done = self.start("--config", self.config, "--tokens", self.tokens, "--output-dir", self.tokens / "run", ranks=1)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn(str(self.tokens / "run"), done.stderr)
