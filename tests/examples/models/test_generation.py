"""llama_generate against transformers: greedy texts of a batch on any mesh, the tokens that may be
drawn, perplexity, and what is refused."""
import json
import math
import os
import subprocess
import unittest

import programs
import tokenizers_of_kinds as kinds

COUNT = 40
PROMPTS = ["The shell", "A", "Another prompt that is longer"]
GREEDY = ["--temperature", 0, "--max-tokens", COUNT]


def generating(arguments, tp=1):
    return programs.on_ranks(tp, [programs.BIN / "llama_generate", "--tp", tp, *arguments])


def texts(arguments, tp=1):
    """The token ids that llama_generate makes, and how each text has ended."""
    done = programs.succeed(generating(["--json", *arguments], tp))
    return [(text["tokens"], text["finish"]) for text in map(json.loads, done.stdout.splitlines())]


def flag_of_each(flag, values):
    return [part for value in values for part in (flag, value)]


def greedy_tokens(model, prompt, **options):
    import torch
    ids = torch.tensor([list(prompt.encode())])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT,
                         eos_token_id=None, pad_token_id=0, **options)
    return out[0].tolist()[ids.shape[1]:]


class Generation(programs.InFolder):
    def make(self, name):
        folder = self.folder / name
        return folder, programs.make_architecture(folder, programs.MODELS[name])

    def test_greedy_texts_equal_transformers_on_any_mesh(self):
        # The texts become longer than the sliding window.
        for name, meshes in (("llama1", (1,)), ("llama2_with_biases", (2,)), ("llama3", (4,)), ("linear", (1,)),
                             ("yarn", (1,)), ("mistral_with_window", (1, 4)), ("qwen2", (4,)), ("qwen3", (2,)),
                             ("mixtral_with_window", (4,)), ("qwen3_moe_with_dense", (1, 2)), ("olmoe", (1, 4))):
            folder, model = self.make(name)
            theirs = [(greedy_tokens(model, prompt), "length") for prompt in PROMPTS]
            for tp in meshes:
                with self.subTest(name, tp=tp):
                    batch = ["--model", folder, *flag_of_each("--prompt", PROMPTS), *GREEDY]
                    self.assertEqual(texts(batch, tp), theirs)

    def test_ranks_can_outnumber_key_value_heads(self):
        """A model with 2 key-value heads is trained on 4 ranks, exported, and generates the texts of transformers."""
        import torch
        import transformers
        folder = self.folder / "few"
        programs.make_architecture(folder, programs.MODELS["qwen3"] | {"num_key_value_heads": 2})
        losses, export = {}, self.folder / "out"
        for tp in (1, 4):
            rows, said = programs.metrics_of(self.folder, [
                "--model", folder, "--tokens", self.tokens, "--batch", 2, "--seq", 32, "--steps", 3,
                *(["--save-hf", export] if tp > 1 else [])], tp=tp)
            losses[tp] = [step["loss"] for step in rows]
        self.assertIn("key-value heads: 2 on 4 tensor-parallel ranks, each on 2 of them\n", said)
        self.assert_close(losses[4], losses[1], 1e-4)
        model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
        theirs = [(greedy_tokens(model, prompt), "length") for prompt in PROMPTS]
        batch = ["--model", export, *flag_of_each("--prompt", PROMPTS), *GREEDY]
        self.assertEqual(texts(batch, 4), theirs)

    def test_seed_gives_the_same_text_on_any_mesh(self):
        folder, _ = self.make("llama3")
        drawn = ["--model", folder, *flag_of_each("--prompt", PROMPTS), "--max-tokens", 20, "--seed", 3, "--top-k", 50]
        one = texts(drawn)
        for tp in (2, 4):
            self.assertEqual(texts(drawn, tp), one)
        self.assertNotEqual(texts([*drawn[:-3], 4, *drawn[-2:]]), one)

    def test_begin_and_end_tokens_come_from_the_model_folder(self):
        folder, model = self.make("llama1")
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token_id": 7}))
        tokens = greedy_tokens(model, "\x07" + PROMPTS[0])
        at = next(i for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])
        other = next(token for token in range(256) if token not in tokens)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, tokens[at]]}))
        self.assertEqual(texts(["--model", folder, "--prompt", PROMPTS[0], *GREEDY]), [(tokens[:at], "end")])

    def test_half_precision_follows_transformers(self):
        import torch
        folder, model = self.make("llama1")
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            with self.subTest(name):
                theirs = greedy_tokens(model.to(dtype), PROMPTS[0])
                (ours, _), = texts(["--model", folder, "--prompt", PROMPTS[0], *GREEDY, "--dtype", name])
                # Roundings differ, so that texts may differ after some tokens.
                self.assertEqual(ours[:8], theirs[:8])

    def test_generation_ignores_attention_dropout(self):
        folder, model = self.make("llama1")
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
        self.assertEqual(texts(["--model", folder, "--prompt", PROMPTS[0], *GREEDY]),
                         [(greedy_tokens(model, PROMPTS[0]), "length")])
        self.refuse([programs.BIN / "llama_train", "--model", folder, "--tokens", self.tokens],
                    '"attention_dropout" is 0.1, but attention dropout is not implemented in training')

    def test_perplexity_equals_transformers(self):
        import torch
        folder, model = self.make("mistral")
        text = bytes(programs.text_tokens(150, 90))
        file = self.folder / "text"
        file.write_bytes(text)
        tokens = torch.tensor(list(text))
        for seq, stride, tp in ((24, 24, 1), (24, 10, 2), (32, 1, 1), (None, None, 4)):
            window = seq or programs.POSITIONS
            total, foretold = 0.0, 1
            for begin in range(0, len(text), stride or window):
                end = min(begin + window, len(text) - 1)
                with torch.no_grad():
                    scores = model(tokens[None, begin:end]).logits[0].log_softmax(-1)
                for target in range(foretold, end + 1):
                    total -= scores[target - 1 - begin, tokens[target]].item()
                foretold = end + 1
                if foretold == len(text):
                    break
            theirs = math.exp(total / (len(text) - 1))
            flags = ["--seq", seq, "--stride", stride] if seq else []
            done = programs.succeed(generating(["--model", folder, "--perplexity", file, "--json", *flags], tp))
            with self.subTest(seq=seq, stride=stride, tp=tp):
                ours = json.loads(done.stdout)
                self.assertEqual(ours["tokens"], len(text) - 1)
                self.assertAlmostEqual(ours["perplexity"] / theirs, 1, delta=1e-4)

    def test_texts_begin_with_all_tokens_of_the_template(self):
        import torch
        folder, model = self.make("llama1")
        tokenizer = kinds.of_letters("<1> <2> $A <3>")
        tokenizer.save(str(folder / "tokenizer.json"))
        text = "some text of letters"
        begun = tokenizer.encode(text).ids[:-1]
        self.assertEqual(texts(["--model", folder, "--prompt", text, *GREEDY])[0][0], greedy_tokens(model, bytes(begun).decode()))
        file = programs.write(self.folder / "text", text)
        done = programs.succeed(generating(["--model", folder, "--perplexity", file, "--json"]))
        ids = torch.tensor([begun])
        with torch.no_grad():
            want = model(ids, labels=ids).loss.exp().item()
        ours = json.loads(done.stdout)
        self.assertEqual(ours["tokens"], len(begun) - 1)
        self.assertAlmostEqual(ours["perplexity"] / want, 1, delta=1e-4)

    @unittest.skipUnless(programs.FAKE_CUDA.exists(), "built without CUDA's headers")
    def test_computes_only_on_the_device(self):
        """The device is fake, and its kernels compute nothing. An operator of tensors on two devices would be an error."""
        folder, _ = self.make("qwen3")
        fake = dict(os.environ, LD_PRELOAD=str(programs.FAKE_CUDA))
        model = ["--model", folder, "--device", "cuda"]
        drawn = [*flag_of_each("--prompt", PROMPTS), "--max-tokens", 3, "--top-p", 0.9]
        done = programs.run(generating([*model, *drawn, "--json"]), env=fake)
        if "the logits of the next token" not in done.stderr:
            self.assertEqual((done.returncode, len(done.stdout.splitlines())), (0, len(PROMPTS)), done.stderr)
        text = programs.write(self.folder / "text", "x" * 40)
        done = programs.run(generating([*model, "--perplexity", text], tp=2), env=fake)
        if "is not finite" not in done.stderr:
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_nan_perplexity_is_an_error(self):
        folder, model = self.make("llama1")
        model.lm_head.weight.data.fill_(float("nan"))
        model.save_pretrained(folder)
        text = self.folder / "text"
        text.write_text("some text")
        for flags in ([], ["--json"]):
            done = programs.fail(generating(["--model", folder, "--perplexity", text, *flags]),
                                 "is not finite, because the mean loss is nan")
            self.assertEqual((done.stdout, done.stderr.count("\n")), ("", 1), done.stderr)

    def test_unwritable_output_is_an_error(self):
        folder, _ = self.make("llama1")
        for program, *arguments in (("llama_generate", "--model", folder, "--prompt", "a"), ("vit_train", "--plan"),
                                    ("tessera-ckpt", "--help")):
            with self.subTest(program), open("/dev/full", "w") as full:
                done = subprocess.run([programs.BIN / program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertGreater(done.returncode, 0, done.stderr)
                self.assertIn("standard output can't be written", done.stderr)

    def test_differences_between_ranks_are_refused(self):
        folder, _ = self.make("llama1")
        for rank, words in enumerate(("one text", "two text")):
            (self.folder / f"text{rank}").write_text(words)
        text = f"{self.folder}/text$RANK"
        for flags, message in (
                ("--prompt A --max-tokens $((RANK + 3))", "rank 1 has --max-tokens 4, but rank 0 has --max-tokens 3"),
                (f"--prompts {text}", "rank 1 has other input tokens than rank 0"),
                (f"--perplexity {text}", "rank 1 has other input tokens than rank 0")):
            with self.subTest(flags):
                script = f"exec {programs.BIN}/llama_generate --tp 2 --model {folder} {flags}"
                done = programs.fail(programs.on_ranks(2, ["sh", "-c", script]), message, timeout=60)
                self.assertEqual(done.stdout, "")

    def test_refusals_are_one_line(self):
        folder, _ = self.make("llama1")
        empty = programs.write(self.folder / "empty.txt", "\n")
        one = programs.write(self.folder / "one", "a")
        long = "x" * (programs.POSITIONS + 1)
        cases = [(["--prompt", long], 1, "a prompt has 33 tokens, but the model has 32 positions"),
                 (["--prompt", "a", "--max-tokens", 999999999999], 1,
                  "--max-tokens 999999999999 is more than the 32 positions"),
                 (["--prompts", empty], 1, "empty.txt contains no prompt"),
                 (["--prompts", self.folder / "none"], 1, "none"),
                 (["--perplexity", one], 1, "the text of --perplexity has 1 token, "),
                 (["--perplexity", one, "--seq", 33], 1, "--seq 33 is more than the 32 positions"),
                 (["--prompt", "a"], 3, "num_attention_heads 8 can't be split at a tensor-parallel degree of 3")]
        for flags, tp, message in cases:
            with self.subTest(message):
                done = programs.fail(generating(["--model", folder, *flags], tp), message, timeout=60)
                self.assertEqual(done.stdout, "")
        self.refuse([programs.BIN / "llama_generate", "--model", folder, "--prompt", "a", "--tp", 2],
                    "--tp 2 needs 2 ranks, but 1 is running; start 2 (tessera-run --nproc 2)")
