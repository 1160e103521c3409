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
        """Runs llama_train, which must end with code 1, write no files, and print a line that has all parts."""
        before = set(self.folder.rglob("*"))
        command = [programs.BIN / "llama_train", "--dp", dp, "--tp", tp, *arguments]
        nproc = nproc or dp * tp
        start = time.monotonic()
        done = programs.fail(programs.on_ranks(nproc, command), timeout=60)
        lines = [line for line in done.stderr.splitlines() if all(p in line for p in parts)]
        self.assertTrue(lines, f"no line with {parts} in:\n{done.stderr}")
        # Standard error has the line of one or more ranks and the launcher's report, but no stack traces.
        self.assertLessEqual(len(done.stderr.splitlines()), 3 + nproc, done.stderr)
        self.assertEqual(set(self.folder.rglob("*")), before)
        self.assertLess(time.monotonic() - start, 30)

    def data(self, **changes):
        flags = {"config": self.config, "tokens": self.tokens, "seq": 32, "batch": 4, "steps": 2}
        flags |= changes
        return [part for name, value in flags.items() if value is not None
                for part in (f"--{name.replace('_', '-')}", value)]

    def config_with(self, **changes):
        path = programs.write(self.folder / "changed.json", json.dumps(programs.SMALL | changes))
        return path

    def test_errors_name_the_invalid_input(self):
        model = programs.make_model(self.folder, programs.SMALL)
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        def shard(name, tokens, **kwargs):
            return programs.write_tokens(self.folder / f"{name}.bin", tokens, **kwargs)
        few_heads = self.config_with(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        for data, flags, words, mesh in (
                ({}, [], ("--dp 2", "--tp 2", "4 ranks"), {"dp": 2, "tp": 2, "nproc": 3}),
                ({"config": few_heads}, [], ("num_attention_heads 6", "tensor-parallel degree of 4"), {"tp": 4}),
                ({"config": None, "model": model}, [], ("model.safetensors",), {"dp": 2}),
                ({"tokens": shard("bad", range(200), magic=7)}, [], ("bad.bin", "magic"), {"dp": 2}),
                ({"tokens": shard("few", range(50))}, [], ("50 tokens", "batch of 4"), {"dp": 2}),
                ({"tokens": shard("high", [5] * 300 + [300] + [5] * 700)}, [], ("token 300", "position 300", "256"), {"dp": 2}),
                ({}, ["--config-file", self.folder / "none.toml"], ("--config-file", "none.toml"), {}),
                ({"config": self.folder / "none.json"}, [], ("none.json",), {}),
                ({"config": None, "model": self.folder / "nowhere"}, [], ("nowhere",), {"dp": 2}),
                ({"tokens": None, "text": "/dev/zero"}, [], ("'/dev/zero' is not a regular file",), {}),
                ({"tokens": None, "jsonl": self.folder / "none*"}, [], ("--jsonl", "none*"), {}),
                ({}, ["--checkpoint", ""], ("--checkpoint", "an empty value", "DIR"), {}),
                ({"seq": 2**63 - 1}, [], (f"--seq {2**63 - 1}", "1000000 tokens"), {})):
            with self.subTest(words):
                self.refuse([*self.data(**data), *flags], *words, **mesh)

    def test_invalid_flags_fail_before_the_rendezvous(self):
        config = self.config_with(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        # The program is rank 1, and no rank 0 is started.
        alone = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
        for flags, message in ((["--tp", 3], "num_key_value_heads 2 can't be split or copied at a tensor-parallel degree of 3"),
                               (["--dp", 3, "--batch", 3, "--lora-rank", 2, "--lora-targets", "model.norm"],
                                "'model.norm' matches no nn::Linear")):
            with self.subTest(message):
                super().refuse([programs.BIN / "llama_train", *self.data(config=config), *flags], message,
                               env=os.environ | alone, timeout=60)

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            programs.fail([programs.BIN / "llama_train", *self.data(), "--dp", 2], port, timeout=60, env=os.environ | rank)

    def test_error_or_difference_on_one_rank_ends_all_ranks(self):
        """Rank 1 has other flags, or other files in a folder that is named by the rank."""
        others = self.folder / "others" / self.tokens.name
        others.parent.mkdir()
        programs.write_tokens(others, [1] * (self.tokens.stat().st_size // 2))
        for rank, (end, epsilon, text) in enumerate(((7, 1e-5, "one "), (9, 1e-6, "two "))):
            for kind in ("ends", "epsilons", "texts"):
                (self.folder / kind / str(rank)).mkdir(parents=True)
            programs.write_config(self.folder / "ends" / str(rank), programs.SMALL)
            (self.folder / "ends" / str(rank) / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
            programs.write_config(self.folder / "epsilons" / str(rank), programs.SMALL | {"rms_norm_eps": epsilon})
            (self.folder / "texts" / str(rank) / "text").write_text(text * 300)
        data = "the data of rank 1 differ from the data of rank 0: "
        for degree, changes, flags, more, message in (
                ("--dp", {"tokens": None}, f"--tokens {self.tokens}", f"--tokens {self.folder}/none.bin", "none.bin"),
                ("--dp", {"tokens": None}, f"--tokens {self.tokens}", f"--tokens {others}",
                 f'{data}training.files["{self.tokens.name}"]'),
                ("--dp", {}, "", "--lr 0.002", "rank 1 has --lr 0.002, but rank 0 has --lr 0.001"),
                ("--dp", {}, "", "--resume auto --checkpoint here", "rank 1 has --checkpoint FILE, but rank 0 has no --checkpoint"),
                ("--dp", {"config": f"{self.folder}/epsilons/$RANK/config.json"}, "", "",
                 "rank 1 has config.json with rms_norm_eps 1e-06, but rank 0 has config.json with rms_norm_eps 1e-05"),
                # The end tokens differ in generation_config.json, while config.json is equal.
                ("--tp", {"config": f"{self.folder}/ends/$RANK/config.json"}, "--document-mask", "--document-mask",
                 f"{data}training.samples.end[0] is 9 instead of 7"),
                ("--dp", {}, f"--eval-text {self.folder}/texts/$RANK/text", f"--eval-text {self.folder}/texts/$RANK/text",
                 f'{data}held-out["text"].sampled_crc32c is')):
            with self.subTest(message):
                shared = " ".join(map(str, self.data(**changes)))
                script = (f'[ "$RANK" = 1 ] && more="{more}" || more="{flags}"; '
                          f"exec {programs.BIN}/llama_train {degree} 2 {shared} $more")
                programs.fail(programs.on_ranks(2, ["sh", "-c", script]), message, timeout=60)


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

    def test_short_help_is_a_subset_of_the_full_help(self):
        self.assertEqual(len(set(self.all)), len(self.all))
        self.assertGreater(len(self.all), 70)
        self.assertLess(set(self.first), set(self.all))
        self.assertLess(len(self.first), 30)
        text = programs.succeed([programs.BIN / "llama_train", "--help"]).stdout
        self.assertLess(len(text.splitlines()), 66)
        self.assertIn("--help-all", text)

    def test_llama_plan_has_the_shared_flags_and_its_own(self):
        shared = {name for _, name in self.all}
        own = {name for section, name in sections("llama_plan", "--help-all") if section == "plan"}
        self.assertLess({"gpu", "search", "gpus", "json"}, own | {"x"})
        self.assertEqual({name for _, name in sections("llama_plan", "--help-all")}, shared | own)
        self.assertEqual(own - {name for _, name in sections("llama_plan", "--help")}, set())
