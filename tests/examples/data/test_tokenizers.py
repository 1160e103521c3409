"""Token ids and texts compared with other packages, for every kind of tokenizer and every code point of Unicode 3.2.
llama_tokenize beside a writer in Python: the same shards, byte for byte."""

import array
import gzip
import importlib.util
import itertools
import json
import pathlib
import random
import shutil
import struct
import sys
import unicodedata

import numpy
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
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
        """Compares token_ids with `encode`, from text to ids, and `decode`, from ids to text."""
        programs.succeed([programs.BIN / "token_ids", file, *self.texts])
        for path in self.texts:
            with self.subTest(tokenizer=file.name, text=path.name):
                ids = array.array("q", path.with_suffix(".ids").read_bytes()).tolist()
                decoded = path.with_suffix(".decoded").read_bytes().decode(errors="replace")
                # Both tokenizers read broken bytes as U+FFFD.
                expected = encode(path.read_bytes().decode(errors="replace"))
                # The message does not show the lists, which are too long.
                agree = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, expected)))
                self.assertTrue(ids == expected, f"of {len(ids)} and {len(expected)} ids the first {agree} agree")
                self.assertTrue(decoded == decode(expected), "the texts differ")


class TrainedHere(Comparison):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        learnt = kinds.multilingual(200_000, seed=1) + kinds.code(programs.ROOT / "docs", 100_000)
        cls.tokenizers = kinds.save_all(cls.shared, learnt)

    def test_every_kind_of_tokenizer_json(self):
        for kind, theirs in self.tokenizers.items():
            self.compare(self.shared / f"{kind}.json",
                         lambda text, of=theirs: of.encode(text, add_special_tokens=False).ids, theirs.decode)


class SentencePiece(Comparison):
    """Models with the default options of SentencePiece's trainer, which drop the spaces before a text."""
    # The texts are short: SentencePiece 0.1.97 adds scores in fp32, and newer versions choose other tokens in long texts.
    sizes = 20_000, 8_000, 5_000

    def test_ids_and_texts_equal_llama_tokenizer(self):
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
    """Compares published tokenizer files with the packages that they are made for."""
    sizes = 200_000, 100_000, 50_000

    def test_llama3(self):
        from llama_models.llama3 import tokenizer
        theirs = tokenizer.Tokenizer.get_instance()
        # The package decodes special tokens to text, which token_ids leaves out.
        self.compare(pathlib.Path(tokenizer.__file__).with_name("tokenizer.model"),
                     lambda text: theirs.encode(text, bos=False, eos=False, allowed_special="all"),
                     lambda ids: theirs.decode([token for token in ids if token < theirs.bos_id]))

    def test_mistral(self):
        import sentencepiece
        import transformers
        data = pathlib.Path(importlib.util.find_spec("mistral_common").origin).parent / "data"
        for name in "tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3":
            theirs = sentencepiece.SentencePieceProcessor(model_file=str(data / name))
            # LlamaTokenizer finds special tokens in a text, which SentencePieceProcessor does not.
            tokenizer = transformers.LlamaTokenizer(str(data / name), legacy=True, add_bos_token=False)
            self.compare(data / name, tokenizer.encode, theirs.decode)

    def test_mistral_with_tokenizer_config(self):
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
        text = programs.write(self.shared / "short", "a don't  b</s> c</s>d\n\u2581e <s>")
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
    r"\p{L}", r"\p{N}", r"\p{P}", r"\p{S}", r"\p{M}", r"\p{Z}", r"\P{L}", r"\s", r"[^\s]", r"[\S]", ".",
    "[a-f\u4e00-\u9fa5\U0001f600-\U0001f64f]", r"[^-a-cx-]", r"(?i:k)", r"(?i:[^s])", r"(?i:[a-z])",
    "(?i:\\p{Lu}|\u00e5)"]


def categories():
    """Returns one name for each general category of Unicode that a code point of CODES has."""
    chosen = {}
    for name, value in regex._regex.get_properties()["GENERALCATEGORY"][1].items():
        if name.isalpha() and len(name) == 2 and regex.search(rf"\p{{{name}}}", ALL):
            chosen.setdefault(value, name)
    return sorted(chosen.values())


class Unicode(programs.WithSharedFolder):
    def ours(self, text, normalizer=None, pre_tokenizer=None):
        """Returns the text after normalizer and pre-tokenizer, from a tokenizer whose tokens are bytes."""
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
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
        """Compares two texts. The message shows only the place of the first difference."""
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
            self.fail(f"{what[-300:]}: they differ at {at}: {got[at:at + 8]!r} for {want[at:at + 8]!r}, "
                      f"behind {want[max(at - 8, 0):at]!r}")

    def compare_normalizer(self, normalizer, text):
        self.compare(self.ours(text, normalizer), normalizer.normalize_str(text), str(normalizer))

    def compare_step(self, step, text):
        self.compare(self.ours(text, pre_tokenizer=step),
                     "".join(piece for piece, _ in step.pre_tokenize_str(text)), str(step))

    def test_patterns_and_categories(self):
        for pattern in [*PATTERNS, *(rf"\p{{{name}}}" for name in categories())]:
            with self.subTest(pattern):
                self.compare_step(pre_tokenizers.Split(Regex(pattern), "removed"), ALL)

    def test_nfc(self):
        self.compare_normalizer(normalizers.NFC(), LINES)

    def test_nfc_of_mark_sequences(self):
        """Random sequences of letters, marks and Hangul letters, which NFC orders and composes."""
        rng = random.Random(1)
        decomposed = [c for c in LINES.split("\n") if c and len(normalizers.NFD().normalize_str(c)) > 1]
        parts = sorted({part for c in decomposed for part in normalizers.NFD().normalize_str(c)})
        marks = [c for c in parts if normalizers.NFD().normalize_str(f"a\u0345{c}") != f"a\u0345{c}"]
        kinds = decomposed, parts, marks, marks, list("aeiou\u1100\u1161\u11a8\uac00\uac01\u0345")
        self.compare_normalizer(normalizers.NFC(), "".join(rng.choice(rng.choice(kinds)) for _ in range(300_000)))

    def test_digits(self):
        # An "x" precedes each character, and remains if the step does not remove the character.
        self.compare_step(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                   pre_tokenizers.Split(Regex("x$"), "removed")]),
                          "".join(f"x{c}" for c in ALL if c not in "x"))


# ---- llama_tokenize.

TOKENIZE = programs.BIN / "llama_tokenize"
PIECE = 1 << 20
# Runs a command and prints its peak in KiB. The process is small, because a child begins with the peak of its parent.
PEAK_OF = """
import os, subprocess, sys
_, status, used = os.wait4(subprocess.Popen(sys.argv[1:]).pid, 0)
print(used.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def zstd(data, window=0x70):
    """Returns a zstd frame with `data` in blocks that are not compressed (RFC 8878)."""
    blocks = [data[i:i + 100_000] for i in range(0, len(data), 100_000)] or [b""]
    frame = struct.pack("<IBB", 0xFD2FB528, 0, window)
    for i, block in enumerate(blocks):
        frame += struct.pack("<I", (len(block) << 3) | (i == len(blocks) - 1))[:3] + block
    return frame


class Tokenize(programs.WithSharedFolder, programs.WithFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tokenizer = kinds.llama3(kinds.multilingual(100_000, seed=1))
        cls.path = cls.shared / "tokenizer.json"
        cls.tokenizer.save(str(cls.path))
        cls.eos, cls.bos = (cls.tokenizer.token_to_id(name) for name in ("<|eot|>", "<s>"))

    def setUp(self):
        super().setUp()
        self.out = self.folder / "out/t"
        self.out.parent.mkdir()

    def write(self, name, data):
        path = self.folder / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    def command(self, *arguments, tokenizer=None):
        return [TOKENIZE, "--tokenizer", tokenizer or self.path, "--out", self.out, *arguments]

    def tokenize(self, *arguments, **kwargs):
        flags = [] if "--no-eos" in arguments else ["--eos-token", "<|eot|>"]
        return programs.succeed(self.command(*flags, *arguments, **kwargs))

    def refuse(self, arguments, *parts, leaves=()):
        done = programs.fail(self.command("--eos-token", "<|eot|>", *arguments), *parts)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertEqual(sorted(path.name for path in self.out.parent.iterdir()), sorted(leaves))

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def expect(self, documents, shard_tokens=100_000_000, begin=(), end=None):
        """Expects the shards that a writer in Python makes of `documents`, lists of texts that are tokenized separately."""
        end = [self.eos] if end is None else end
        tokens = [token for document in documents
                  for token in [*begin, *(t for text in document for t in self.ids(text)), *end]]
        shards = [tokens[i:i + shard_tokens] for i in range(0, len(tokens), shard_tokens)]
        header = numpy.zeros(256, "<i4")
        for i, shard in enumerate(shards):
            header[:3] = 20240520, 1, len(shard)
            want = header.tobytes() + numpy.array(shard, "<u2").tobytes()
            self.assertTrue(self.out.with_name(f"t_{i:06}.bin").read_bytes() == want, f"shard {i} differs")
        self.assertEqual(len(list(self.out.parent.glob("*.bin"))), len(shards))

    def documents(self, count, seed=5):
        rng = random.Random(seed)
        text = kinds.multilingual(200_000, seed)
        return [text[(at := rng.randrange(len(text) - 900)):at + rng.randrange(1, 900)] for _ in range(count)]

    def lines(self, documents, field="text"):
        return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in documents)

    def test_plain_and_compressed_texts_and_jsonl(self):
        docs = self.documents(60)
        self.write("a[1].txt", docs[0])
        self.write("b.txt", "")
        self.write("c.txt.gz", gzip.compress(docs[1].encode()) + gzip.compress(docs[2].encode()))
        self.write("d.jsonl", self.lines(docs[3:20]) + "\n  \n" + self.lines(["", docs[20]]).rstrip())
        self.write("e.json.gz", gzip.compress(self.lines(docs[21:40]).encode()))
        self.write("f.jsonl.zst", zstd(self.lines(docs[40:50]).encode()) + zstd(self.lines(docs[50:]).encode()))
        self.tokenize(self.folder / "a[1].txt", self.folder / "[b-f].*", "--threads", 3)
        self.expect([[docs[0]], [docs[1] + docs[2]], *([doc] for doc in docs[3:])])

    def test_shards_do_not_depend_on_the_thread_count(self):
        docs = self.documents(200)
        path = self.write("d.jsonl", self.lines(docs, "content"))
        self.tokenize(path, "--field", "content", "--shard-tokens", 1000, "--threads", 1, "--bos")
        self.expect([[doc] for doc in docs], 1000, begin=[self.bos])
        one = [shard.read_bytes() for shard in sorted(self.out.parent.glob("*.bin"))]
        self.out = self.folder / "four/t"
        self.out.parent.mkdir()
        self.tokenize(path, "--field", "content", "--shard-tokens", 1000, "--threads", 4, "--bos")
        self.assertEqual([shard.read_bytes() for shard in sorted(self.out.parent.glob("*.bin"))], one)
        self.out = self.folder / "bare/t"
        self.out.parent.mkdir()
        self.tokenize(path, "--field", "content", "--no-eos")
        self.expect([[doc] for doc in docs], end=[])

    def test_large_vocabulary_needs_32_bit_tokens(self):
        large = json.loads(self.path.read_text())
        large["added_tokens"] += [{"id": i, "content": f"<{i}>", "special": True}
                                  for i in range(self.tokenizer.get_vocab_size(), 70_001)]
        tokenizer = self.write("large.json", json.dumps(large))
        self.tokenize(self.write("a.txt", "a b <70000>"), tokenizer=tokenizer)
        data = self.out.with_name("t_000000.bin").read_bytes()
        want = [*self.ids("a b "), 70_000, self.eos]
        self.assertEqual(struct.unpack_from("<3i", data), (20240801, 7, len(want)))
        self.assertEqual(numpy.frombuffer(data, "<u4", offset=1024).tolist(), want)

    def test_cutting_long_texts_does_not_change_tokens(self):
        text = (kinds.code(programs.ROOT / "tests", 600_000) * 10)[:2 * PIECE + 100_000]
        self.tokenize(self.write("a.txt", text))
        self.expect([[text]])

    def test_end_token_comes_from_the_model_folder(self):
        (self.folder / "tokenizer.json").write_bytes(self.path.read_bytes())
        programs.write_config(self.folder, programs.SMALL | {"vocab_size": 4000, "eos_token_id": [7, 8]})
        path = self.write("a.txt", "some text")
        programs.succeed(self.command(path, tokenizer=self.folder))
        self.expect([["some text"]], end=[7])

    def test_documents_have_all_template_tokens(self):
        tokenizer = kinds.of_letters("<1> <2> $A <3> <4> <3>")
        path = self.folder / "letters.json"
        tokenizer.save(str(path))
        docs = ["ab c", "d", "<1> e"]
        flags = ["--bos", self.write("a.jsonl", self.lines(docs))]
        programs.succeed(self.command(*flags, tokenizer=path))
        whole = [token for doc in docs for token in tokenizer.encode(doc).ids]
        self.assertEqual(numpy.fromfile(self.out.with_name("t_000000.bin"), "<u2", offset=1024).tolist(), whole)

    def test_files_named_twice_are_tokenized_once(self):
        docs = self.documents(4)
        files = [self.write(f"{i}.txt", doc) for i, doc in enumerate(docs)]
        self.tokenize(files[2], self.folder / "*.txt", self.folder / "out/../2.txt", self.folder / "[0-2].txt")
        self.expect([[docs[i]] for i in (2, 0, 1, 3)])

    def test_refuses_shards_of_an_earlier_run(self):
        path = self.write("a.txt", "some text")
        self.assertRegex(self.tokenize(path).stdout, r": \d+ tokens in 1 shard of 1 file\n$")
        self.refuse([path], "t_000000.bin", "exists", leaves=["t_000000.bin"])

    def test_accepts_gzip_followed_by_zeros(self):
        """Like the gzip program, llama_tokenize ignores bytes behind the zeros."""
        docs = self.documents(2)
        packed = [gzip.compress(doc.encode()) for doc in docs]
        self.tokenize(self.write("a.gz", packed[0] + b"\0" * 300_000),
                      self.write("b.gz", packed[1] + b"\0" * 3 + packed[0]))
        self.expect([[docs[0]], [docs[1]]])

    def test_reads_long_windows_of_zstd(self):
        """The windows have 256 MiB, as those of zstd --long=28."""
        self.tokenize(self.write("a.zst", zstd(b"words and words", window=0x90)), "--no-eos")
        self.expect([["words and words"]], end=[])

    def test_reads_zstd_that_begins_with_a_skippable_frame(self):
        skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
        self.tokenize(self.write("a.zst", skippable + zstd(b"words")), "--no-eos")
        self.expect([["words"]], end=[])

    def test_refuses_bad_input(self):
        good = self.write("good.jsonl", self.lines(["a", "b"]))
        self.refuse([self.folder / "none*"], "FILES: no file matches", "none*", "pass existing files")
        self.refuse(["a" * 300], "FILES: no file matches", "File name too long", "pass existing files")
        packed = gzip.compress(self.lines(self.documents(50)).encode())
        self.refuse([self.write("cut.jsonl.gz", packed[:-20])], "cut.jsonl.gz", "ends too early")
        self.refuse([self.write("bad.jsonl.gz", packed[:200] + b"\xff" * 50 + packed[250:])], "has damaged gzip data at byte")
        self.refuse([self.write("cut.jsonl.zst", zstd(b"{}" * 100)[:-20])], "cut.jsonl.zst", "ends too early")
        self.refuse([self.write("bad.jsonl", self.lines(["a"]) + "\n{\"text\": 3\n")], "bad.jsonl:3:", "not JSON")
        self.refuse([good, "--field", "body"], "good.jsonl:1:", 'no field "body"')
        self.refuse([self.write("number.jsonl", '{"text": 3}')], "number.jsonl:1:", "of type number")
        self.refuse([self.write("list.jsonl", '[3]')], "list.jsonl:1:", "not a JSON object")
        self.refuse([self.write("none.jsonl", "\n \n")], "contain no text")
        self.refuse([self.write("marked.jsonl", "\ufeff" + self.lines(["a"]))], "marked.jsonl:1:", "a byte order mark")
        self.refuse([self.write("nan.jsonl", '{"text": NaN}')], "nan.jsonl:1:", "NaN and Infinity, which Python writes")
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
        self.refuse([self.write("a.txt", pointer)], "a.txt' is a Git LFS pointer", "git lfs pull")
        self.refuse([good, "--eos-token", "two words"], "9 tokens")
        self.refuse([good, "--eos-token", 99999], "outside the tokenizer's vocabulary")
        self.refuse([self.folder], "not a regular file")
        programs.fail([*self.command(good), "--out", f"{self.out.parent}/"], "is a folder; add the PREFIX")
        programs.fail(self.command(good), "tokenizer.json", "no end token", "--eos-token")

    def test_memory_is_bounded(self):
        """The input has a line of 25 MB, and 60 MB of compressed text."""
        line = json.dumps({"text": "words and words again " * 1_200_000}) + "\n"
        path = self.write("a.jsonl.gz", gzip.compress((line + self.lines(["x" * 60]) * 400_000).encode(), 1))
        done = programs.succeed([sys.executable, "-c", PEAK_OF, *self.command(path, "--no-eos", "--threads", 2)])
        self.assertLess(int(done.stdout.splitlines()[-1]), 512 << 10, "KiB")
