"""bench_mfu and --peak-flops: figures that follow from one another and from the sizes of the model."""

import json
import re
import signal
import subprocess
import time

import programs

SEQ, BATCH, PEAK = 32, 4, 1e11


class BenchMfu(programs.InFolder):
    def command(self, *flags, steps=3):
        return [programs.BIN / "bench_mfu", "--config", self.config, "--seq", SEQ,
                "--steps", steps, "--warmup", 1, "--out", self.folder / "out", *flags]

    def bench(self, *flags, run=programs.fail):
        return run(self.command(*flags))

    def runs(self):
        return json.loads((self.folder / "out/results.json").read_text())["runs"]

    def test_sigterm_ends_the_run(self):
        process = subprocess.Popen([str(part) for part in self.command("--mesh", "2x1", "--batch", BATCH, steps=100000)],
                                   stderr=subprocess.DEVNULL)
        metrics, latest = self.folder / "out/run-1/metrics.jsonl", time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < latest:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), 128 + signal.SIGTERM)
        time.sleep(1)
        size = metrics.stat().st_size
        time.sleep(1)
        self.assertEqual(metrics.stat().st_size, size)

    def test_mfu_hfu_and_causal_mfu(self):
        done = self.bench("--mesh", "1x1,1x2x1", "--ac", "none,full", "--batch", BATCH, "--peak-flops", PEAK,
                          run=programs.succeed)
        none, full, split, _ = self.runs()
        # Sequences that are split take the same FLOPs.
        self.assertEqual([none["cp"], split["cp"]], [1, 2])
        flops = [run["mfu"] * run["step_time_s"] * run["dp"] * run["cp"] * run["tp"] for run in (none, split)]
        self.assertAlmostEqual(flops[1] / flops[0], 1, delta=0.01)
        c = programs.SMALL
        layers, hidden, inner = c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"]
        block = 4 * hidden ** 2 + 3 * hidden * inner  # head size x heads is the hidden size
        matrices = layers * block + hidden * c["vocab_size"]
        norms = (2 * layers + 1) * hidden
        attention = layers * hidden * SEQ
        # FLOPs of a token. The backward of flash attention computes the scores again, and so has five products, not four.
        titan = 6 * (matrices + norms) + 12 * attention
        hardware = 6 * matrices + 7 * attention
        again = 2 * layers * (block - hidden * inner) + 2 * attention  # without the last product
        for run, flops in ((none, hardware), (full, hardware + again)):
            per_token = run["step_time_s"] * PEAK / (BATCH * SEQ) / 100
            self.assertAlmostEqual(run["mfu"] * per_token / titan, 1, delta=0.01)
            self.assertAlmostEqual(run["hfu"] * per_token / flops, 1, delta=0.01)
            self.assertAlmostEqual(run["mfu_causal"] / run["mfu"],
                                   (titan - 6 * attention) / titan, delta=0.01)
            self.assertAlmostEqual(run["peak_flops"] / PEAK, 1, delta=0.01)
            self.assertGreater(run["reserved_bytes"], run["active_bytes"])
        self.assertLess(full["active_bytes"], none["active_bytes"])
        self.assertIn("HFU", done.stdout)

    def test_peer_results_are_reported(self):
        script = self.folder / "peer.py"
        script.write_text("import sys\n"
                          "compiled, alone = '--compile' in sys.argv, sys.argv[-2:] == ['--parallel', 'none']\n"
                          "print('{\"step_time_s\": %d, \"tokens_per_s\": 5}' % (1 + compiled + alone))\n")
        done = self.bench("--batch", BATCH, "--mesh", "1x1,1x2", "--peak-flops", PEAK, "--peer", script,
                          run=programs.succeed)
        one, two = self.runs()
        for seconds, name in enumerate(("eager", "compiled", "compiled_without_fsdp"), start=1):
            self.assertEqual(one["peer"][name], {"step_time_s": seconds, "tokens_per_s": 5})
            self.assertIn(f"PyTorch {name}, ", done.stdout)
            self.assertEqual(two["peer"][name]["error"], "--peer runs one rank, not 2")

    def test_failed_run_does_not_end_the_other_runs(self):
        done = self.bench("--mesh", "1x3,1x1", "--peak-flops", "measure", "--flags=--param-dtype bf16")
        bad, good = self.runs()
        self.assertEqual((bad["mfu"], good["error"]), (None, None))
        self.assertGreater(good["mfu"], 0)
        self.assertIn("tensor-parallel degree of 3", bad["error"])
        self.assertIn("tensor-parallel degree of 3", done.stdout)

    def test_published_shapes_have_the_published_sizes(self):
        parameters = {"llmq-1.5b": 1.54e9, "llmq-7b": 7.62e9, "torchtitan-8b": 8.03e9}
        # No run begins, because models of this size are too large for a CPU.
        done = programs.fail([programs.BIN / "bench_mfu", "--shape", ",".join(parameters), "--mesh", "2x1", "--out",
                              self.folder / "out", "--flags=--no-such-flag"])
        self.assertEqual([(run["model"], run["batch"], run["seq"]) for run in self.runs()],
                         [("llmq-1.5b", 32, 1024), ("llmq-7b", 8, 1024), ("torchtitan-8b", 2, 8192)])
        self.assertIn("published, llmq-7b: llmq on one H100, bf16: 14,000 tokens/s", done.stdout)
        for name, count in parameters.items():
            plan = self.folder / "plan.json"
            programs.succeed([programs.BIN / "llama_plan", "--config", self.folder / f"out/shapes/{name}.json", "--gpu",
                              "h100", "--seq", 8, "--batch", 1, "--json", plan])
            self.assertAlmostEqual(json.loads(plan.read_text())["parameters_bytes"] / 4 / count, 1, delta=0.005)

    def test_bad_flags_are_one_line(self):
        for mesh in ("2", "2x0", "1x1x1x1"):
            self.assertIn(f"--mesh {mesh} is not a mesh", self.bench("--mesh", mesh).stderr)
        self.assertIn("--peer nofile is not a file", self.bench("--peer", "nofile").stderr)
        self.assertIn("tokens per step", self.bench("--batch", 2**60).stderr)
        self.assertIn("leaves no step of --steps", self.bench("--warmup", 3).stderr)


class PeakFlops(programs.InFolder):
    def run_with(self, flags, dp=1, tp=1):
        return programs.metrics_of(self.folder, ["--config", self.config, "--tokens", self.tokens, "--steps", 3, "--seq", 64,
                                                 "--log-every", 1, *flags], dp, tp)

    def test_mfu_uses_the_given_peak(self):
        toml = programs.write(self.folder / "run.toml", "peak-flops = 2e12\n")
        records, output = self.run_with(["--config-file", toml])
        for record in records:
            self.assertAlmostEqual(record["mfu"], 100 * record["tflops"] / 2, delta=1e-9 * record["mfu"])
            self.assertLess(record["mfu_causal"], record["mfu"])
        self.assertIn("peak: 2 TFLOP/s a rank in fp32\n", output)
        self.assertNotIn("N/A", output)

    def test_measured_peak_is_the_same_on_all_ranks(self):
        records, output = self.run_with(["--peak-flops", "measure", "--param-dtype", "bf16"], dp=2)
        peaks = [100 * record["tflops"] / record["mfu"] for record in records]
        for peak, record in zip(peaks, records):
            self.assertAlmostEqual(peak, peaks[0], delta=1e-9 * peak)
            self.assertLess(0, record["mfu"])
        printed = re.search(r"^peak: (\S+) TFLOP/s a rank in bf16, measured$", output, re.MULTILINE)
        self.assertAlmostEqual(float(printed[1]), peaks[0], delta=1e-3 * peaks[0])
