"""Token ids and texts compared with other packages, for every kind of tokenizer and every code point of Unicode 3.2."""

import array
import importlib.util
import itertools
import json
import pathlib
import random
import shutil
import unicodedata
import unittest

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
import regex

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


CODES = [code for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")
         and unicodedata.category(chr(code)) == unicodedata.ucd_3_2_0.category(chr(code))]
ALL = "".join(map(chr, CODES))
LINES = "\n".join(ALL)
PATTERNS = [
    r"\p{L}", r"\p{N}", r"\p{P}", r"\p{S}", r"\p{M}", r"\p{Z}", r"\P{L}", r"\p{^N}", r"\p{Emoji}",
    r"\p{White_Space}", r"\p{Upper case}", r"\p{Ideographic}", r"\p{Extended_Pictographic}",
    r"\w", r"\W", r"[\w]", r"[^\w]", r"\s", r"[^\s]", r"[\S]", r"\d", r"\h", ".",
    r"[a-f[\u4e00-\u9fa5]\x{1F600}-\x{1F64F}]", r"[^[-a]-c[x-]z]",
    r"(?i:k)", r"(?i:[^s])", r"(?i:[a-z])", r"(?i:\p{Lu}|\u00e5)", r"\b.", r".\B"]


def names(kind):
    """One name for each value of a property that some of the code points have."""
    chosen = {}
    for name, value in regex._regex.get_properties()[kind][1].items():
        if name.isalpha() and (kind == "SCRIPT" or len(name) == 2) and regex.search(rf"\p{{{name}}}", ALL):
            chosen.setdefault(value, name)
    return sorted(chosen.values())


class Unicode(programs.WithSharedFolder):
    def ours(self, text, normalizer=None, pre_tokenizer=None, added=()):
        """The text that is left: its tokens are bytes."""
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
        tokenizer.add_tokens(list(added))
        form = json.loads(tokenizer.to_str())
        bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        form["normalizer"] = json.loads(normalizer.__getstate__()) if normalizer else None
        steps = [json.loads(pre_tokenizer.__getstate__())] if pre_tokenizer else []
        form["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, bytes_alone]}
        form["decoder"] = bytes_alone | {"use_regex": True}
        file, source = self.shared / "tokenizer.json", self.shared / "text"
        file.write_text(json.dumps(form))
        source.write_bytes(text.encode())
        programs.succeed([programs.BIN / "token_ids", file, source])
        return source.with_suffix(".decoded").read_bytes().decode()

    def compare(self, got, want, what=""):
        """Texts of this length are not for a message."""
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
            self.fail(f"{what[-300:]}: they differ at {at}: {got[at:at + 8]!r} for {want[at:at + 8]!r}, "
                      f"behind {want[max(at - 8, 0):at]!r}")

    def compare_normalizer(self, normalizer, text=ALL):
        self.compare(self.ours(text, normalizer), normalizer.normalize_str(text), str(normalizer))

    def test_patterns(self):
        for pattern in PATTERNS:
            with self.subTest(pattern):
                self.compare_normalizer(normalizers.Replace(Regex(pattern), ""))

    def compare_values(self, kind, first):
        """Each as a number in place of its code points, that of most first."""
        values = [first, *(name for name in names(kind) if name not in (first, "COMMON", "ZYYY"))]
        self.compare_normalizer(normalizers.Sequence(
            [normalizers.Replace(Regex(rf"\p{{{name}}}+"), f"<{i}>") for i, name in enumerate(values)]))

    def test_scripts(self):
        self.compare_values("SCRIPT", "HAN")

    def test_categories(self):
        self.compare_values("GENERALCATEGORY", "LO")

    def test_forms(self):
        for form in normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase():
            with self.subTest(str(form)):
                self.compare_normalizer(form, LINES)

    def test_forms_of_many_marks(self):
        """Order, composition and what hinders it, Hangul by its letters."""
        rng = random.Random(1)
        decomposed = [c for c in LINES.split("\n") if c and len(normalizers.NFD().normalize_str(c)) > 1]
        parts = sorted({part for c in decomposed for part in normalizers.NFD().normalize_str(c)})
        marks = [c for c in parts if normalizers.NFD().normalize_str(f"a\u0345{c}") != f"a\u0345{c}"]
        kinds = decomposed, parts, marks, marks, list("aeiou\u1100\u1161\u11a8\uac00\uac01\u0345")
        text = "".join(rng.choice(rng.choice(kinds)) for _ in range(300_000))
        for form in normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD():
            with self.subTest(str(form)):
                self.compare_normalizer(form, text)

    def test_steps(self):
        for step in pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation("removed"):
            with self.subTest(str(step)):
                # Each is preceded by an "x", which remains if the step does not take the character.
                text = "".join(f"x{c}" for c in ALL if c not in "x")
                got = self.ours(text, pre_tokenizer=pre_tokenizers.Sequence([
                    step, pre_tokenizers.Split(Regex("x$"), "removed")]))
                want = "".join(piece for piece, _ in pre_tokenizers.Sequence([
                    step, pre_tokenizers.Split(Regex("x$"), "removed")]).pre_tokenize_str(text))
                self.compare(got, want)

    def test_white_space_and_words_beside_added_tokens(self):
        for options in {"lstrip": True}, {"rstrip": True}, {"single_word": True}:
            with self.subTest(options):
                token = AddedToken("<t>", normalized=False, special=True, **options)
                theirs = Tokenizer(models.BPE({"x": 0}, []))
                theirs.add_special_tokens([token])
                text = "".join(f"x{c}<t> <t>{c}x" for c in ALL)
                got = self.ours(text, added=[token])
                encoded = theirs.encode(text)
                want, last = "", 0
                for begin, end in (span for i, span in zip(encoded.ids, encoded.offsets) if i == 1):
                    want += text[last:begin]
                    last = end
                self.compare(got, want + text[last:])
