"""Bad input ends every rank with one clear line, and leaves nothing half-written."""
import json
import socket
import time
import unittest

import programs


class BadInput(programs.InFolder):
    def refuse(self, arguments, *parts, dp=1, tp=1, nproc=None):
        """Runs, and expects an exit code != 0 and one line that holds every part."""
        before = set(self.folder.rglob("*"))
        command = [programs.BIN / "llama_train", "--dp", dp, "--tp", tp, *arguments]
        nproc = nproc or dp * tp
        if nproc > 1:
            command = [programs.BIN / "tessera-run", "--nproc", nproc, "--", *command]
        start = time.monotonic()
        done = programs.run(command, timeout=60)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        lines = [line for line in done.stderr.splitlines() if all(p in line for p in parts)]
        self.assertTrue(lines, f"no line with {parts} in:\n{done.stderr}")
        # The line, at most once a rank, and the launcher's report: no stack traces around it.
        self.assertLessEqual(len(done.stderr.splitlines()), 5 + 2 * nproc, done.stderr)
        self.assertEqual(set(self.folder.rglob("*")), before)
        self.assertLess(time.monotonic() - start, 30)

    def data(self, **changes):
        flags = {"config": self.config, "tokens": self.tokens, "seq": 32, "batch": 4, "steps": 2}
        flags |= changes
        return [part for name, value in flags.items() if value is not None
                for part in (f"--{name.replace('_', '-')}", value)]

    def config_with(self, **changes):
        path = self.folder / "changed.json"
        path.write_text(json.dumps(programs.SMALL | changes))
        return path

    def test_mesh_that_is_not_the_world(self):
        self.refuse(self.data(), "--dp 2", "--tp 2", "4 ranks", dp=2, tp=2, nproc=3)

    def test_heads_that_tp_does_not_divide(self):
        config = self.config_with(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        self.refuse(self.data(config=config), "num_attention_heads 6", "--tp 4", tp=4)

    def test_truncated_safetensors(self):
        model = programs.make_model(self.folder, programs.SMALL)
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        self.refuse(self.data(config=None, model=model), "model.safetensors", dp=2)

    def test_shard_with_a_bad_magic(self):
        bad = programs.write_tokens(self.folder / "bad.bin", range(200), magic=7)
        self.refuse(self.data(tokens=bad), "bad.bin", "magic", dp=2)

    def test_shard_with_too_few_tokens(self):
        few = programs.write_tokens(self.folder / "few.bin", range(50))
        self.refuse(self.data(tokens=few), "50", dp=2)

    def test_truncated_shard(self):
        short = programs.write_tokens(self.folder / "short.bin", range(200), count=100000)
        self.refuse(self.data(tokens=short), "short.bin", "100000")

    def test_token_beyond_the_vocabulary(self):
        high = programs.write_tokens(self.folder / "high.bin", [5] * 300 + [300] + [5] * 700)
        self.refuse(self.data(tokens=high), "300", "256", dp=2)

    def test_unknown_flag_names_the_nearest(self):
        self.refuse([*self.data(), "--stpes", "3"], "--stpes", "--steps")

    def test_unknown_name_in_the_config_file(self):
        file = self.folder / "run.toml"
        file.write_text("stepz = 3\n")
        self.refuse([*self.data(), "--config-file", file], "stepz", "--steps")

    def test_missing_files(self):
        self.refuse(self.data(config=self.folder / "none.json"), "none.json", dp=2)
        self.refuse(self.data(tokens=self.folder / "none.bin"), "none.bin", dp=2)
        self.refuse(self.data(config=None, model=self.folder / "nowhere"), "nowhere", dp=2)

    def test_batch_that_dp_does_not_divide(self):
        self.refuse(self.data(batch=5), "--batch 5", "--dp 2", dp=2)

    def test_batch_that_micro_batches_do_not_divide(self):
        self.refuse([*self.data(batch=4), "--accumulate", 4], "--batch 4", "--dp 2 x --accumulate 4",
                    dp=2)

    def test_replicas_that_do_not_fit(self):
        self.refuse([*self.data(batch=12), "--dp-replicate", 3], "--dp 2 x --dp-replicate 3",
                    "6 ranks, but 4", "--nproc 6", dp=2, nproc=4)

    def test_degrees_of_zero(self):
        for flag in ("--dp", "--tp", "--dp-replicate", "--accumulate", "--batch"):
            with self.subTest(flag):
                self.refuse([*self.data(), flag, "0"], flag, "0")

    def test_values_that_a_flag_does_not_have(self):
        for flag, value in [("--zero", "1"), ("--param-dtype", "fp8"), ("--reduce-dtype", "int8"),
                            ("--ac", "sometimes"), ("--accumulate", "half")]:
            with self.subTest(flag):
                self.refuse([*self.data(), flag, value], flag, value)

    def test_features_that_are_not_implemented(self):
        for change, part in [({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope"),
                             ({"attention_bias": True}, "attention_bias"),
                             ({"mlp_bias": True}, "mlp_bias"),
                             ({"hidden_act": "gelu"}, "hidden_act"),
                             ({"model_type": "mistral"}, "model_type")]:
            with self.subTest(change):
                self.refuse(self.data(config=self.config_with(**change)), part, "changed.json")

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = programs.run([programs.BIN / "tessera-run", "--nproc", 2, "--nnodes", 2,
                                 "--node-rank", 0, "--rdzv", f"127.0.0.1:{port}", "--",
                                 programs.BIN / "llama_train", *self.data(), "--dp", 4], timeout=60)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(str(port), done.stderr)

    def test_failure_on_one_rank_only_ends_all(self):
        flags = " ".join(str(part) for part in self.data(tokens=None))
        script = (f'[ "$RANK" = 1 ] && tokens={self.folder}/none.bin || tokens={self.tokens}; '
                  f"exec {programs.BIN}/llama_train --dp 2 {flags} --tokens $tokens")
        done = programs.run([programs.BIN / "tessera-run", "--nproc", 2, "--", "sh", "-c", script],
                            timeout=60)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn("[rank 1] llama_train:", done.stderr)
        self.assertIn("none.bin", done.stderr)


if __name__ == "__main__":
    unittest.main()
