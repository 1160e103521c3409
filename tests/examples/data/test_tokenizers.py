"""Token ids and texts beside other packages, for tokenizers of the kinds that models have and for
published ones."""
import array
import importlib.util
import itertools
import json
import pathlib
import shutil
import unittest

import programs
import tokenizers_of_kinds as kinds

SHORT = [b"", b" ", b"a", b"  a", b" \n ", b"<s>", b"a<s> b</s>", "\u00e9".encode(), b"\xe2\x82",
         "".join(map(chr, range(0x800))).encode(), "\u00b2\u00b3\u00b9\u00bc\u00bd\u00be12 \u0660 3".encode() * 3]


class Comparison(programs.WithSharedFolder):
    """Compares the ids and the decoded texts of token_ids with those of another package."""
    sizes = 700_000, 300_000, 200_000

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        multilingual, code, broken = cls.sizes
        texts = [kinds.multilingual(multilingual, seed=2).encode(),
                 kinds.code(programs.ROOT / "tests", code).encode(), kinds.broken(broken, seed=3), *SHORT]
        cls.texts = [cls.shared / f"text{number}" for number in range(len(texts))]
        for path, text in zip(cls.texts, texts):
            path.write_bytes(text)

    def compare(self, file, encode, decode):
        """`encode` makes a text ids, `decode` ids a text."""
        programs.succeed([programs.BIN / "token_ids", file, *self.texts])
        for path in self.texts:
            with self.subTest(tokenizer=file.name, text=path.name):
                ids = array.array("q", path.with_suffix(".ids").read_bytes()).tolist()
                decoded = path.with_suffix(".decoded").read_bytes().decode(errors="replace")
                # Broken bytes are U+FFFD to both.
                expected = encode(path.read_bytes().decode(errors="replace"))
                # Lists of this length are not for a message.
                agree = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, expected)))
                self.assertTrue(ids == expected, f"of {len(ids)} and {len(expected)} ids the first {agree} agree")
                self.assertTrue(decoded == decode(expected), "the texts differ")


class TrainedHere(Comparison):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        learnt = kinds.multilingual(200_000, seed=1) + kinds.code(programs.ROOT / "docs", 100_000)
        cls.tokenizers = kinds.save_all(cls.shared, learnt)

    def compare_kind(self, kind):
        theirs = self.tokenizers[kind]
        self.compare(self.shared / f"{kind}.json",
                     lambda text: theirs.encode(text, add_special_tokens=False).ids, theirs.decode)

    def test_llama2(self):
        self.compare_kind("llama2")

    def test_llama3(self):
        self.compare_kind("llama3")

    def test_mistral(self):
        self.compare_kind("mistral")

    def test_qwen(self):
        self.compare_kind("qwen")

    def test_gpt2(self):
        self.compare_kind("gpt2")

    def test_patterns_of_words(self):
        self.compare_kind("words")

    def test_steps_that_no_kind_has(self):
        self.compare_kind("digits")

    def test_steps_behind_bytes(self):
        self.compare_kind("behind_bytes")


class SentencePiece(Comparison):
    """Models with the options that the trainer takes by itself, which drop the spaces before a text."""
    # Short: SentencePiece 0.1.97 adds the scores of a text in fp32, and newer versions choose differently in long texts.
    sizes = 20_000, 8_000, 5_000

    def test_special_tokens_have_no_text(self):
        import sentencepiece
        import transformers
        learnt = kinds.multilingual(60_000, seed=1) + kinds.code(programs.ROOT / "docs", 60_000)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(learnt.splitlines()), model_prefix=str(self.shared / "tokenizer"), vocab_size=1500,
            split_digits=True, hard_vocab_limit=False, minloglevel=2)
        (self.shared / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "additional_special_tokens": ["<|eot|>"]}))
        theirs = transformers.LlamaTokenizer.from_pretrained(str(self.shared))
        self.compare(self.shared / "tokenizer.model", theirs.encode,
                     lambda ids: theirs.decode(ids, skip_special_tokens=True, spaces_between_special_tokens=False))


class OfModels(Comparison):
    """The files that are published, beside the package that each is made for."""
    sizes = 200_000, 100_000, 50_000

    def compare_llama(self, module):
        theirs = module.Tokenizer.get_instance()
        # They write special tokens out, which are no text to us.
        self.compare(pathlib.Path(module.__file__).with_name("tokenizer.model"),
                     lambda text: theirs.encode(text, bos=False, eos=False, allowed_special="all"),
                     lambda ids: theirs.decode([token for token in ids if token < theirs.bos_id]))

    def test_llama3(self):
        from llama_models.llama3 import tokenizer
        self.compare_llama(tokenizer)

    def test_llama4(self):
        from llama_models.llama4 import tokenizer
        self.compare_llama(tokenizer)

    def test_mistral(self):
        import sentencepiece
        import transformers
        data = pathlib.Path(importlib.util.find_spec("mistral_common").origin).parent / "data"
        for name in "tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3":
            theirs = sentencepiece.SentencePieceProcessor(model_file=str(data / name))
            # It finds special tokens in a text.
            tokenizer = transformers.LlamaTokenizer(str(data / name), legacy=True, add_bos_token=False)
            self.compare(data / name, tokenizer.encode, theirs.decode)

    def test_mistral_with_files_beside_it(self):
        import sentencepiece
        import transformers
        data = pathlib.Path(importlib.util.find_spec("mistral_common").origin).parent / "data"
        model = pathlib.Path(shutil.copy(data / "tokenizer.model.v1", self.shared / "tokenizer.model"))
        (self.shared / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "LlamaTokenizer", "legacy": False, "added_tokens_decoder": {
                str(i): {"content": text, "special": i == 2, "normalized": False, "lstrip": False, "rstrip": False,
                         "single_word": False}
                for i, text in ((0, "<unk>"), (1, "<s>"), (2, "</s>"), (32000, "don't"))}}))
        tokenizer = transformers.LlamaTokenizer.from_pretrained(str(self.shared), add_bos_token=False)
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
        text = self.shared / "short"
        text.write_text("a don't  b</s> c</s>d\n\u2581e <s>")
        programs.succeed([programs.BIN / "token_ids", model, text])
        ids = array.array("q", text.with_suffix(".ids").read_bytes()).tolist()
        self.assertEqual(ids, tokenizer.encode(text.read_text()))
        self.assertEqual(theirs.decode([i for i in ids if i < 32000]).split(), text.with_suffix(".decoded")
                         .read_text().replace("don't", "").split())
