"""Patterns and steps on every code point whose category is that of Unicode 3.2, compared with the `tokenizers` package.
The Unicode versions of the libraries differ in other code points."""
import json
import random
import unicodedata
import unittest

import programs
import regex
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CODES = [code for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")
         and unicodedata.category(chr(code)) == unicodedata.ucd_3_2_0.category(chr(code))]
ALL = "".join(map(chr, CODES))
LINES = "\n".join(ALL)
PATTERNS = [
    r"\p{L}", r"\p{N}", r"\p{P}", r"\p{S}", r"\p{M}", r"\p{Z}", r"\P{L}", r"\p{^N}", r"\p{Emoji}",
    r"\p{White_Space}", r"\p{Upper case}", r"\p{Ideographic}", r"\p{Extended_Pictographic}",
    r"\w", r"\W", r"[\w]", r"[^\w]", r"[\W]", r"\s", r"[^\s]", r"[\S]", r"\d", r"\h", ".",
    r"[\p{L}&&[^a-z]]", r"[\p{L}\p{M}&&\p{Latin}&&[^A-Z]]", r"[^\p{L}&&[^\p{Han}]]", r"[a-f[\u4e00-\u9fa5]\x{1F600}-\x{1F64F}]",
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
