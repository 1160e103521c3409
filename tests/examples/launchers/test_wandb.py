"""tools/metrics_to_wandb.py, with a module in wandb's place that writes down how it is called."""
import json
import os
import subprocess
import sys
import unittest

import programs

SCRIPT = programs.ROOT / "tools" / "metrics_to_wandb.py"
STUB = '''
import json, os, pathlib


class Run:
    def __init__(self, arguments):
        self.dir = str(pathlib.Path(arguments["dir"] or ".", "wandb", "offline-run-1", "files"))
        self.calls = {"init": arguments, "mode": os.environ.get("WANDB_MODE"), "log": []}
    def log(self, numbers, step):
        self.calls["log"].append([step, numbers])
    def finish(self):
        pathlib.Path(os.environ["CALLS"]).write_text(json.dumps(self.calls))

def init(**arguments):
    return Run(arguments)
'''


class TestMetricsToWandb(programs.InFolder):
    def setUp(self):
        super().setUp()
        (self.folder / "wandb.py").write_text(STUB)

    def send(self, *arguments, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment |= {"PYTHONPATH": str(self.folder), "CALLS": str(self.folder / "calls.json"),
                        "PYTHONDONTWRITEBYTECODE": "1"} | variables
        return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], env=environment, cwd=self.folder,
                              capture_output=True, text=True, timeout=60)

    def calls(self, *arguments, **variables):
        done = self.send(*arguments, **variables)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads((self.folder / "calls.json").read_text()), done.stdout

    def write(self, *lines):
        file = self.folder / "metrics.jsonl"
        file.write_text("".join(lines))
        return file

    def test_sends_a_run_of_llama_train(self):
        run = self.folder / "run"
        programs.train(["--config", self.config, "--tokens", self.tokens, "--steps", 3, "--batch", 2, "--seq", 16,
                        "--lr", 0.002, "--output-dir", run], dp=2)
        calls, out = self.calls(run, "--project", "p", "--name", "n")
        records = programs.read_metrics(run / "metrics.jsonl")
        self.assertEqual([step for step, _ in calls["log"]], [1, 2, 3])
        for (_, numbers), record in zip(calls["log"], records):
            self.assertEqual((numbers["loss"], numbers["lr"]), (record["loss"], record["lr"]))
            traffic = {f"comm/{group}/{name}/{what}": number for group, names in record["comm"].items()
                       for name, counts in names.items() for what, number in counts.items()}
            self.assertEqual({name: number for name, number in numbers.items() if name.startswith("comm/")}, traffic)
            self.assertIn("comm/dp/all_gather/bytes", traffic)
            self.assertNotIn("step", numbers)
        init = calls["init"]
        self.assertEqual((init["project"], init["name"], init["id"], init["resume"]), ("p", "n", None, None))
        self.assertEqual((init["config"]["lr"], init["config"]["dp"]), (0.002, 2))
        self.assertIn("3 steps are in wandb/offline-run-1\n", out)

    def test_is_offline_by_default(self):
        file = self.write('{"step": 1, "loss": 2.5}\n')
        self.assertEqual(self.calls(file)[0]["mode"], "offline")
        self.assertEqual(self.calls(file, WANDB_MODE="online")[0]["mode"], "online")

    def test_leaves_out_what_is_not_known(self):
        file = self.write('{"step": 1, "loss": null, "mfu": null, "lr": 0.5, "skipped": false}\n',
                          '{"step": 2, "loss": NaN, "lr": 0.25}\n', '{"step": 3, "lo')
        self.assertEqual(self.calls(file)[0]["log"], [[1, {"lr": 0.5, "skipped": False}], [2, {"lr": 0.25}]])

    def test_continues_a_run(self):
        init = self.calls(self.write('{"step": 1, "loss": 2.5}\n'), "--id", "abc")[0]["init"]
        self.assertEqual((init["id"], init["resume"], init["config"]), ("abc", "allow", {}))

    def test_errors_are_one_line(self):
        good = '{"step": 1, "loss": 2.5}\n'
        (self.folder / "wandb.py").write_text("raise ImportError('No module named wandb')")
        for lines, message in ((None, "there is no metrics file"),
                               ([good, "x\n"], "line 2 of "),
                               ([good, "[]\n"], "is no record of llama_train's metrics"),
                               ([good, good], "is of step 1, after step 1"),
                               (['{"step": 1, "lo'], "has no whole line yet"),
                               ([good], "No module named wandb; install it for this Python with: ")):
            with self.subTest(message):
                done = self.send(self.write(*lines) if lines else self.folder / "none")
                self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
                self.assertTrue(done.stderr.startswith("error: "), done.stderr)
                self.assertIn(message, done.stderr)
