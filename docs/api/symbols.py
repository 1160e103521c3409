#!/usr/bin/env python3
"""The public symbols: a line "name | what it is" for each declaration of the public headers.

    symbols.py XML --check    fails where the headers differ from the last release and CHANGELOG.md does not say so
    symbols.py XML --release  writes docs/api/symbols.txt, the list of a release, from Doxygen's XML, which
                              scripts/docs makes

The first line of that list is the release's version.
"""
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = ROOT / "docs/api/symbols.txt"
CLASSES = ("class", "struct", "union", "concept")


def text_of(element, tag):
    """The text of a child, links included, on one line; Doxygen's versions set spaces differently."""
    child = element.find(tag)
    text = " ".join("".join(child.itertext()).replace("\\\n", " ").split()) if child is not None else ""
    return re.sub(r"\s*([<>&*,])\s*", r"\1", text).replace(",", ", ").replace("const&", "const &")


def joined(*words):
    return " ".join(word for word in words if word)


def parameters_of(element, tag):
    """What callers must know: types and defaults, not names."""
    def one(parameter):
        default = text_of(parameter, "defval")
        return joined(text_of(parameter, "type") + text_of(parameter, "array"), default and f"= {default}")
    return ", ".join(map(one, element.findall(tag)))


def template_of(element):
    found = element.find("templateparamlist")
    return "" if found is None else f"template <{parameters_of(found, 'param')}>"


def qualifiers_of(member):
    words = ["protected"] if member.get("prot") == "protected" else []
    words += [word for word in ("static", "explicit") if member.get(word) == "yes"]
    return joined(*words, "" if member.get("virt") in (None, "non-virtual") else "virtual")


def lines_of_enum(member, name):
    yield f"{name} | enum{' class' if member.get('strong') == 'yes' else ''}"
    for value in member.findall("enumvalue"):
        yield joined(f"{name}::{text_of(value, 'name')} | enumerator", text_of(value, "initializer"))


def function(member):
    arguments = text_of(member, "argsstring")
    behind = arguments[arguments.rfind(")") + 1:].strip()  # const, =0, =delete
    return joined(template_of(member), qualifiers_of(member), text_of(member, "type"),
                  f"({parameters_of(member, 'param')})", behind)


def lines_of_member(member, scope):
    kind, name = member.get("kind"), scope + text_of(member, "name")
    if kind == "enum":
        yield from lines_of_enum(member, name)
    elif kind == "define":
        value = "" if name.endswith("VERSION") else text_of(member, "initializer")  # a release changes those
        yield joined(f"{name} | define", value)
    elif kind in ("function", "friend"):
        # The base class has the line of a function that a class overrides. Every class has a destructor.
        arguments = text_of(member, "argsstring")
        if not arguments.endswith("override") and not ("::~" in name and arguments.endswith("=default")):
            yield joined(name, "|", function(member))
    else:
        yield joined(name, "|", template_of(member), qualifiers_of(member),
                     "using" if kind == "typedef" else "", text_of(member, "type"),
                     text_of(member, "initializer"))


def class_line(compound, name):
    bases = ", ".join(base.text for base in compound.findall("basecompoundref") if base.get("prot") != "private")
    fields = ", ".join(text_of(member, "name") for member in compound.iter("memberdef")
                       if (member.get("kind"), member.get("prot")) == ("variable", "public"))
    return joined(name, "|", template_of(compound), compound.get("kind"), bases and f": {bases}",
                  fields and f"{{ {fields} }}")  # their order counts where a program writes {.first = 1, .second = 2}


def lines_of_compound(compound):
    """The lines of a namespace, a class or a file: itself, unless it is a namespace, and its members."""
    kind, name = compound.get("kind"), text_of(compound, "compoundname")
    if kind == "file":
        yield f"{compound.find('location').get('file')} | header"
    if kind in CLASSES:
        yield class_line(compound, name)
    for member in compound.iter("memberdef"):
        if member.get("prot") != "private" and (kind != "file" or member.get("kind") == "define"):
            yield from lines_of_member(member, "" if kind == "file" else name + "::")


def symbols(folder):
    lines = {line for path in folder.glob("*.xml")
             for compound in ElementTree.parse(path).getroot().findall("compounddef")
             if compound.get("kind") in ("namespace", "file", *CLASSES) and compound.get("prot") != "private"
             for line in lines_of_compound(compound)}
    return sorted(line for line in lines if line.lower().startswith("tessera"))


def numbers(version):
    return tuple(map(int, version.split(".")))


def name_of(line):
    return line.split(" | ")[0]


def is_named(name, differing, spans):
    """Whether one of the texts in backquotes says the name: of a member with its class, unless the class
    itself is new or gone."""
    scope, _, last = name.rpartition("::")
    owner = scope.rpartition("::")[2]
    if not owner[:1].isupper():
        word = last.rpartition("/")[2]
    elif scope in differing and is_named(scope, differing, spans):
        return True
    elif last == owner:
        word = rf"{owner}("
    else:
        word = f"{owner}::{last}"
    pattern = re.compile(r"(?<![\w~])" + re.escape(word) + (r"(?!\w)" if word[-1].isalnum() else ""))
    return any(pattern.search(span) for span in spans)


def unnamed(old, new, changelog):
    """The lines that differ and whose names the text does not say."""
    spans = re.findall(r"`([^`]+)`", changelog)
    of_old, of_new = ({name_of(line) for line in lines} for lines in (old, new))
    return [("+ " if line in new else "- ") + line for line in sorted(set(old) ^ set(new))
            if not is_named(name_of(line), of_old ^ of_new, spans)]


def extended(old, new):
    """The structs of `old` that have fields behind those they had: what programs write goes on to compile."""
    of_new = {name_of(line): line for line in new}
    return [line for line in old if line.endswith(" }") and of_new.get(name_of(line), "").startswith(line[:-2] + ", ")]


def version_of_headers():
    return re.search(r'TESSERA_VERSION "([\d.]+)"', (ROOT / "include/tessera/version.h").read_text())[1]


def faults(found):
    """What is wrong, for a reader who has changed a header."""
    release, *old = LIST.read_text().splitlines()
    changelog = (ROOT / "CHANGELOG.md").read_text().split(f"\n## {release}")[0]
    for line in unnamed(old, found, changelog):
        yield f"CHANGELOG.md does not name, in backquotes and above {release}, what has changed since: {line}"
    version = version_of_headers()
    gone = set(old) - set(found) - set(extended(old, found))
    places = 1 if numbers(release)[0] else 2  # until 1.0 a minor version may break
    if gone and numbers(version)[:places] == numbers(release)[:places]:
        yield f"version {version} has {len(gone)} declarations of {release} no more, {min(gone)} for one: it needs a greater number"


def main():
    found = symbols(pathlib.Path(sys.argv[1]))
    if sys.argv[2] == "--release":
        LIST.write_text("\n".join([version_of_headers(), *found]) + "\n")
        return
    wrong = list(faults(found))
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
