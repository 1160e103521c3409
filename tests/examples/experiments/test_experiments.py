"""Tests of examples/experiments, which compares runs, keeps finished ones, and shows a report."""
import importlib
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import programs

EXPERIMENTS = programs.ROOT / "examples" / "experiments"
RUN = EXPERIMENTS / "run"
sys.path[:0] = [str(EXPERIMENTS), str(programs.ROOT / "tools")]
experiment = importlib.import_module("experiment")
jobs = importlib.import_module("jobs")
plot = importlib.import_module("tessera_plot")
results = importlib.import_module("results")

MESHES = """
[[run]]
name = "one rank"
[[run]]
name = "TP 2"
tp = 2
"""


class Experiments(programs.InFolder):
    def write(self, body, steps=4, **names):
        """Writes the file of an experiment on small data: `names`, some flags, and `body`."""
        names = {"perturbed": 1} | names
        top = "".join(f"{name} = {json.dumps(value)}\n" for name, value in names.items())
        file = self.folder / "some.toml"
        file.write_text(f'{top}[flags]\nconfig = "config.json"\ntokens = "t.bin"\nsteps = {steps}\nbatch = 8\n'
                        f'seq = 32\nlr = 3e-3\n{body}')
        return file

    def run_file(self, file, code=None):
        """Runs the experiment of a file, which must end with this code if one is given."""
        command = [sys.executable, RUN, file, "--bin", programs.BIN, "--out", self.folder / "out"]
        done = programs.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.assertIn(code, (None, done.returncode), done.stdout + done.stderr)
        return done

    def report(self):
        return json.loads((self.folder / "out/report.json").read_text())

    def row(self, name):
        return next(row for row in self.report()["runs"] if row["name"] == name)

    def test_equal_meshes_pass_and_finished_runs_are_kept(self):
        self.assertIn("all 2 runs are as expected", self.run_file(self.write(MESHES), 0).stdout)
        row = self.row("TP 2")
        self.assertEqual((row["verdict"], row["rule"], row["ranks"]), ("same", "fp32", 2))
        self.assertGreater(row["loss"]["largest"] + row["grad_norm"]["largest"], 0)
        self.assertLess(max(row[figure]["found_from"] for figure in results.FIGURES), 1e-5)
        metrics = programs.read_metrics(self.folder / "out/runs" / jobs.folder_name("TP 2") / "metrics.jsonl")
        self.assertEqual(row["curves"]["loss"], [step["loss"] for step in metrics])
        self.assertEqual(row["comm_bytes"]["tp"], sum(call["bytes"] for call in metrics[-1]["comm"]["tp"].values()))
        self.assertEqual(row["memory_bytes"], max(step["peak_active_bytes"] for step in metrics))
        self.assertEqual(row["memory_percent"], 100 * row["memory_bytes"] / self.row("one rank")["memory_bytes"])
        page = (self.folder / "out/report.html").read_text()
        for part in ("<svg", "prefers-color-scheme:dark", "bytes that the rank puts in", "TP 2"):
            self.assertIn(part, page)
        # One run is made to look unfinished, and another run gets other flags.
        (self.folder / "out/runs" / jobs.folder_name("one rank") / "done.json").unlink()
        again = self.run_file(self.write(MESHES + "sp = false\n")).stdout
        for part in ("one rank: 4 steps in", "TP 2: 4 steps in", "one rank, last bits 1: 4 steps, kept"):
            self.assertIn(part, again)

    def test_each_run_has_its_folder_and_no_other_files_are_deleted(self):
        (self.folder / "out").mkdir()
        notes = programs.write(self.folder / "out/notes.txt", "mine")
        body = "".join(f"[[run]]\nname = {json.dumps(name)}\n" for name in ("..", "a b", "a-b"))
        self.run_file(self.write(body, steps=1), 0)
        self.assertEqual(notes.read_text(), "mine")
        self.assertEqual(len(list((self.folder / "out/runs").iterdir())), 3 + 1)
        # A finished run is kept only if its metrics exist.
        (self.folder / "out/runs" / jobs.folder_name("a b") / "metrics.jsonl").unlink()
        again = self.run_file(self.folder / "some.toml").stdout
        for part in ("a b: 1 steps in", "a-b: 1 steps, kept"):
            self.assertIn(part, again)

    def test_foreign_folders_are_refused(self):
        file = self.write(MESHES, steps=1)
        run = self.folder / "out/runs" / jobs.folder_name("TP 2")
        run.mkdir(parents=True)
        (run / "thesis.txt").write_text("mine")
        self.assertIn("out has runs, but no experiment wrote", self.run_file(file).stderr)
        (self.folder / "out/experiment.json").write_text(json.dumps({"file": str(self.folder / "other.toml")}))
        self.assertIn("other.toml; pass another folder as --out", self.run_file(file).stderr)
        (self.folder / "out/experiment.json").write_text(json.dumps({"file": str(file.resolve())}))
        done = self.run_file(file, 2)
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("is not the folder of a run", done.stderr)
        self.assertEqual((run / "thesis.txt").read_text(), "mine")

    def test_unsummed_norm_gradient_is_detected(self):
        file = self.write(MESHES, program="llama_unsummed_norm")
        self.assertIn("TP 2: different, expected same: ", self.run_file(file, 1).stdout)
        self.assertEqual(self.row("TP 2")["grad_norm"]["first_beyond"], 1)
        self.assertGreater(self.row("TP 2")["grad_norm"]["share"], 3)
        # Without tensor parallelism, the gradient of the norm needs no such sum.
        self.write(MESHES + "[[run]]\nname = \"1-D\"\ndp = 2\n", program="llama_unsummed_norm")
        self.assertEqual(self.run_file(file).stdout.count("kept"), 3)
        self.assertEqual(self.row("1-D")["verdict"], "same")

    def test_bf16_runs_are_judged_by_bf16_rounding(self):
        body = (MESHES + 'param-dtype = "bf16"\n[[run]]\nname = "another rate"\nlr = 0.006\nparam-dtype = "bf16"\n'
                'expect = "different"\n')
        done = self.run_file(self.write(body, steps=6), 0)
        self.assertIn("one rank, bf16's last bits 3", done.stdout)
        self.assertIn("one rank, of seed 2", done.stdout)
        row = self.row("TP 2")
        self.assertEqual((row["rule"], row["verdict"], row["weak"]), ("bf16", "same", True))
        # The gradient norm of bf16 runs differs by up to 3e-3, so that the comparison is weak.
        self.assertTrue(results.WEAK < row["grad_norm"]["found_from"] < 1)
        self.assertIn("(weak: finds faults from ", done.stdout)

    def test_each_axis_value_has_its_reference(self):
        file = self.write('[[axis]]\nname = "batch"\nvalues = [4, 6]\n[[axis]]\nname = "reshard"\n[axis.values]\n'
                          '"all" = { dp = 2, reshard-last = true }\n"most" = { dp = 2 }\n"bad" = { dp = 2, zero = 2, reshard-last = true }\n',
                          separate=["batch"], steps=2)
        done = self.run_file(file, 1)
        self.assertEqual(self.row("batch 6, reshard most")["reference"], "batch 6, reshard all")
        self.assertEqual(self.row("batch 6, reshard most")["verdict"], "same")
        self.assertIn("batch 4, reshard bad: failed: ", done.stdout)
        self.assertIn("--reshard-last is given with --zero 2", self.row("batch 4, reshard bad")["error"])
        self.assertIn("2 of 6 runs are not as expected", done.stdout)
        # With reshard-last, the last block and the final norm with the head are gathered again in backward.
        calls = {name: self.row(f"batch 4, reshard {name}")["comm"]["dp"]["all_gather"]["calls"] for name in ("all", "most")}
        self.assertEqual(calls["all"], calls["most"] + 2)

    def test_an_interrupted_experiment_continues(self):
        body = MESHES.replace("tp = 2", "tp = 2\nsteps = 4000")
        file = self.write(body, steps=2)
        command = [sys.executable, RUN, file, "--bin", programs.BIN, "--out", self.folder / "out"]
        metrics = self.folder / "out/runs" / jobs.folder_name("TP 2") / "metrics.jsonl"
        process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        latest = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < latest:
            time.sleep(0.05)
        self.assertIn("another process uses", self.run_file(file).stderr)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, err)
        self.assertEqual(err, "experiments: interrupted; run the command again to continue\n")
        self.assertFalse((self.folder / "out/report.json").exists())
        self.assertIn("one rank: 2 steps, kept", self.run_file(self.write(MESHES, steps=2), 0).stdout)

    def test_bad_files_are_one_line(self):
        (self.folder / "odd.json").write_text(json.dumps(programs.ODD))
        for body, names, message in [
                ("", {}, "fewer than two runs"),
                (MESHES, {"titel": "x"}, 'did you mean "title"?'),
                (MESHES, {"separate": ["bacth"]}, 'separate has "bacth", a flag that no run has'),
                (MESHES, {"program": "llama_trian"}, "is not a program; build the program"),
                (MESHES + 'metrics = "m"\n', {}, '"metrics", which the experiment sets for each run'),
                (MESHES + "seed = 1\n", {}, "write seeds = [...] instead"),
                (MESHES + 'dp-replicate = "2"\n', {}, 'dp-replicate = "2" is not a number of ranks'),
                (MESHES + MESHES, {}, 'two runs have the name "one rank"'),
                (MESHES + '[[axis]]\nname = "sp"\n', {}, "an [[axis]] needs a name, and values"),
                (MESHES, {"perturbed": -1}, "perturbed = -1 leaves no runs"),
                (MESHES, {"seeds": [2 ** 63]}, "from 0 to 9223372036854775807"),
                (MESHES + 'text = "some.toml"\nconfig = "odd.json"\n', {}, "has text without a tokenizer, so tokens are bytes, but odd.json has a vocabulary of 1009"),
                (MESHES + '[[run]]\nname = "one rank, last bits 1"\n', {}, "has the name of a run that the experiment adds"),
                (MESHES + "= 1\n", {}, "can't read")]:
            with self.subTest(message):
                self.assertRegex(self.run_file(self.write(body, **names), 2).stderr,
                                 rf"^experiments: .*{re.escape(message)}.*\n\Z")
        self.assertIn("No such file", self.run_file(self.folder / "none.toml").stderr)

    def test_all_output_flags_are_set_by_the_experiment(self):
        text = programs.succeed([programs.BIN / "llama_train", "--help-all"]).stdout
        files = set(re.findall(r"^  --([a-z-]+) (?:DIR|FILE)", text, re.M))
        read = {"model", "config", "text", "tokenizer", "eval-text"}
        self.assertEqual(files - read - set(experiment.OWN), set())
        self.assertEqual(read - files, set())
        self.assertEqual(set(re.findall(r"^  --([a-z-]+) N .*(?:degree|replicas)", text, re.M)), set(experiment.DEGREES))

    def test_provided_experiments_have_the_expected_runs(self):
        sizes = {file.stem: len(experiment.read(file).runs) for file in EXPERIMENTS.glob("*.toml")}
        self.assertEqual(sizes, {"memory": 27, "mesh_1d_2d": 5, "tensor_parallel": 9})


class Parts(unittest.TestCase):
    def test_flip_changes_half_of_the_values(self):
        values = [1.0, -0.5, 3.14159, 1e-30] * 500
        header = json.dumps({"w": {"dtype": "F32", "shape": [40, 50], "data_offsets": [0, 8000]},
                             "i": {"dtype": "I32", "shape": [1], "data_offsets": [8000, 8004]},
                             "norm": {"dtype": "F32", "shape": [1], "data_offsets": [8004, 8008]}}).encode()
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "m.safetensors")
        path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2000fif", *values, 7, 1.0))
        before = struct.unpack("<2000Iif", path.read_bytes()[8 + len(header):])
        for bit in (0, 16):
            jobs.flip(path, 1, bit)
            after = struct.unpack("<2000Iif", path.read_bytes()[8 + len(header):])
            self.assertEqual(after[-2:], (7, 1.0))
            self.assertEqual({a ^ b for a, b in zip(before[:-2], after[:-2])}, {0, 1 << bit})
            self.assertLess(abs(sum(a != b for a, b in zip(before, after)) - 1000), 150)
            jobs.flip(path, 1, bit)

    def test_allowance_for_rounded_metrics_is_small(self):
        flags = {"batch": 16, "seq": 4096}
        asked = experiment.Experiment("x", pathlib.Path("/x.toml"), "x", [0], 1, [], flags,
                                      [experiment.Run("one", flags, 0), experiment.Run("two", flags | {"dp": 2}, 0)])
        figures = {"one": 5.0, "one, last bits 1": 5.0 + 2.0 ** -21}
        outcomes = {name: jobs.Outcome([{"loss": value, "grad_norm": value}]) for name, value in figures.items()}
        limit, = results.allowed_of(asked, asked.runs[1], outcomes)["loss"]
        self.assertLess(limit, 5e-4)
        self.assertGreater(limit, 2 * 256 * 5 * 2.0 ** -24)

    def test_worst_step_decides_the_verdict(self):
        found = results.compare([1.0, 2.0, 3.5], [1.0, 2.1, 3.0], [0.0, 0.2, 0.1])
        self.assertAlmostEqual(found["share"], 5)
        self.assertEqual((found["step"], found["first_beyond"], found["largest"]), (3, 3, 0.5))
        self.assertEqual(results.compare([float("nan")], [1.0], [1e9])["share"], float("inf"))

    def test_curves_that_touch_zero_are_drawn(self):
        drawn = plot.runs_chart("x", "", [("a", 1, [0.0, 1e-7, None, 1e-3])], logarithmic=True)
        self.assertIn("<svg", drawn)
        self.assertNotIn("nan", drawn)
        self.assertIn("No difference", plot.runs_chart("x", "", [("a", 1, [0.0])], logarithmic=True))
        self.assertIn("no finite values", plot.runs_chart("x", "", [("a", 1, [None])]))
