"""Bad input ends every rank with one clear line, and leaves no partial file. The help lists every flag."""

import json
import os
import re
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
        start = time.monotonic()
        done = programs.run(programs.on_ranks(nproc, command), timeout=60)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        lines = [line for line in done.stderr.splitlines() if all(p in line for p in parts)]
        self.assertTrue(lines, f"no line with {parts} in:\n{done.stderr}")
        # The line, once unless a rank is late, and the launcher's report: no stack traces around it.
        self.assertLessEqual(len(done.stderr.splitlines()), 3 + nproc, done.stderr)
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

    def test_is_refused_by_name(self):
        model = programs.make_model(self.folder, programs.SMALL)
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        def shard(name, tokens, **kwargs):
            return programs.write_tokens(self.folder / f"{name}.bin", tokens, **kwargs)
        few_heads = self.config_with(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        for data, flags, words, mesh in (
                ({}, [], ("--dp 2", "--tp 2", "4 ranks"), {"dp": 2, "tp": 2, "nproc": 3}),
                ({"batch": 12}, ["--dp-replicate", 3], ("--dp 2 x --dp-replicate 3", "6 ranks, but 4", "--nproc 6"),
                 {"dp": 2, "nproc": 4}),
                ({"config": few_heads}, [], ("num_attention_heads 6", "tensor-parallel degree of 4"), {"tp": 4}),
                ({"config": None, "model": model}, [], ("model.safetensors",), {"dp": 2}),
                ({"tokens": shard("bad", range(200), magic=7)}, [], ("bad.bin", "magic"), {"dp": 2}),
                ({"tokens": shard("few", range(50))}, [], ("50 tokens", "the batch of 4"), {"dp": 2}),
                ({"tokens": shard("short", range(200), count=100000)}, [], ("short.bin", "100000"), {}),
                ({"tokens": shard("high", [5] * 300 + [300] + [5] * 700)}, [], ("token 300", "position 300", "256"), {"dp": 2}),
                ({}, ["--config-file", self.folder / "none.toml"], ("--config-file", "none.toml"), {}),
                ({"config": self.folder / "none.json"}, [], ("none.json",), {"dp": 2}),
                ({"tokens": self.folder / "none.bin"}, [], ("none.bin",), {"dp": 2}),
                ({"config": None, "model": self.folder / "nowhere"}, [], ("nowhere",), {"dp": 2}),
                ({"tokens": None, "jsonl": "a" * 300}, [], ("--jsonl", "File name too long"), {}),
                ({"tokens": None, "jsonl": self.folder / "none*"}, [], ("--jsonl", "none*"), {}),
                ({"seq": 2**63 - 1}, [], (f"--seq {2**63 - 1}", "256 positions"), {})):
            with self.subTest(words):
                self.refuse([*self.data(**data), *flags], *words, **mesh)

    def test_features_that_are_not_implemented(self):
        for change, part in (({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "longrope"),
                             ({"use_sliding_window": True}, "use_sliding_window"), ({"hidden_act": "gelu"}, "hidden_act"),
                             ({"model_type": "gemma"}, "model_type")):
            with self.subTest(change):
                self.refuse(self.data(config=self.config_with(**change)), part, "changed.json")

    def test_what_does_not_fit_the_model_is_found_before_the_ranks_meet(self):
        config = self.config_with(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        # A rank whose rank 0 never comes.
        alone = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
        for flags, message in ((["--tp", 3], "num_key_value_heads 2 can't be shared out at a tensor-parallel degree of 3"),
                               (["--dp", 3, "--batch", 3, "--lora-rank", 2, "--lora-targets", "model.norm"],
                                "'model.norm' matches no nn::Linear")):
            with self.subTest(message):
                done = programs.run([programs.BIN / "llama_train", *self.data(config=config), *flags],
                                    env=os.environ | alone, timeout=60)
                self.assertEqual(done.returncode, 1)
                self.assertIn(message, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            done = programs.run([programs.BIN / "llama_train", *self.data(), "--dp", 2], timeout=60, env=os.environ | rank)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(str(port), done.stderr)

    def test_failure_on_one_rank_only_ends_all(self):
        flags = " ".join(str(part) for part in self.data(tokens=None))
        script = (f'[ "$RANK" = 1 ] && tokens={self.folder}/none.bin || tokens={self.tokens}; '
                  f"exec {programs.BIN}/llama_train --dp 2 {flags} --tokens $tokens")
        done = programs.run(programs.on_ranks(2, ["sh", "-c", script]), timeout=60)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn("[rank 1] llama_train:", done.stderr)
        self.assertIn("none.bin", done.stderr)

    def test_data_that_differ_between_ranks(self):
        others = self.folder / "others" / self.tokens.name
        others.parent.mkdir()
        programs.write_tokens(others, [1] * (self.tokens.stat().st_size // 2))
        flags = " ".join(str(part) for part in self.data(tokens=None))
        script = (f'[ "$RANK" = 1 ] && tokens={others} || tokens={self.tokens}; '
                  f"exec {programs.BIN}/llama_train $DEGREE 2 {flags} --tokens $tokens")
        for degree in ("--dp", "--tp"):
            with self.subTest(degree):
                done = programs.run(programs.on_ranks(2, ["env", f"DEGREE={degree}", "sh", "-c", script]), timeout=60)
                self.assertNotEqual(done.returncode, 0, done.stdout)
                self.assertIn("the data of rank 1 are not those of rank 0: ", done.stderr)
                self.assertIn(f'files["{self.tokens.name}"]', done.stderr)

    def test_options_that_differ_between_ranks(self):
        flags = " ".join(str(part) for part in self.data())
        for option, message in (("--lr 0.002", "rank 1 has --lr 0.002, but rank 0 has --lr 0.001"),
                                ("--dropout 0.5", "rank 1 has --dropout 0.5, but rank 0 has --dropout 0"),
                                ("--resume auto --checkpoint here", "rank 1 has --checkpoint FILE, but rank 0 has no --checkpoint")):
            with self.subTest(option):
                script = f'[ "$RANK" = 1 ] && option="{option}"; exec {programs.BIN}/llama_train --dp 2 {flags} $option'
                done = programs.run(programs.on_ranks(2, ["sh", "-c", script]), timeout=60)
                self.assertNotEqual(done.returncode, 0, done.stdout)
                self.assertIn(message, done.stderr)

    def test_configurations_that_differ_between_ranks(self):
        configs = [self.folder / f"{rank}/config.json" for rank in (0, 1)]
        for path, changes in zip(configs, ({}, {"rms_norm_eps": 1e-6})):
            path.parent.mkdir()
            path.write_text(json.dumps(programs.SMALL | changes))
        flags = " ".join(str(part) for part in self.data(config=f"{self.folder}/$RANK/config.json"))
        script = f"exec {programs.BIN}/llama_train --dp 2 {flags}"
        done = programs.run(programs.on_ranks(2, ["sh", "-c", script]), timeout=60)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("rank 1 has config.json with rms_norm_eps 1e-06, but rank 0 has config.json with rms_norm_eps 1e-05; "
                      "start all ranks with the same options", done.stderr)

    def test_ends_of_documents_that_differ_between_ranks(self):
        """generation_config.json, which config.json does not show."""
        for rank, end in enumerate((7, 9)):
            folder = self.folder / str(rank)
            folder.mkdir()
            programs.write_config(folder, programs.SMALL)
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        flags = " ".join(str(part) for part in self.data(config=f"{self.folder}/$RANK/config.json"))
        for degree in ("--dp", "--tp"):
            with self.subTest(degree):
                script = f"exec {programs.BIN}/llama_train $DEGREE 2 {flags} --document-mask"
                done = programs.run(programs.on_ranks(2, ["env", f"DEGREE={degree}", "sh", "-c", script]), timeout=60)
                self.assertEqual(done.returncode, 1, done.stdout)
                self.assertIn('the data of rank 1 are not those of rank 0: training.samples.end[0] is 9 instead of 7', done.stderr)

    def test_held_out_texts_that_differ_between_ranks(self):
        texts = [self.folder / f"{rank}/text" for rank in (0, 1)]
        for text, words in zip(texts, ("one ", "two ")):
            text.parent.mkdir()
            text.write_text(words * 300)
        flags = " ".join(str(part) for part in self.data())
        script = f"exec {programs.BIN}/llama_train --dp 2 {flags} --eval-text {self.folder}/$RANK/text"
        done = programs.run(programs.on_ranks(2, ["sh", "-c", script]), timeout=60)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn('the data of rank 1 are not those of rank 0: held-out["text"].sampled_crc32c is', done.stderr)


def sections(program, flag):
    """The flags that a program's help shows, as (section, flag), in order; those of no section have "Options"."""
    found, section = [], None
    for line in programs.succeed([programs.BIN / program, flag]).stdout.splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            section = heading[1].replace("OPTIONS", "Options")
        elif shown := re.match(r"  (?:-\w,)?--([a-z0-9-]+)", line):
            found.append((section, shown[1]))
    return found


class Help(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.all = sections("llama_train", "--help-all")
        cls.first = sections("llama_train", "--help")

    def test_long_help_has_each_flag_once(self):
        names = [name for _, name in self.all]
        self.assertEqual(sorted(set(names)), sorted(names))
        self.assertGreater(len(names), 70)

    def test_short_help_has_some_of_these_flags_in_the_same_sections(self):
        self.assertLess(set(self.first), set(self.all))
        self.assertLess(len(self.first), 30)
        text = programs.succeed([programs.BIN / "llama_train", "--help"]).stdout
        self.assertLess(len(text.splitlines()), 66)
        self.assertIn("--help-all", text)

    def test_a_section_is_shown_once(self):
        headings = [section for i, (section, _) in enumerate(self.all) if i == 0 or self.all[i - 1][0] != section]
        self.assertEqual(sorted(set(headings)), sorted(headings))

    def test_a_plan_has_its_own_flags_beside_them(self):
        shared = {name for _, name in self.all}
        own = {name for section, name in sections("llama_plan", "--help-all") if section == "plan"}
        self.assertLess({"gpu", "search", "gpus", "json"}, own | {"x"})
        self.assertEqual({name for _, name in sections("llama_plan", "--help-all")}, shared | own)
        self.assertEqual(own - {name for _, name in sections("llama_plan", "--help")}, set())
