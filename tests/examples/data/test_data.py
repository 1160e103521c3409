"""What llama_train learns from: mixtures of token files, documents, and prompts with completions, also from chats."""

import json
import random
import re
import sys

import transformers

import programs
import tokenizers_of_kinds as kinds


class Data(programs.InFolder):
    def losses(self, flags, dp=1, tp=1, steps=4):
        flags = ["--config", self.config, "--seq", 16, "--batch", 12, "--steps", steps, *flags]
        return [record["loss"] for record in programs.metrics_of(self.folder, flags, dp, tp)[0]]

    def refuse(self, flags, *parts):
        super().refuse([programs.BIN / "llama_train", "--config", self.config, *flags], *parts)


class Mixtures(Data):
    def setUp(self):
        super().setUp()
        # The run uses up the smaller token file.
        self.small = programs.write_tokens(self.folder / "s.bin", [7, 8, 9] * 80)
        self.mixture = ["--tokens", self.tokens, "--weight", 0.7, "--tokens", self.small, "--weight", 0.3,
                        "--shuffle", 3]

    def test_mixture_does_not_depend_on_mesh_or_resume(self):
        steps = self.folder / "steps"
        saved = ["--checkpoint", steps, "--checkpoint-every", 2]
        want = self.losses([*self.mixture, *saved])
        self.assert_close(self.losses(self.mixture, 3, 1), want)
        self.assertNotEqual(self.losses(["--tokens", self.tokens, "--shuffle", 3]), want)
        flags = ["--config", self.config, "--seq", 16, "--batch", 12, "--steps", 4, "--metrics",
                 self.folder / "resumed.jsonl", "--checkpoint", steps, "--resume-step"]
        (steps / "step-00000004").rename(self.folder / "end")
        programs.train([*flags, 2, *self.mixture])
        self.assertEqual([r["loss"] for r in programs.read_metrics(self.folder / "resumed.jsonl")], want[2:])
        other = [0.6 if flag == 0.7 else flag for flag in self.mixture]
        self.refuse([*flags[2:], 4, *other], "the data differ from the checkpoint", "weight", "0.6")

    def test_files_without_weights_are_sorted_and_joined(self):
        want = self.losses(["--tokens", self.folder / "*.bin"])
        self.assertEqual(self.losses(["--tokens", self.tokens, "--tokens", self.small, "--tokens", self.small]), want)

    def test_missing_weight_is_refused(self):
        self.refuse(self.mixture[:6], "--weight is given 1 times, but --tokens is given 2 times")
        self.refuse([*self.mixture, "--seq", 16, "--batch", 60], "a data source has 240 tokens", "batch of 60")


def own_loss(model, rows):
    """Returns the mean loss of all targets. A row of `rows` is a list of (input, target); a target None does not count."""
    import torch
    losses = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([[token for token, _ in row]])).logits[0]
        targets = torch.tensor([-100 if target is None else target for _, target in row])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none")[targets != -100])
    return torch.cat(losses).mean().item()


class LossesOfTransformers(Data):
    def setUp(self):
        super().setUp()
        self.rng = random.Random(4)

    def model(self, config):
        """Writes a model with random weights. Returns the same model in transformers."""
        import torch
        import transformers
        self.config = programs.write_config(self.folder, config)
        out = self.folder / config["model_type"]
        programs.train(["--config", self.config, "--steps", 0, "--save-hf", out])
        return transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32,
                                                                 attn_implementation="eager")

    def check(self, flags, want):
        """Expects that the first loss is `want`, and that a mesh has the losses of one rank."""
        one = self.losses(flags)
        self.assert_close(one[:1], [want])
        self.assertLess(one[-1], one[0])
        self.assert_close(self.losses([*flags, "--accumulate", 2, "--ac", "full", "--zero", 2], 3, 2), one)


class Documents(LossesOfTransformers):
    END = 10

    def packed(self, rows, sequence):
        """Writes a token file whose samples are whole documents. Returns the documents and the file."""
        documents, tokens = [], []
        for _ in range(rows):
            left = sequence
            while left > 0:
                size = min(left, self.rng.randrange(2, 9))
                size = left if left - size == 1 else size
                documents.append([self.rng.randrange(11, 256) for _ in range(size - 1)] + [self.END])
                tokens += documents[-1]
                left -= size
        return documents, programs.write_tokens(self.folder / "packed.bin", [*tokens, 1])

    def check_documents(self, config, flags):
        model = self.model(config)
        documents, shard = self.packed(12, 16)
        want = own_loss(model, [list(zip(doc, doc[1:])) for doc in documents])
        self.check(["--tokens", shard, "--document-mask", *flags], want)

    def test_document_mask_separates_documents(self):
        self.check_documents(programs.SMALL, ["--eos-token", self.END])
        self.check_documents(programs.SMALL | {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                                               "sliding_window": 3, "eos_token_id": self.END}, [])

    def test_document_mask_applies_to_the_held_out_loss(self):
        model = self.model(programs.SMALL)
        documents, shard = self.packed(24, 16)
        want = own_loss(model, [list(zip(doc, doc[1:])) for doc in documents])
        flags = ["--config", self.config, "--steps", 0, "--batch", 12, "--seq", 16, "--eval-tokens", shard,
                 "--document-mask", "--eos-token", self.END]
        for mesh, more in [({"dp": 3}, ["--accumulate", 2]), ({"cp": 2, "tp": 2}, [])]:
            with self.subTest(mesh=mesh):
                done = programs.train([*flags, *more], **mesh)
                self.assertAlmostEqual(float(re.search(r"held-out loss: ([\d.]+)", done.stdout)[1]), want, delta=2e-4)

    def test_unknown_end_token_is_refused(self):
        self.refuse(["--tokens", self.tokens, "--document-mask"], "--document-mask", "pass --eos-token")
        self.refuse(["--tokens", self.tokens, "--document-mask", "--eos-token", 256], "id 256", "vocabulary has 256")
        self.refuse(["--tokens", self.tokens, "--eos-token", 2], "--eos-token is given, but works only with --document-mask")


class Prompts(LossesOfTransformers):
    END = 10

    def write_lines(self, pairs, names=("prompt", "completion")):
        path = programs.write(self.folder / "p.jsonl", "".join(json.dumps(dict(zip(names, pair))) + "\n\n" for pair in pairs))
        return path

    def text(self, least, most):
        return "".join(chr(self.rng.randrange(32, 127)) for _ in range(self.rng.randint(least, most)))

    def rows(self, pairs, begin=(), end=(END,)):
        for prompt, completion in pairs:
            tokens = [*begin, *prompt.encode(), *completion.encode(), *end][:17]
            known = max(len(begin) + len(prompt), 1)
            yield [(token, target if i >= known else None)
                   for i, (token, target) in enumerate(zip(tokens, tokens[1:]), start=1)]

    def test_prompt_tokens_are_ignored_in_the_loss(self):
        model = self.model(programs.SMALL)
        # Few rows have most of the target tokens, so that the ranks have different numbers of targets.
        pairs = [(self.text(0, 9), self.text(0, 6) if i % 4 else self.text(7, 7)) for i in range(12)]
        pairs[0] = ("", self.text(16, 16))
        flags = ["--jsonl", self.write_lines(pairs), "--eos-token", self.END]
        self.check(flags, own_loss(model, self.rows(pairs)))
        again = self.losses(["--jsonl", self.write_lines(pairs, ("q", "a")), "--eos-token", self.END,
                             "--prompt-field", "q", "--completion-field", "a"], steps=1)
        self.assert_close(again, [own_loss(model, self.rows(pairs))])

    def test_plain_and_compressed_jsonl_files(self):
        import gzip
        self.model(programs.SMALL)
        pairs = [(self.text(0, 9), self.text(1, 6)) for _ in range(12)]
        flags = ["--eos-token", self.END]
        one = self.losses(["--jsonl", self.write_lines(pairs), *flags])
        (self.folder / "b.jsonl.gz").write_bytes(gzip.compress(self.write_lines(pairs[5:9]).read_bytes()))
        self.write_lines(pairs[9:]).rename(self.folder / "c")
        (self.folder / "a.jsonl").write_bytes(self.write_lines(pairs[:5]).read_bytes())
        several = ["--jsonl", f"{self.folder}/[ab].jsonl*", "--jsonl", self.folder / "c"]
        self.assertEqual(self.losses([*several, *flags]), one)
        (self.folder / "c").write_text('{"prompt": "a"}\n')
        self.refuse([*several, *flags], "c:1: the object has no field")

    def test_truncated_prompts_have_the_begin_token(self):
        model = self.model(programs.SMALL | {"bos_token_id": 1, "eos_token_id": self.END})
        pairs = [(self.text(3, 9), self.text(4, 20)) for _ in range(12)]
        flags = ["--jsonl", self.write_lines(pairs)]
        want = own_loss(model, self.rows(pairs, begin=[1]))
        self.assert_close(self.losses([*flags, "--truncate"], 2, 2)[:1], [want])
        self.refuse([*flags, "--seq", 16, "--batch", 12], "p.jsonl:", "last target", " 17 tokens")

    def test_begin_token_does_not_depend_on_the_tokenizer_path(self):
        import shutil
        config = programs.write(self.folder / "config.json", json.dumps(programs.SMALL | {"bos_token_id": 1, "eos_token_id": 2}))
        tokenizer = {"model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}, "merges": []}}
        folder = self.folder / "tokenizer"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        shutil.copy(folder / "tokenizer.json", self.folder / "vocabulary")
        lines = programs.write(self.folder / "lines.jsonl", '{"prompt": "ab", "completion": "cd"}\n' * 24)
        losses = [self.losses(["--config", config, "--jsonl", lines, "--tokenizer", name, "--seq", 16], steps=2)
                  for name in (folder / "tokenizer.json", folder, self.folder / "vocabulary")]
        self.assertEqual(losses[1:], losses[:1] * 2)

    def test_resume_requires_the_same_end_token(self):
        """A run continues if --eos-token is the end token that the model's files name, and not otherwise."""
        model = programs.write_config(self.folder, programs.SMALL)
        ends = programs.write(self.folder / "generation_config.json", json.dumps({"eos_token_id": self.END}))
        flags = ["--config", model, "--tokens", self.tokens, "--batch", 12, "--seq", 16, "--document-mask",
                 "--checkpoint", self.folder / "steps", "--resume", "auto"]
        programs.train([*flags, "--steps", 1])
        programs.train([*flags, "--steps", 2, "--eos-token", self.END])
        ends.write_text(json.dumps({"eos_token_id": self.END + 1}))
        self.refuse([*flags, "--steps", 3], f"samples.end[0] is {self.END + 1} instead of {self.END}")

    def test_invalid_completions_are_refused(self):
        flags = ["--eos-token", self.END, "--seq", 4, "--batch", 1, "--jsonl"]
        self.refuse([*flags, self.write_lines([])], "have no JSON object")
        self.refuse([*flags, self.write_lines([("a", 3)])], 'p.jsonl:1: the field "completion" must be a string, but is of type number')
        self.refuse(flags[:-1] + ["--text", self.tokens, "--truncate"], "--truncate is given, but works only with --jsonl")


TURNS = [{"role": "user", "content": "What is 2 + 2?\n"}, {"role": "assistant", "content": " 4 \u00e9\U0001f600"},
         {"role": "user", "content": "And 'twice' \"that\"?"}, {"role": "assistant", "content": "8 <b>"}]
CHATML = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# A template that changes earlier turns, as templates do that drop the reasoning of earlier turns.
LAST_ALONE = "{% for message in messages %}{% if loop.last %}{{ message['content'] }}{% else %}.{% endif %}{% endfor %}"


class Chat(programs.WithSharedFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tokenizer = kinds.llama3(kinds.multilingual(50_000, seed=1))
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.save(str(cls.shared / "tokenizer.json"))
        page = (programs.ROOT / "docs/data.md").read_text()
        cls.program = programs.write(cls.shared / "chats.py", re.search(r"(?s)```python\n(.*?)```", page)[1])
        cls.refused = cls.write(LAST_ALONE)
        cls.done = cls.write(CHATML)

    @classmethod
    def write(cls, template):
        """Runs the program on two chats."""
        (cls.shared / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}))
        lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in (TURNS, TURNS[:3]))
        return programs.run([sys.executable, cls.program, cls.shared], input=lines)

    def test_assistant_turns_are_the_completions(self):
        self.assertEqual(self.done.returncode, 0, self.done.stderr)
        both, first = map(json.loads, self.done.stdout.splitlines())
        self.assertEqual(both["completion"], [" 4 \u00e9\U0001f600<|im_end|>\n", "8 <b><|im_end|>\n"])
        self.assertEqual(first["completion"], both["completion"][:1])
        text = "".join(part for pair in zip(both["prompt"], both["completion"]) for part in pair)
        theirs = transformers.AutoTokenizer.from_pretrained(str(self.shared))
        self.assertEqual(text, theirs.apply_chat_template(TURNS, tokenize=False))

    def test_templates_that_change_earlier_messages_are_refused(self):
        self.assertEqual(self.refused.returncode, 1)
        self.assertIn("changes earlier messages", self.refused.stderr)

    def test_chat_data_trains_and_generates(self):
        data, model = self.shared / "data.jsonl", self.shared / "model"
        data.write_text(self.done.stdout)
        config = programs.write_config(self.shared, programs.SMALL | {"vocab_size": 4000})
        programs.train(["--config", config, "--jsonl", data, "--tokenizer", self.shared / "tokenizer.json", "--seq", 160,
                        "--batch", 2, "--eos-token", 1, "--steps", 2, "--save-hf", model])
        (model / "tokenizer.json").write_bytes((self.shared / "tokenizer.json").read_bytes())
        prompts, prompt = self.shared / "prompts.jsonl", "<s><|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
        prompts.write_text(json.dumps({"prompt": [prompt]}) + "\n")
        done = programs.succeed([programs.BIN / "llama_generate", "--model", model, "--prompts", prompts,
                                 "--max-tokens", 2, "--json"])
        self.assertEqual(json.loads(done.stdout)["prompt"], prompt)
        prompts.write_text(json.dumps({"messages": TURNS}) + "\n")
        programs.fail([programs.BIN / "llama_generate", "--model", model, "--prompts", prompts],
                      'prompts.jsonl:1: the object has no field "prompt"')
