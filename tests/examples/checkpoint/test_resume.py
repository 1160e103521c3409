"""A run that continues from a checkpoint equals the run that never stopped."""
import json
import shutil

import programs
import tokenizers_of_kinds as kinds
from programs import EVERY, STEPS


class Resume(programs.WithSharedFolder, programs.TrainingRuns):
    def setUp(self):
        """An unbroken run, the same for all tests, that has saved its steps 3, 6 and 8."""
        super().setUp()
        self.unbroken = self.shared / "unbroken"
        if not self.unbroken.exists():
            self.train(self.unbroken, [*self.checkpoints(self.unbroken), "--checkpoint-every", EVERY])

    def resume(self, name, dp, tp):
        run = self.broken_copy(name, self.unbroken)
        return self.train(name, [*self.checkpoints(run), "--resume"], dp, tp)

    def test_same_mesh_is_bit_equal(self):
        run = self.resume("resumed", 2, 2)
        self.assert_equal_runs(run, self.unbroken)
        self.assertTrue((run / "run.json").exists())
        # A run that saves equals a run that does not, and its metrics have the time of each save.
        self.assertEqual(["checkpoint_stall_s" in record
                          for record in programs.read_metrics(self.unbroken / "metrics.jsonl")],
                         [step in (EVERY + 1, 2 * EVERY + 1) for step in range(1, STEPS + 1)])
        self.assert_equal_runs(self.train("plain"), self.unbroken)

    def test_other_meshes_are_equal_up_to_rounding(self):
        want = programs.figures(self.unbroken / "metrics.jsonl")
        for dp, tp in [(1, 4), (3, 1)]:
            with self.subTest(dp=dp, tp=tp):
                run = self.resume(f"{dp}x{tp}", dp, tp)
                got = programs.figures(run / "metrics.jsonl")
                self.assertEqual(got[:EVERY], want[:EVERY])
                self.assert_close([row[1] for row in got], [row[1] for row in want])

    def test_every_optimizer_and_schedule_is_bit_equal(self):
        for name, mesh, flags in (
                ("muon", {"dp": 1, "cp": 2}, ["--optimizer", "muon", "--accumulate", 3, "--zero", 2, "--ema", 0.9,
                                              "--shuffle", 3, "--dropout", 0]),
                # A step of an fp16 run also has a loss scale; --no-async saves without a copy of the state.
                ("sgd", {"dp": 2}, ["--optimizer", "sgd", "--schedule", "wsd", "--offload", "--param-dtype", "fp16", "--no-async"]),
                ("moments", {"dp": 3}, ["--moment-dtype", "bf16"])):
            with self.subTest(name):
                run, few = self.folder / name, {**mesh, "tp": 1, "steps": 4}
                self.train(name, [*flags, *self.checkpoints(run), "--checkpoint-every", 2], **few)
                copy = self.broken_copy(f"{name}-resumed", run, step=2)
                self.train(copy, [*flags, *self.checkpoints(copy), "--resume"], **few)
                self.assert_equal_runs(copy, run)

    def test_moments_can_be_loaded_in_another_type(self):
        run = self.broken_copy("narrow", self.unbroken)
        self.train("narrow", [*self.checkpoints(run), "--resume", "--moment-dtype", "bf16"])
        got = programs.figures(run / "metrics.jsonl")
        want = programs.figures(self.unbroken / "metrics.jsonl")
        self.assertEqual(got[:EVERY + 1], want[:EVERY + 1])
        self.assertNotEqual(got[-1], want[-1])
        self.assert_close([row[1] for row in got], [row[1] for row in want], 1e-3)

    def test_auto_starts_in_an_empty_folder_and_then_resumes(self):
        run = self.folder / "run"
        flags = [*self.checkpoints(run), "--resume", "auto", "--keep", 2]
        # Both runs have the same --steps, and so the same schedule.
        self.train("run", [*flags, "--checkpoint-every", 2])
        self.assertEqual(sorted(p.name for p in (run / "steps").glob("step-*")),
                         ["step-00000006", "step-00000008"])
        weights = self.weights(run)
        self.train("run", flags)  # the run has all its steps already
        self.assertEqual(self.weights(run), weights)
        self.assertEqual(len(programs.figures(run / "metrics.jsonl")), STEPS)

    def test_later_steps_without_a_manifest_are_refused(self):
        run = self.folder / "other"
        shutil.copytree(self.unbroken, run)
        (run / "steps/step-00000008/manifest.json").unlink()
        shard = next((run / "steps").glob("step-00000006/shard-00001-*"))
        shard.write_bytes(b"")
        command = [programs.BIN / "llama_train", "--dp", 2, "--tp", 2, *self.flags(run), *self.checkpoints(run), "--resume"]
        programs.fail(programs.on_ranks(4, command), "step-00000008' has no manifest")
        self.assertTrue((shard.parent / "manifest.json").exists())

    def test_initial_load_with_excluded_data_and_optimizer(self):
        entries = self.entries(self.unbroken / "steps/step-00000008")
        self.assertEqual(entries["samples"], STEPS * programs.BATCH)
        self.tokens = programs.write_tokens(self.folder / "new.bin", programs.text_tokens(4000, 256))
        flags = ["--initial-load", self.unbroken / "steps", "--exclude", "optimizer,data",
                 "--resume", "auto", "--schedule", "constant"]
        whole, parts = self.folder / "whole", self.folder / "parts"
        self.train("whole", [*self.checkpoints(whole), *flags], steps=4)
        for steps in (2, 4):
            self.train("parts", [*self.checkpoints(parts), *flags], steps=steps)
        self.assert_equal_runs(parts, whole)
        self.assertEqual(self.entries(parts / "steps/step-00000002")["samples"], 2 * programs.BATCH)
        # The run begins with the loaded weights: its first loss is lower than that of a new model.
        first = programs.figures(self.unbroken / "metrics.jsonl")[0]
        self.assertLess(programs.figures(whole / "metrics.jsonl")[0][1], first[1] - 0.1)

    def entries(self, step):
        return json.loads((step / "manifest.json").read_text())["entries"]


class Refusals(programs.WithSharedFolder, programs.TrainingRuns):
    """Runs that are started in the folder of an earlier run of three steps, and refused."""

    def setUp(self):
        super().setUp()
        self.run_folder = self.shared / "run"
        self.steps = self.checkpoints(self.run_folder)
        if not self.run_folder.exists():
            self.train(self.run_folder, [*self.steps, "--checkpoint-every", 1], 1, 1, steps=3)

    def refuse(self, flags, *parts):
        done = programs.fail([programs.BIN / "llama_train", *self.flags(self.folder / "later", 4), *flags], timeout=60)
        lines = [line for line in done.stderr.splitlines() if all(p in line for p in parts)]
        self.assertTrue(lines, f"no line with {parts} in:\n{done.stderr}")
        self.assertLessEqual(len(done.stderr.splitlines()), 2, done.stderr)

    def test_invalid_folders_flags_and_models(self):
        step, empty = self.run_folder / "steps/step-00000003", self.checkpoints(self.folder / "none")
        (self.folder / "file").write_text("")
        resume, load = [*self.steps, "--resume"], ["--initial-load", step]
        for flags, words in (
                ([*empty, "--resume"], ["has no complete step", "--resume auto"]),
                ([*empty, "--resume-step", 5], ["no checkpoint in", "step-00000005"]),
                (["--checkpoint", self.folder / "file/steps"], ["--checkpoint", "file/steps"]),
                (self.steps, ["has steps of a run", "--resume"]),
                ([*self.steps, "--resume-step", 2], ["has later steps, up to 3"]),
                ([*resume, "--steps", 2], ["step 3", "--steps 2", "pass --steps 3"]),
                ([*resume, "--optimizer", "sgd"], ['--optimizer is "sgd" instead of "adamw"']),
                ([*load, "--ema", 0.9], ["the optimizer differs from", "--ema is 0.9 instead of left out", "--exclude optimizer"]),
                ([*load, "--save-hf", step], ["--initial-load", "are both", "different paths"])):
            with self.subTest(words):
                self.refuse(flags, *words)
        programs.train([*self.flags(self.folder / "other", 4), *load, "--optimizer", "sgd", "--exclude", "optimizer"])
        for changes, words in (({"rope_theta": 500.0}, ['"rope_theta" is 500.0 instead of 10000.0', "the config.json of the checkpoint"]),
                               ({"hidden_size": 32}, ['"hidden_size" is 32 instead of 64'])):
            with self.subTest(changes):
                programs.write_config(self.folder, programs.SMALL | changes)
                self.refuse(resume, *words)

    def test_no_complete_step(self):
        steps = self.folder / "run/steps"
        shutil.copytree(self.run_folder / "steps", steps)
        for step in steps.glob("step-*"):
            (step / "manifest.json").write_text("{}")
        programs.fail([programs.BIN / "llama_train", *self.flags(self.folder / "run"), "--checkpoint", steps,
                       "--resume", "auto"], "has steps, but no complete step")

    def test_changed_data_is_named(self):
        resume = [*self.steps, "--resume"]
        self.refuse([*resume, "--batch", 6], "batch is 6 instead of 12", "--exclude data")
        self.refuse([*resume, "--shuffle", 3], "shuffle is 3 instead of left out")
        tokens = programs.text_tokens(5000, 256)
        programs.write_tokens(self.tokens, tokens[:-1] + [255 - tokens[-1]])
        self.refuse(resume, 'files["t.bin"].sampled_crc32c is')
        programs.write_tokens(self.tokens, tokens[:-1])
        self.refuse(resume, 'files["t.bin"].bytes is 11022 instead of 11024')
        text = programs.write(self.folder / "text", "All work and no play makes Jack a dull boy. " * 100)
        flags = ["--text" if part == "--tokens" else text if part == self.tokens else part
                 for part in self.flags(self.folder / "later", 4)]
        programs.fail([programs.BIN / "llama_train", *flags, *resume], "text instead of tokens")
        programs.write_tokens(self.folder / "t2.bin", tokens)
        self.tokens = self.folder / "t*.bin"
        self.refuse(resume, "files has 2 entries instead of 1")
        # With --exclude data, the run continues with other data.
        run = self.folder / "run"
        shutil.copytree(self.run_folder, run)
        self.train("run", [*self.checkpoints(run), "--resume", "--exclude", "data"], 1, 1, steps=4)
        self.assertEqual(len(programs.figures(run / "metrics.jsonl")), 4)

    def test_added_tokenizer_config_file(self):
        tokenizer = self.folder / "tokenizer.json"
        kinds.digits(kinds.multilingual(20_000, seed=1)).save(str(tokenizer))
        config = programs.write_config(self.folder, programs.SMALL | {"vocab_size": 4000})
        text = programs.write(self.folder / "text", "All work and no play makes Jack a dull boy. " * 100)
        flags = ["--config", config, "--text", text, "--tokenizer", tokenizer, "--seq", 8, "--batch", 2, "--checkpoint",
                 self.folder / "steps"]
        programs.train([*flags, "--steps", 1])
        (self.folder / "tokenizer_config.json").write_text('{"additional_special_tokens": ["work"]}')
        programs.fail([programs.BIN / "llama_train", *flags, "--steps", 2, "--resume"],
                      "tokenizer.beside has 1 entries instead of 0")
        (self.folder / "tokenizer_config.json").unlink()
        programs.train([*flags, "--steps", 2, "--resume"])
