#!/usr/bin/env python3
"""Writes tables.inc: what the `tokenizers` package knows of Unicode, asked of the package itself.

    .deps/venv/bin/python src/data/unicode/make_tables.py [OUT]

Its parts have tables of different versions: Oniguruma's for patterns, those of Rust's library for lower case and white
space, of the crates unicode-normalization, unicode-categories and regex for the rest. So each is asked for every code point.
"""
import pathlib
import sys
import unicodedata

import regex
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CODES = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
ALL = "".join(map(chr, CODES))
HANGUL = range(0xAC00, 0xD7A4)
# Beside the general categories and scripts; blocks never have a use.
BINARY = """alphabetic uppercase lowercase whitespace emoji emojipresentation emojimodifier emojimodifierbase
    emojicomponent extendedpictographic ideographic unifiedideograph math dash hexdigit asciihexdigit diacritic extender
    cased caseignorable idstart idcontinue xidstart xidcontinue joincontrol variationselector defaultignorablecodepoint
    quotationmark radical regionalindicator terminalpunctuation sentenceterminal softdotted graphemebase graphemeextend
    noncharactercodepoint patternsyntax patternwhitespace bidicontrol logicalorderexception deprecated
    alnum alpha blank cntrl digit graph lower print punct space upper xdigit word ascii any assigned""".split()
# What stands for no name: those of a pattern outside of a class and in one, and of steps that have no pattern.
POSIX = "alnum alpha ascii blank cntrl digit graph lower print punct space upper xdigit word".split()
PATTERNS = {f":{name}:": f"[[:{name}:]]" for name in POSIX} | {
    "\\w": r"\w", "\\W": r"\W", "[\\w]": r"[\w]", "[\\W]": r"[\W]", "\\s": r"\s", "\\d": r"\d", "\\h": r"\h"}


def ranges_of(codes):
    """[first, behind the last] of sorted code points."""
    ranges = []
    for code in codes:
        if ranges and (ranges[-1][1] == code or (ranges[-1][1], code) == (0xD800, 0xE000)):
            ranges[-1][1] = code + 1
        else:
            ranges.append([code, code + 1])
    return ranges


def removed_by(step):
    """The ranges of code points that a step with the behavior "removed" takes away."""
    ranges, last = [], 0
    for _, (begin, end) in [*step.pre_tokenize_str(ALL), (None, (len(ALL), len(ALL)))]:
        if last < begin:
            ranges.append([CODES[last], CODES[begin - 1] + 1])
        last = end
    return ranges


def of_pattern(expression):
    return removed_by(pre_tokenizers.Split(Regex(f"(?:{expression})+"), "removed"))


def kept_by(step):
    return ranges_of(code for code in CODES if step(chr(code)))


def is_known(name):
    try:
        Regex(rf"\p{{{name}}}")
    except Exception:
        return False
    return True


def properties():
    """Names, joined by |, with their ranges."""
    known = regex._regex.get_properties()
    groups = [[name] for name in BINARY]
    for kind in "GENERALCATEGORY", "SCRIPT":
        aliases = {}
        for name, value in known[kind][1].items():
            aliases.setdefault(value, []).append(name.lower())
        groups += aliases.values()
    groups = [[name for name in group if is_known(name)] for group in groups]
    taken = set()
    for group in groups:
        group[:] = [name for name in group if name not in taken]
        taken.update(group)
    result = {"|".join(group): of_pattern(rf"\p{{{group[0]}}}") for group in groups if group}
    return result | {name: of_pattern(expression) for name, expression in PATTERNS.items()} | steps()


def steps():
    single = Tokenizer(models.BPE())
    single.add_tokens([AddedToken("a", single_word=True, normalized=False)])
    strip, digits = normalizers.Strip(), pre_tokenizers.Digits()
    return {"step punctuation": removed_by(pre_tokenizers.Punctuation("removed")),
            "step digits": kept_by(lambda c: len(digits.pre_tokenize_str("a" + c)) == 2),
            "step space": kept_by(lambda c: strip.normalize_str(c) == ""),
            "step word": kept_by(lambda c: not single.encode("a" + c).ids)}


def by_line(step):
    """What becomes of each code point for itself, but of the line feed."""
    lines = ALL.replace("\n", "")
    return dict(zip(map(ord, lines), step.normalize_str("\n".join(lines)).split("\n")))


def decompositions():
    canonical = {code: text for code, text in by_line(normalizers.NFD()).items() if text != chr(code)}
    compatible = {code: text for code, text in by_line(normalizers.NFKD()).items()
                  if text != canonical.get(code, chr(code))}
    return ({code: text for code, text in canonical.items() if code not in HANGUL},
            {code: text for code, text in compatible.items() if code not in HANGUL})


def compositions(canonical):
    """{(first, second): composed}"""
    form = normalizers.NFC()
    pairs = {}
    for code, text in canonical.items():
        first = form.normalize_str(text[:-1])
        if len(text) > 1 and len(first) == 1 and form.normalize_str(text) == chr(code):
            pairs[ord(first), ord(text[-1])] = code
    return pairs


def combining_classes():
    """By which of known marks each is put before."""
    form = normalizers.NFD()
    # Those alone that the package knows for marks: it puts them before U+0345, whose class is the highest, or that behind.
    known = {code: unicodedata.combining(chr(code)) for code in CODES if unicodedata.combining(chr(code)) and (
        code == 0x345 or form.normalize_str(f"a\u0345{chr(code)}") != f"a\u0345{chr(code)}")}
    marks = {mark: chr(code) for code, mark in reversed(known.items())}
    order = sorted(marks)

    def moved(codes, before, behind):
        text = "\n".join(f"a{before or chr(c)}{behind or chr(c)}" for c in codes)
        done = form.normalize_str(text).split("\n")
        return {c for c, old, new in zip(codes, text.split("\n"), done) if len(old) == len(new) and old != new}

    whole = [c for c, text in by_line(form).items() if text == chr(c)]
    # Behind the highest class, or before the lowest: those whose class is neither 0 nor at that end.
    candidates = sorted(moved(whole, marks[order[-1]], "") | moved(whole, "", marks[order[0]])
                        | {ord(c) for c in marks.values()} & {*whole})
    classes = {}
    above = {mark: moved(candidates, "", marks[mark]) for mark in order}   # class > mark
    below = {mark: moved(candidates, marks[mark], "") for mark in order}   # 0 < class < mark
    for code in candidates:
        same = [mark for mark in order if code not in above[mark] and code not in below[mark]]
        assert len(same) == 1, (hex(code), same)
        classes[code] = same[0]
    return classes


def folds():
    """The code points that (?i:) takes for one another, and what it takes several together for."""
    cased = [c for c in CODES if len({chr(c), chr(c).lower(), chr(c).upper(), chr(c).casefold(), chr(c).title()}) > 1]
    several = sorted({text for c in cased for text in (chr(c).casefold(), chr(c).lower(), chr(c).upper()) if len(text) > 1})
    missing = {c for a, b in of_pattern(r"\p{Cased}") for c in range(a, b)}
    cased = sorted({*cased, *missing, *(ord(c) for text in several for c in text)})
    text = "".join(f"{chr(code)}\n" for code in cased)  # apart, so that several are not taken for one
    orbits = {}
    for code in cased:
        kept = normalizers.Replace(Regex(rf"(?i:\x{{{code:x}}})"), "").normalize_str(text).split("\n")
        orbit = tuple(other for other, left in zip(cased, kept) if not left)
        if len(orbit) > 1:
            orbits[min(orbit)] = orbit
    multiple = [t for t in several
                if t == t.lower() and normalizers.Replace(Regex(f"(?i:{t})"), "").normalize_str(text) != text]
    single = [chr(c) for c in cased if len(chr(c).casefold()) > 1]
    return orbits, multiple + single


def array(name, numbers, kind="std::uint32_t"):
    lines, line = [], ""
    for number in map(str, numbers):
        if len(line) + len(number) > 125:
            lines.append(line)
            line = ""
        line += number + ","
    return f"constexpr {kind} {name}[] = {{\n" + "\n".join([*lines, line]) + "};\n"


def deltas(pairs):
    """(key, value...) sorted by key: the keys as differences."""
    last = 0
    for key, *values in pairs:
        yield key - last
        yield from values
        last = key


def mapping(table):
    for code, text in sorted(table.items()):
        yield code, len(text), *map(ord, text)


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("tables.inc"))
    names, numbers = [], []
    for name, ranges in properties().items():
        names.append((name, len(numbers), len(ranges)))
        last = 0
        for begin, end in ranges:
            numbers += [begin - last, end - begin]
            last = end
    canonical, compatible = decompositions()
    pairs = sorted((first, second, code) for (first, second), code in compositions(canonical).items())
    lower = {code: text for code, text in by_line(normalizers.Lowercase()).items() if text != chr(code)}
    orbits, multiple = folds()
    text = f"// Written by make_tables.py, of tokenizers {tokenizers.__version__}; do not edit.\n"
    text += array("kRanges", numbers)
    text += "constexpr PropertyEntry kProperties[] = {\n" + "".join(
        f'    {{"{name}", {begin}, {count}}},\n'.replace("\\", "\\\\") for name, begin, count in names) + "};\n"
    text += array("kCanonical", deltas(mapping(canonical)))
    text += array("kCompatible", deltas(mapping(compatible)))
    text += array("kCompositions", deltas(pairs))
    text += array("kClasses", deltas(sorted(combining_classes().items())))
    text += array("kLower", deltas(mapping(lower)))
    text += array("kFolds", (n for orbit in orbits.values() for n in (len(orbit), *orbit)))
    text += array("kMultipleFolds", (n for t in multiple for n in (len(t), *map(ord, t))))
    out.write_text(text)


if __name__ == "__main__":
    main()
