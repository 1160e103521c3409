"""Names of models in the cache of Hugging Face's hub: the programs find what `huggingface_hub` finds, offline."""
import json
import os
import pathlib

import programs
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError

MAIN = "a" * 40
OLD = "b" * 40
NAME = "some-org/small.model-1"


def add_snapshot(cache, name, commit, files, refs=()):
    """As `hf download` leaves it: links into blobs, and refs that hold a commit."""
    model = pathlib.Path(cache, "models--" + name.replace("/", "--"))
    snapshot = model / "snapshots" / commit
    for folder in (snapshot, model / "blobs"):
        folder.mkdir(parents=True, exist_ok=True)
    for file, source in files.items():
        blob = model / "blobs" / f"{commit[:4]}-{file}"
        blob.write_bytes(pathlib.Path(source).read_bytes())
        (snapshot / file).symlink_to(f"../../blobs/{blob.name}")
    for ref in refs:
        path = model / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


class TestHubCache(programs.WithSharedFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = cls.shared / "model"
        programs.train(["--config", programs.write_config(cls.shared, programs.SMALL), "--steps", 0, "--save-hf", cls.model])
        tokenizer = cls.shared / "tokenizer.json"
        alphabet = {chr(33 + i): i for i in range(90)}
        tokenizer.write_text(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                                         "post_processor": None, "decoder": None,
                                         "model": {"type": "BPE", "vocab": alphabet, "merges": []}}))
        cls.cache = cls.shared / "hf" / "hub"
        files = {file.name: file for file in cls.model.iterdir()}
        cls.main = add_snapshot(cls.cache, NAME, MAIN, files | {"tokenizer.json": tokenizer}, ["main", "v1", "refs/pr/2"])
        cls.old = add_snapshot(cls.cache, NAME, OLD, {"config.json": files["config.json"]}, ["old"])
        cls.environment = {name: value for name, value in os.environ.items()
                           if not name.startswith(("HF_", "HUGGINGFACE_"))} | {"HF_HOME": str(cls.shared / "hf")}
        cls.tokens = programs.write_tokens(cls.shared / "t.bin", programs.text_tokens(2000, 256))

    def run_program(self, *command):
        return programs.run([programs.BIN / command[0], *command[1:]], env=self.environment)

    def succeed(self, *command):
        done = self.run_program(*command)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_every_program_takes_a_name(self):
        trained = ["--tokens", self.tokens, "--steps", 2, "--batch", 2, "--seq", 16]
        steps = self.shared / "steps"
        self.succeed("llama_train", "--model", NAME, *trained, "--metrics", self.shared / "by_name.jsonl",
                     "--checkpoint", steps)
        self.succeed("llama_train", "--model", self.model, *trained, "--metrics", self.shared / "by_path.jsonl")
        losses = [[step["loss"] for step in programs.read_metrics(self.shared / f"{how}.jsonl")]
                  for how in ("by_name", "by_path")]
        self.assertEqual(*losses)
        self.succeed("llama_train", "--config", f"{NAME}@{OLD}", "--tokenizer", NAME, *trained)
        self.succeed("llama_plan", "--model", f"{NAME}@old", "--dp", 2)
        self.succeed("llama_generate", "--model", NAME, "--prompt", "abc", "--max-tokens", 2, "--tokenizer", NAME)
        text = self.shared / "text.txt"
        text.write_text("abc" * 50)
        self.succeed("llama_tokenize", "--tokenizer", NAME, "--no-eos", "--out", self.shared / "shard", text)

    def test_is_what_huggingface_hub_finds(self):
        for revision, snapshot in ((None, self.main), ("v1", self.main), ("refs/pr/2", self.main), (MAIN, self.main),
                                   ("old", self.old), (OLD, self.old)):
            with self.subTest(revision):
                self.assertEqual(snapshot_download(NAME, revision=revision, cache_dir=self.cache, local_files_only=True),
                                 str(snapshot))
                self.assertEqual(try_to_load_from_cache(NAME, "config.json", self.cache, revision),
                                 str(snapshot / "config.json"))
                if revision in (None, "old", "refs/pr/2"):
                    out = self.shared / f"run-{snapshot.name[:2]}-{str(revision).replace('/', '-')}"
                    self.succeed("llama_train", "--config", f"{NAME}@{revision}" if revision else NAME, "--steps", 0, "--output-dir", out)
                    self.assertIn(str(snapshot / "config.json"), (out / "config.toml").read_text())
        with self.assertRaises(LocalEntryNotFoundError):
            snapshot_download(NAME, revision="v2", cache_dir=self.cache, local_files_only=True)
        done = self.run_program("llama_train", "--config", f"{NAME}@v2", "--steps", 0)
        self.assertIn(f"has no revision v2 ('{self.main.parents[1]}'); fetch it with: hf download {NAME} --revision v2",
                      done.stderr)
