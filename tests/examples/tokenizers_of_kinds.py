"""Small tokenizers of the kinds that models have, trained here, and texts that are hard for them."""
import json
import pathlib
import random
import unicodedata

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# First and last code point of letters, marks, symbols and emoji.
SCRIPTS = {
    "latin": (0x41, 0x24F), "greek": (0x370, 0x3FF), "cyrillic": (0x400, 0x4FF), "hebrew": (0x5D0, 0x5EA),
    "arabic": (0x620, 0x669), "devanagari": (0x900, 0x97F), "thai": (0xE01, 0xE5B), "hangul": (0xAC00, 0xAD00),
    "jamo": (0x1100, 0x11FF), "kana": (0x3041, 0x30FF), "han": (0x4E00, 0x5200), "symbols": (0x2000, 0x2BFF),
    "emoji": (0x1F300, 0x1F64F), "marks": (0x300, 0x36F)}
SPACES = [" "] * 30 + ["  ", "\n", "\n\n", "\t", "\r\n", "    ", "\u00a0", "\u3000", "\u200b", "\u0085", "\u180e"]
PIECES = ["don't", "I'LL", "we've", "1234567", "3.14159", "x+=1;", "</s>", "<|eot|>", "<s>", "\u2581", "\u2581\u2581",
          "e\u0301", "\u212b", "\ufb01", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea",
          "<0x0A>", "\x00", "\x7f", "...", "\u0130", "\u01c5", "\u0660\u0661", "\u00bd\u2167", "\u4e00" * 40]


def word(rng):
    """Returns a word of code points that have a category in PCRE2's Unicode, which is older than that of `tokenizers`."""
    first, last = SCRIPTS[rng.choice(list(SCRIPTS))]
    drawn = (chr(rng.randint(first, last)) for _ in range(rng.randint(1, 9)))
    return "".join(c for c in drawn if unicodedata.category(c) != "Cn") or "x"


def multilingual(size, seed):
    """About `size` bytes of words of all scripts, drawn by Zipf's law from a few thousands."""
    rng = random.Random(seed)
    words = [word(rng) for _ in range(4000)] + PIECES
    rng.shuffle(words)
    text = []
    while size > 0:
        text.append(words[min(int(rng.paretovariate(0.6)), len(words)) - 1] + rng.choice(SPACES))
        size -= len(text[-1].encode())
    return "".join(text)


def code(folder, size):
    return "".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*"))
                   if path.suffix in {".py", ".cpp", ".h", ".md"})[:size]


def broken(size, seed):
    """Returns bytes of a multilingual text of which about every twentieth is changed."""
    rng = random.Random(seed)
    data = bytearray(multilingual(size, seed).encode())
    for _ in range(len(data) // 20):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def train(tokenizer, text, special, vocabulary=3000, **options):
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False, **options))


def byte_level(pattern, special, text, normalizer=None, ignore_merges=False, **options):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, text, [], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    tokenizer.add_special_tokens(special)
    return tokenizer


def llama3(text):
    tokenizer = byte_level(LLAMA3, ["<s>", "<|eot|>"], text, ignore_merges=True)
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])])
    return tokenizer


def qwen(text):
    tokenizer = byte_level(QWEN, ["<|eot|>"], text, normalizer=normalizers.NFC())
    # ByteLevel joins the tokens, so that Strip removes only the first space of a text.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_tokens(["<think>", "caf\u00e9", "don't"])
    return tokenizer


def gpt2(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, text, ["<|eot|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


def byte_fallback(text):
    """The model of Llama 2 and of Mistral: words begin with a mark, other characters are bytes."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    train(tokenizer, text, special + [f"<0x{byte:02X}>" for byte in range(256)], limit_alphabet=800)
    form = json.loads(tokenizer.to_str())
    form["added_tokens"] = form["added_tokens"][:len(special)]
    return form


def llama2(text):
    form = byte_fallback(text)
    form["pre_tokenizer"] = None
    form["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
    form["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    tokenizer = Tokenizer.from_str(json.dumps(form))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def mistral(text):
    form = byte_fallback(text)
    form["normalizer"] = None
    form["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    form["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return Tokenizer.from_str(json.dumps(form))


def digits(text):
    """A tokenizer with steps that the other kinds lack, such as DeepSeek's, and without tokens for bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace("\t", " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s?[\p{P}\p{S}]+"), "isolated"), pre_tokenizers.Split(Regex("[.;]"), "removed"),
        pre_tokenizers.Split(Regex("[^,]+"), "removed", invert=True),
        pre_tokenizers.Metaspace(prepend_scheme="always")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    train(tokenizer, text, ["<unk>"], limit_alphabet=300)
    tokenizer.add_tokens(["don't"])
    return tokenizer


def of_letters(single):
    """A tokenizer whose ids are ASCII codes, with the special tokens <0> to <31> and the template `single`."""
    marks = {f"<{i}>": i for i in range(32)}
    tokenizer = Tokenizer(models.BPE(marks | {chr(code): code for code in range(32, 127)}, []))
    tokenizer.add_special_tokens(list(marks))
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(marks.items()))
    return tokenizer


KINDS = {"llama2": llama2, "llama3": llama3, "mistral": mistral, "qwen": qwen, "gpt2": gpt2, "digits": digits}


def save_all(folder, text):
    """Writes KIND.json to `folder` for each kind. Returns the tokenizers of the package `tokenizers`."""
    made = {name: make(text) for name, make in KINDS.items()}
    for name, tokenizer in made.items():
        pathlib.Path(folder, f"{name}.json").write_text(tokenizer.to_str())
    return made
