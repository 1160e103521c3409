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
# The general categories that have no code point in common, but for those that are not assigned.
CATEGORIES = "cc cf co ll lm lo lt lu mc me mn nd nl no pc pd pe pf pi po ps sc sk sm so zl zp zs".split()
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
    """(Names, joined by |, and ranges)"""
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
    return united(result | {name: of_pattern(expression) for name, expression in PATTERNS.items()} | steps())


def united(sets):
    """The names of equal sets together; first all code points and the categories."""
    names = {}
    for name, ranges in sets.items():
        names.setdefault(tuple(map(tuple, ranges)), []).append(name)
    rows = {"|".join(same): ranges for ranges, same in names.items()}
    first = [next(row for row in rows if name in row.split("|")) for name in ["any", *CATEGORIES]]
    return [(row, rows[row]) for row in [*first, *(row for row in rows if row not in first)]]


def edges_of(ranges):
    return {edge for pair in ranges for edge in pair}


def codes_of(ranges):
    return {code for pair in ranges for code in range(*pair)}


def difference(edges, chosen, bases):
    """The edges in which a set differs from some of the bases; with the fewest changes of the choice that leave fewer."""
    rest = set(edges)
    for bit in chosen:
        rest ^= bases[bit]
    while True:
        bit = min(range(len(bases)), key=lambda bit: len(rest ^ bases[bit]))
        if len(rest ^ bases[bit]) >= len(rest):
            return len(rest), sorted(rest), sum(1 << bit for bit in chosen)
        rest, chosen = rest ^ bases[bit], chosen ^ {bit}


def by_categories(rows):
    """(Names, the first rows that the set is made of as bits, the edges in which it differs from them)"""
    first = len(CATEGORIES) + 1
    bases, base_codes = [edges_of(ranges) for _, ranges in rows[:first]], [codes_of(ranges) for _, ranges in rows[:first]]
    for names, ranges in rows[:first]:
        yield names, 0, sorted(edges_of(ranges))
    for names, ranges in rows[first:]:
        codes = codes_of(ranges)
        mostly = {bit for bit in range(1, first) if 2 * len(base_codes[bit] & codes) > len(base_codes[bit])}
        starts = set(), mostly, set(range(first)) - mostly  # the last: all code points but those categories
        _, rest, bits = min(difference(edges_of(ranges), chosen, bases) for chosen in starts)
        yield names, bits, rest


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
    """{composed: (first, second)}"""
    form = normalizers.NFC()
    pairs = {}
    for code, text in canonical.items():
        first = form.normalize_str(text[:-1])
        if len(text) > 1 and len(first) == 1 and form.normalize_str(text) == chr(code):
            pairs[code] = ord(first), ord(text[-1])
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


def array(name, items, kind="std::uint32_t"):
    lines, line = [], ""
    for item in map(str, items):
        if len(line) + len(item) > 125:
            lines.append(line)
            line = ""
        line += item + ","
    return f"constexpr {kind} {name}[] = {{\n" + "\n".join([*lines, line]) + "};\n"


def deltas(pairs):
    """(key, value...) sorted by key: the keys as differences."""
    last = 0
    for key, *values in pairs:
        yield key - last
        yield from values
        last = key


def run_from(table, code, stride):
    """How many code points, this one and each behind it by the stride, become one that is as far from the first's."""
    count = 1
    while len(table[code]) == 1 and table.get(code + count * stride) == chr(ord(table[code]) + count * stride):
        count += 1
    return count


def mapping(table):
    """(code, count, length, texts) of code points in a row, and (code, count, 0, stride, character) for runs."""
    rest, texts = dict(table), []
    while rest:
        code = min(rest)
        length = len(rest[code])
        count, stride = max((run_from(rest, code, stride), stride) for stride in (1, 2))
        is_run = count > 2
        if texts and (is_run or code != first + len(texts) or length != len(texts[0])):
            yield first, len(texts), len(texts[0]), *map(ord, "".join(texts))
            texts = []
        if is_run:
            yield code, count, 0, stride, ord(rest[code])
        else:
            count = 1
            first = first if texts else code
            texts.append(rest[code])
        for i in range(count):
            del rest[code + i * stride]
    if texts:
        yield first, len(texts), len(texts[0]), *map(ord, "".join(texts))


def class_runs(classes):
    """(first, how many, class)"""
    for code, own_class in sorted(classes.items()):
        if classes.get(code - 1) != own_class:
            yield code, next(n for n in range(1, len(CODES)) if classes.get(code + n) != own_class), own_class


def write(out, rows, canonical, compatible, classes, lower, orbits, long_folds):
    entries, edges = [], []
    for names, bits, rest in by_categories(rows):
        entries.append(f'{{"{names}",{bits:#x},{len(rest)}}}'.replace("\\", "\\\\"))
        edges += deltas(zip(rest))
    pairs = compositions(canonical)
    text = f"// Written by make_tables.py, of tokenizers {tokenizers.__version__}; do not edit.\n"
    text += array("kEdges", edges)
    text += array("kProperties", entries, "PropertyEntry")
    text += array("kCompositions", deltas((code, *pair) for code, pair in sorted(pairs.items())))
    text += array("kCanonical", deltas(mapping({code: text for code, text in canonical.items() if code not in pairs})))
    text += array("kCompatible", deltas(mapping(compatible)))
    text += array("kClasses", deltas(class_runs(classes)))
    text += array("kLower", deltas(mapping(lower)))
    text += array("kFolds", deltas(mapping({code: chr(orbit[0]) for orbit in orbits.values() for code in orbit[1:]})))
    text += array("kLongFolds", (n for t in long_folds for n in (len(t), *map(ord, t))))
    out.write_text(text)


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("tables.inc"))
    lower = {code: text for code, text in by_line(normalizers.Lowercase()).items() if text != chr(code)}
    write(out, properties(), *decompositions(), combining_classes(), lower, *folds())


if __name__ == "__main__":
    main()
