"""llama_train --print-plan: what one process says of a run is what the run then counts."""
import json
import unittest

import programs


class PrintPlan(programs.InFolder):
    def plan(self, arguments, dp, tp, replicas=1, cp=1):
        """As JSON, by one process."""
        done = programs.succeed([programs.BIN / "llama_train", "--print-plan=json", *arguments,
                                 "--dp", dp, "--tp", tp, "--dp-replicate", replicas, "--cp", cp])
        return json.loads(done.stdout)

    @staticmethod
    def sums(plan):
        """Calls and bytes of all rows, as metrics have them."""
        comm = {}
        for row in [*plan["rows"], {"collectives": plan["elsewhere"]}]:
            for planned in row["collectives"]:
                kinds = comm.setdefault(planned["group"], {})
                entry = kinds.setdefault(planned["collective"], {"calls": 0, "bytes": 0})
                entry["calls"] += planned["calls"]
                entry["bytes"] += planned["bytes"]
        return comm

    def check(self, config, dp, tp, replicas=1, *flags, cp=1):
        arguments = ["--config", programs.write_config(self.folder, config), "--batch", 24, "--seq",
                     16, *flags]
        metrics = self.folder / "m.jsonl"
        programs.train([*arguments, "--tokens", self.tokens, "--steps", 2, "--metrics", metrics],
                       dp, tp, replicas, cp)
        self.assertEqual(self.sums(self.plan(arguments, dp, tp, replicas, cp)),
                         programs.read_metrics(metrics)[1]["comm"])

    def test_counts_what_a_run_counts(self):
        self.check(programs.ODD, 2, 2)
        self.check(programs.ODD, 1, 2, 2, "--no-sp", "--zero", 2, "--accumulate", 3)
        self.check(programs.SMALL, 2, 2, 1, "--ac", "full", "--no-loss-parallel")
        self.check(programs.TIED, 4, 1, 1, "--ac", "selective", "--param-dtype", "bf16")
        self.check(programs.ODD, 1, 2, 1, "--accumulate", 2, cp=2)

    def test_prints_a_table_without_data_or_other_ranks(self):
        done = programs.succeed([programs.BIN / "llama_train", "--config", self.config, "--dp", 64, "--tp",
                                 4, "--batch", 64, "--print-plan"])
        self.assertIn("tensor parallelism on DeviceMesh((tp=4), cpu), rank 0", done.stdout)
        self.assertRegex(done.stdout, r"model\.layers\.\*\.self_attn\.q_proj x2 +colwise_parallel +"
                                      r"weight +Shard\(0\) +\[64, 64\] +\[16, 64\] +4096")
        self.assertIn("forward  dp all_gather: 2 calls", done.stdout)
        self.assertIn("unit 'model.layers.*'", done.stdout)
        self.assertRegex(done.stdout, r"with FSDP rank 0 holds \d+ bytes of these parameters")

    def test_says_what_context_parallelism_sends(self):
        done = programs.succeed([programs.BIN / "llama_train", "--config", self.config, "--cp", 2, "--print-plan"])
        self.assertRegex(done.stdout, r"forward  cp all_gather: 2 calls, \d+ bytes: keys and values\n")
        self.assertRegex(done.stdout, r"backward cp reduce_scatter: 2 calls, \d+ bytes: keys and values\n")

    def test_touches_no_file_of_the_run(self):
        done = programs.succeed([programs.BIN / "llama_train", "--config", self.config, "--dp", 2, "--metrics",
                                 self.folder / "m.jsonl", "--checkpoint", self.folder / "steps", "--print-plan"])
        self.assertIn("dp all_reduce: 1 call, 4 bytes: mean of the loss", done.stdout)
        self.assertEqual({file.name for file in self.folder.iterdir()}, {"config.json", "t.bin"})

    def test_refuses_heads_that_tp_does_not_divide(self):
        done = programs.run([programs.BIN / "llama_train", "--config", self.config, "--tp", 3,
                             "--print-plan"])
        self.assertEqual(done.returncode, 1)
        self.assertIn("num_attention_heads", done.stderr)
