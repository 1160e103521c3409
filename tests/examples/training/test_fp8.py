"""llama_train --fp8: it learns as fp32 and bf16 do, on every mesh alike, continues from a checkpoint."""
import json

import programs


# 16 x 4 divides all sizes but the vocabulary's.
CONFIG = programs.SMALL | {"intermediate_size": 192, "vocab_size": 250}
LAYERS = 14


class Fp8(programs.TrainingRuns):
    def setUp(self):
        super().setUp()
        self.config = programs.write_config(self.folder, CONFIG)
        self.tokens = programs.write_tokens(self.folder / "t.bin", programs.text_tokens(5000, 250))

    def rows(self, flags, dp=1, tp=1, replicas=1):
        metrics = self.folder / "m.jsonl"
        done = programs.train(["--config", self.config, "--tokens", self.tokens, "--metrics", metrics,
                               "--batch", 8, "--seq", 32, "--lr", 3e-3, *flags], dp, tp, replicas)
        self.assertEqual(f"fp8: {LAYERS} of {LAYERS + 1} linear layers\n" in done.stdout, "--fp8" in flags)
        return programs.read_metrics(metrics)

    def losses(self, *args):
        return [row["loss"] for row in self.rows(*args)]

    def test_the_loss_falls_as_without(self):
        for dtype in ("fp32", "bf16"):
            flags = ["--steps", 60, "--param-dtype", dtype]
            want, got = self.losses(flags), self.losses([*flags, "--fp8"])
            self.assertNotEqual(got[0], want[0])
            self.assertLess(want[-1], 0.9 * want[0])
            for ours, theirs in zip(got, want):
                self.assertLess(abs(ours / theirs - 1), 0.03)

    def test_meshes_train_alike(self):
        flags = ["--steps", 4, "--fp8"]
        want = self.losses(flags)
        for mesh, more in (((4, 1), ["--zero", 2, "--ac", "selective"]), ((2, 2), ["--ac", "full"]), ((1, 2, 2), ["--no-sp"]),
                           ((1, 4), ["--offload"])):
            with self.subTest(mesh=mesh, more=more):
                for ours, theirs in zip(self.losses([*flags, *more], *mesh), want):
                    self.assertLess(abs(ours / theirs - 1), 2e-3)

    def test_a_resumed_run_is_bit_equal(self):
        run, flags = self.folder / "unbroken", ["--fp8", "--param-dtype", "bf16"]
        self.train(run, [*flags, *self.checkpoints(run), "--checkpoint-every", programs.EVERY])
        broken = self.broken_copy("resumed", run)
        self.train(broken, [*flags, *self.checkpoints(broken), "--resume"])
        self.assert_equal_runs(broken, run)

    def test_trains_adapters_and_agrees_with_one_rank_by_verify(self):
        losses = self.losses(["--steps", 20, "--fp8", "--lora-rank", 16])
        self.assertLess(losses[-1], losses[0])
        self.losses(["--steps", 1, "--fp8", "--verify"], 2, 2)

    def test_a_plan_for_a_gpu_promises_no_gain_before_a_measurement(self):
        config = programs.ROOT / "examples/llama/configs/llama3.1-8b.json"
        plans = []
        for more in ([], ["--fp8"]):
            file = self.folder / "plan.json"
            programs.succeed([programs.BIN / "llama_plan", "--config", config, "--dp", 8, "--batch", 8, "--seq", 8192,
                              "--gpu", "h200", "--json", file, *more])
            plans.append(json.loads(file.read_text()))
        self.assertEqual(plans[1]["comm"], plans[0]["comm"])
        self.assertLess(abs(plans[1]["flops"] / plans[0]["flops"] - 1), 1e-3)
        self.assertGreaterEqual(plans[1]["step_time_s"], plans[0]["step_time_s"])

    def test_refuses_in_one_line(self):
        small = self.folder / "small.json"
        small.write_text(json.dumps(CONFIG | {"hidden_size": 72, "intermediate_size": 100, "head_dim": 18}))
        train = [programs.BIN / "llama_train", "--tokens", self.tokens, "--fp8"]
        plan = [programs.BIN / "llama_plan", "--config", self.config, "--fp8"]
        for command, message in [
                ([*train, "--config", self.config, "--param-dtype", "fp16"], "--fp8 is given with --param-dtype fp16"),
                ([*train, "--config", small], "--fp8 is given for a model without linear layers that it takes: both "
                                              "sizes must be multiples of 16; leave it out"),
                ([*plan, "--device", "cuda", "--param-dtype", "fp32"], "on CUDA products in 8 bits give bf16"),
                ([*plan, "--gpu", "a100"], "a100 has no products in 8 bits")]:
            self.refuse(command, message)
