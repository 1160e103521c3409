"""The trace of a run: what each rank did in a step, in sums that are those of the metrics."""
import json
import unittest

import programs
import training_runs


def slices(events, category, rank=0):
    return [e for e in events if e.get("cat") == category and e["ph"] == "X" and e["pid"] == rank]


def sums(calls):
    """As `comm` of the metrics."""
    comm = {}
    for call in calls:
        args = call["args"]
        entry = comm.setdefault(args["mesh_dimension"], {}).setdefault(
            args["collective"], {"calls": 0, "bytes": 0})
        entry["calls"] += 1
        entry["bytes"] += args["bytes"]
    return comm


class Trace(programs.InFolder):
    def flags(self, *more):
        return ["--config", self.config, "--tokens", self.tokens, "--batch", 8, "--seq", 16, *more]

    def train(self, *more, dp=2, tp=2):
        programs.train(self.flags("--trace", self.folder / "trace.json", "--metrics",
                                  self.folder / "m.jsonl", *more), dp, tp)
        return (json.loads((self.folder / "trace.json").read_text())["traceEvents"],
                programs.read_metrics(self.folder / "m.jsonl"))

    def test_calls_and_bytes_are_those_of_the_metrics(self):
        events, metrics = self.train("--steps", 4, "--trace-steps", "2:3", "--ac", "full")
        for record in metrics[1:3]:
            calls = [c for c in slices(events, "collective") if c["args"]["step"] == record["step"]]
            self.assertEqual(sums(calls), record["comm"])
        steps = slices(events, "step")
        self.assertEqual([step["name"] for step in steps], ["step 2", "step 3"])
        held_up = sum(call["args"]["exposed_us"] for call in slices(events, "collective"))
        self.assertLess(held_up, sum(step["dur"] for step in steps))
        self.assertEqual({event["pid"] for event in events}, {0, 1, 2, 3})

    def test_a_step_is_shown_from_the_batch_to_the_optimizer(self):
        events, _ = self.train("--steps", 2, dp=2, tp=1)
        self.assertEqual([scope["name"] for scope in slices(events, "scope", rank=1)],
                         ["load batch", "clip_grad_norm_", "optimizer step"])
        for category in ("forward", "backward"):
            names = [module["name"] for module in slices(events, category, rank=1)]
            self.assertIn("model.layers.1.self_attn", names)
        names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        self.assertEqual(names, ["rank 0: dp=0, tp=0", "rank 1: dp=1, tp=0"])

    def test_profile_has_the_operators_of_the_last_step(self):
        file = self.folder / "profile.json"
        programs.train(self.flags("--steps", 3, "--profile", file), dp=2, tp=1)
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == "cpu_op"]
        # Two layers of seven products, and the head: forward once, backward twice, in one step. Of a layer three are added to
        # others in backward: two of query, key and value, and one of gate and up.
        def calls(name):
            return sum(e["name"] == name for e in events)
        self.assertEqual((calls("aten::mm"), calls("aten::addmm_")), (3 * (2 * 7 + 1) - 2 * 3, 2 * 3))
        self.assertTrue(all(e["dur"] >= 0 for e in events))
        self.assertEqual([path.name for path in self.folder.glob("profile*")], ["profile.json"])

    def test_steps_that_are_not_made_are_refused(self):
        def refused(*flags):
            done = programs.run([programs.BIN / "llama_train", *self.flags("--steps", 3, *flags)])
            self.assertEqual(done.returncode, 1)
            return done.stderr
        self.assertIn("without --trace", refused("--trace-steps", "1:2"))
        trace = ["--trace", self.folder / "t.json", "--trace-steps"]
        self.assertIn("give A:B", refused(*trace, "3:2"))
        self.assertIn("give A:B", refused(*trace, "2"))
        self.assertIn("ends after --steps 3", refused(*trace, "2:4"))

    def test_a_resumed_run_traces_the_remaining_steps(self):
        def resumed(steps, *trace):
            done = programs.run([programs.BIN / "llama_train", *self.flags(
                "--checkpoint", self.folder / "steps", "--resume", "auto", "--steps", steps, *trace)])
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stderr
        trace = ["--trace", self.folder / "out/trace.json", "--trace-steps"]
        resumed(3)
        self.assertIn("--trace-steps 2:3: the run continues after step 3, and writes no trace",
                      resumed(4, *trace, "2:3"))
        self.assertFalse((self.folder / "out").exists())
        self.assertIn("--trace-steps 2:6: the run continues after step 4, and traces steps 5:6",
                      resumed(7, *trace, "2:6"))
        events = json.loads((self.folder / "out/trace.json").read_text())["traceEvents"]
        self.assertEqual([step["name"] for step in slices(events, "step")], ["step 5", "step 6"])

    def test_a_file_that_can_not_be_written_is_refused_before_the_first_step(self):
        (self.folder / "file").write_text("")
        before = set(self.folder.rglob("*"))
        for flag in ("--trace", "--memory-report"):
            for name, reason in ((self.folder, "no regular file"), (self.folder / "file/x.json", "Not a directory"),
                                 ("/proc/x.json", "No such file|Permission denied"), ("/dev/null", "no regular file")):
                with self.subTest(flag=flag, name=name):
                    done = programs.run(programs.on_ranks(2, [
                        programs.BIN / "llama_train", "--dp", 2, *self.flags("--steps", 3, flag, name)]))
                    self.assertEqual(done.returncode, 1)
                    self.assertRegex(done.stderr, f"can't write {flag} {name}.*({reason})")
                    self.assertNotIn("step:", done.stdout)
        self.assertEqual(set(self.folder.rglob("*")), before)

    def test_the_run_continues_if_they_can_not_be_written_later(self):
        flags = ["--batch", 8, "--seq", 16, "--steps", 40, "--trace", self.folder / "out/trace.json", "--trace-steps",
                 "38:39", "--memory-report", self.folder / "out/memory.json", "--save-hf", self.folder / "model"]
        with training_runs.Job(["--config", self.config, "--tokens", self.tokens, *flags], dp=2, tp=1) as job:
            job.wait_for_line("step:  1")
            (self.folder / "out").rmdir()
            code, errors = job.end()
        self.assertEqual(code, 0, errors)
        for flag in ("--trace", "--memory-report"):
            self.assertEqual(errors.count(f"llama_train: warning: {flag} was not written: cannot write"), 1, errors)
        self.assertTrue((self.folder / "model/model.safetensors").exists())
