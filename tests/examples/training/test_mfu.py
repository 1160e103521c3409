"""What the MFU in the metrics is against: --peak-flops."""
import re
import unittest

import programs


class PeakFlops(programs.InFolder):
    def run_with(self, flags, dp=1, tp=1):
        metrics = self.folder / "m.jsonl"
        done = programs.train(["--config", self.config, "--tokens", self.tokens, "--steps", 3, "--seq", 64,
                               "--metrics", metrics, "--log-every", 1, *flags], dp, tp)
        return programs.read_metrics(metrics), done.stdout

    def test_a_given_peak_is_what_the_mfu_is_against(self):
        toml = self.folder / "run.toml"
        toml.write_text("peak-flops = 2e12\n")
        records, output = self.run_with(["--config-file", toml])
        for record in records:
            self.assertAlmostEqual(record["mfu"], 100 * record["tflops"] / 2, delta=1e-9 * record["mfu"])
            self.assertLess(record["mfu_causal"], record["mfu"])
        self.assertIn("peak: 2 TFLOP/s a rank in fp32\n", output)
        self.assertNotIn("N/A", output)

    def test_a_measured_peak_is_one_number_of_all_ranks(self):
        records, output = self.run_with(["--peak-flops", "measure", "--param-dtype", "bf16"], dp=2)
        peaks = [100 * record["tflops"] / record["mfu"] for record in records]
        for peak, record in zip(peaks, records):
            self.assertAlmostEqual(peak, peaks[0], delta=1e-9 * peak)
            self.assertLess(0, record["mfu"])
            self.assertLess(record["mfu"], 100)
        printed = re.search(r"^peak: (\S+) TFLOP/s a rank in bf16, measured$", output, re.MULTILINE)
        self.assertAlmostEqual(float(printed[1]), peaks[0], delta=1e-3 * peaks[0])

    def test_a_cpu_has_no_peak_by_itself(self):
        records, output = self.run_with([])
        self.assertIsNone(records[-1]["mfu"])
        self.assertNotIn("peak:", output)
