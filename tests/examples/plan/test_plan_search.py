"""Compares the layouts that llama_plan --search and --ac auto find with plans of these layouts."""
import json

import programs

# A search plans fewer layers than these, and estimates the others.
DEEP = programs.SMALL | {"num_hidden_layers": 9}
RUN = ["--batch", 16, "--seq", 64, "--param-dtype", "fp32"]
MACHINE = '''like = "h100"
name = "small"
memory_bytes = {}
reserved_bytes = 0
flops_fp32 = 1e10
memory_bandwidth = 1e9
link_bandwidth = 2e8
operator_latency_s = 0
ranks_per_node = 4
'''


class PlanSearch(programs.InFolder):
    def command(self, config, arguments, memory=1e12):
        file = programs.write(self.folder / "machine.toml", MACHINE.format(memory))
        return [programs.BIN / "llama_plan", "--config", programs.write_config(self.folder, config), "--gpu", file,
                *arguments]

    def plan(self, config, arguments, memory=1e12):
        file = self.folder / "plan.json"
        done = programs.succeed(self.command(config, [*arguments, "--json", file], memory))
        return json.loads(file.read_text()), done.stdout

    def search(self, gpus, *arguments, memory=1e12, config=DEEP):
        plan, text = self.plan(config, [*RUN, "--search", "--gpus", gpus, *arguments], memory)
        return plan["search"], plan, text

    @staticmethod
    def flags(layout):
        return [part for key in ("dp", "tp", "ac", "zero") for part in ("--" + key, layout[key])]

    def test_estimates_equal_full_plans(self):
        found, _, _ = self.search(8)
        self.assertEqual({(each["dp"], each["tp"]) for each in found["layouts"]}, {(8, 1), (4, 2), (2, 4)})
        self.assertEqual(len(found["layouts"]), 18)
        # The layouts have each kind of activation checkpointing, and each kind of ZeRO.
        for layout in [each for each in found["layouts"] if each["tp"] == 2][:3] + found["layouts"][-2:]:
            with self.subTest(layout):
                plan, _ = self.plan(DEEP, RUN + self.flags(layout))
                plan = plan["kinds"][0]
                self.assertLess(abs(layout["peak_bytes"] / plan["peak_bytes"] - 1), 1e-3)
                self.assertLess(abs(layout["step_time_s"] / plan["step_time_s"] - 1), 0.01)

    def test_frontier_has_the_pareto_optimal_layouts(self):
        layouts = self.search(8)[0]["layouts"]
        self.assertEqual([each["step_time_s"] for each in layouts],
                         sorted(each["step_time_s"] for each in layouts))
        for each in layouts:
            beaten = any(other["step_time_s"] <= each["step_time_s"] and other["peak_bytes"] <= each["peak_bytes"]
                         for other in layouts if other is not each)
            self.assertEqual(each["frontier"], not beaten)
        peaks = sorted(each["peak_bytes"] for each in layouts)
        limit = peaks[4]
        found, plan, text = self.search(8, memory=limit)
        for each in found["layouts"]:
            self.assertEqual(each["fits"], each["peak_bytes"] <= limit)
        whole = [each for each in found["layouts"] if ":" not in each["ac"]]
        self.assertEqual(sum(each["fits"] for each in whole), sum(peak <= limit for peak in peaks))
        self.assertGreater(found["skipped"], 0)
        self.assertEqual(len(whole) + found["skipped"], 18)
        self.assertTrue(plan["fits"])  # the full plan of the fastest layout
        self.assertIn("It fits", text)

    def test_auto_checkpointing_recomputes_the_least_that_fits(self):
        run = [*RUN, "--dp", 2, "--ac"]
        none, selective, full = peaks = [self.plan(DEEP, [*run, ac])[0]["peak_bytes"] for ac in ("none", "selective", "full")]
        self.assertEqual(peaks, sorted(set(peaks), reverse=True))
        for limit, ac in ((none, "none"), ((none + selective) / 2, "selective:[1-8]"), (selective, "selective"),
                          (full, "full"), (1000, "full")):
            with self.subTest(ac=ac, limit=limit):
                plan, text = self.plan(DEEP, [*run, "auto", "--memory", repr(limit / 2 ** 30)])
                self.assertRegex(plan["flags"]["--ac"], f"^{ac}$")
                self.assertEqual(plan["fits"], limit > 1000)
                self.assertIn(f"--ac auto: {plan['flags']['--ac']}\n", text)

    def test_search_recomputes_as_few_blocks_as_possible(self):
        every = {each["ac"]: each for each in self.search(2, "--tp", 1, "--zero", 3)[0]["layouts"]}
        limit = (every["none"]["peak_bytes"] + every["selective"]["peak_bytes"]) / 2
        found, plan, text = self.search(2, "--tp", 1, "--zero", 3, memory=limit)
        best = found["layouts"][0]
        self.assertRegex(best["ac"], "^selective:[1-8]$")
        self.assertLess(best["step_time_s"], every["selective"]["step_time_s"])
        self.assertIn(f"--ac {best['ac']} --zero 3, in full", text)
        plan = plan["kinds"][0]
        self.assertLessEqual(plan["peak_bytes"], best["peak_bytes"])
        self.assertLess(abs(best["step_time_s"] / plan["step_time_s"] - 1), 0.01)

    def test_advice_if_no_layout_fits(self):
        found, plan, text = self.search(8, memory=1e5)
        self.assertFalse(any(each["fits"] or each["frontier"] for each in found["layouts"]))
        self.assertIn("no layout fits", text)
        self.assertIn("It does not fit", text)
        self.assertIn("--dp or --tp", " ".join(plan["advice"]))

    def test_search_uses_micro_batches_to_fit(self):
        run = ["--dp", 2, "--ac", "full", "--zero", 3]  # each rank has 8 sequences
        whole, half, parts = (self.plan(DEEP, [*RUN, *run, "--accumulate", count])[0]["kinds"][0] for count in (1, 2, 4))
        limit = (half["peak_bytes"] + parts["peak_bytes"]) / 2
        found, plan, text = self.search(2, *run, memory=limit)
        self.assertEqual([(each["accumulate"], each["fits"]) for each in found["layouts"]],
                         [(4, True), (2, False), (1, False)])
        self.assertEqual(plan["kinds"][0]["peak_bytes"], parts["peak_bytes"])
        self.assertRegex(text, r"ac +zero +acc\. +peak")
        self.assertIn("--ac full --zero 3 --accumulate 4, in full", text)
        found, _, text = self.search(2, *run, "--accumulate", 1, memory=limit)
        self.assertEqual([each["accumulate"] for each in found["layouts"]], [1])
        self.assertNotIn("acc.", text)

    def test_sequences_are_split_if_the_batch_is_small(self):
        run = ["--batch", 2, "--seq", 64, "--ac", "full", "--zero", 3]  # 8 ranks have 2 sequences together
        found, plan, text = self.search(8, *run, "--tp", 1)
        self.assertEqual({(each["dp"], each["cp"]) for each in found["layouts"]}, {(2, 4), (1, 8)})
        self.assertEqual([(each["dp"], each["cp"]) for each in found["refused"]], [(8, 1), (4, 2)])
        best = found["layouts"][0]
        self.assertEqual((plan["mesh"]["dp"], plan["mesh"]["cp"]), (best["dp"], best["cp"]))
        self.assertRegex(text, r"dp +tp +cp +ac")
        self.assertIn("left out: dp 4, tp 1, cp 2: batch 2", text)
        planned = self.plan(DEEP, [*RUN, *run, "--dp", best["dp"], "--cp", best["cp"]])[0]["kinds"][0]
        self.assertLess(abs(best["peak_bytes"] / planned["peak_bytes"] - 1), 1e-3)
        self.assertLess(abs(best["step_time_s"] / planned["step_time_s"] - 1), 0.01)
        whole, _, text = self.search(8)  # here all layouts fit without splitting sequences
        self.assertEqual({each["cp"] for each in whole["layouts"]}, {1})
        self.assertNotIn(" cp ", text.splitlines()[1])

    def test_long_sequences_are_split(self):
        run = ["--batch", 8, "--seq", 16384, "--ac", "full", "--zero", 3, "--tp", 2]
        found, _, _ = self.search(8, *run)
        self.assertEqual({each["cp"] for each in found["layouts"]}, {1, 2, 4})
        found, _, _ = self.search(8, *run, "--cp", 2)
        self.assertEqual({each["cp"] for each in found["layouts"]}, {2})

    def test_search_keeps_the_given_ep(self):
        config = programs.MOE | {"num_hidden_layers": 9}
        found, plan, text = self.search(8, "--ep", 2, "--zero", 3, config=config)
        self.assertEqual({(each["dp"], each["tp"]) for each in found["layouts"]}, {(4, 1), (2, 2), (1, 4)})
        self.assertIn(" --ep 2 ", text)
        for layout in found["layouts"][::4]:
            planned = self.plan(config, [*RUN, *self.flags(layout), "--ep", 2])[0]["kinds"][0]
            self.assertLess(abs(layout["peak_bytes"] / planned["peak_bytes"] - 1), 1e-3)
            self.assertLess(abs(layout["step_time_s"] / planned["step_time_s"] - 1), 0.01)

    def test_bad_flags_are_one_line(self):
        for arguments, message in [(["--search"], "pass --gpus N"), (["--gpus", 8], "given without --search"),
                                   (["--search", "--gpus", 8, "--tp", 3], "can't be laid out"),
                                   (["--search", "--gpus", 8, "--ac", "full:2"], "--ac full:2"),
                                   (["--search", "--gpus", 0], "--gpus"),
                                   (["--json", self.folder / "no" / "p.json"], "p.json"),
                                   (["--json", self.folder / "config.json"], "--config and --json are both ")]:
            self.refuse(self.command(DEEP, [*RUN, *arguments]), message)
        self.refuse([programs.BIN / "llama_plan", "--config", self.config, "--search", "--gpus", 8], "--search needs the memory size of a machine")
