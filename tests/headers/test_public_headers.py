"""What include/ shows to users."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"
BEGIN = "\nTESSERA_API_"


def includes(header):
    """What a header includes of ours, as written."""
    return set(re.findall(r'(?m)^#include "(tessera/[^"]+)"', (INCLUDE / header).read_text()))


def public_headers():
    """All headers but those in detail/, which users are not to include."""
    names = {path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h")}
    return {name for name in names if "/detail/" not in name}


def sources():
    return [(path, path.read_text()) for folder in ("include", "src", "mesh", "fsdp", "tensor_parallel")
            for path in sorted((ROOT / folder).rglob("*.*")) if path.suffix in (".h", ".cpp", ".inl", ".cu")]


def declared(text, end):
    """The classes that a file declares outside of others, (innermost namespace, name), up to `end`."""
    found, namespaces = set(), [""]
    for line in re.finditer(rf"(?m)^namespace (?:\w+::)*(\w* ?)\{{|^(\}})  // namespace|^(?:class|struct) (\w+){end}", text):
        if line[1] is not None:
            namespaces.append(line[1].strip())
        elif line[2]:
            namespaces.pop()
        else:
            found.add((namespaces[-1], line[3]))
    return found


class PublicHeaders(unittest.TestCase):
    def test_the_umbrella_includes_each_of_them_and_nothing_else(self):
        self.assertEqual(includes("tessera/tessera.hpp"), public_headers())

    def test_all_declarations_are_exported(self):
        for path in sorted(INCLUDE.rglob("*.h")):
            text = path.read_text()
            with self.subTest(header=path.relative_to(INCLUDE).as_posix()):
                marks = re.findall(r"(?m)^(?:namespace tessera\b|TESSERA_API_(?:BEGIN|END)$)", text)
                if "namespace tessera" in marks:
                    self.assertEqual((marks[0], marks[-1]), ("TESSERA_API_BEGIN", "TESSERA_API_END"))
                    self.assertEqual(len(marks), 2 + marks.count("namespace tessera"))

    def test_first_declarations_are_exported_too(self):
        # g++ decides by that one.
        exported = {name for _, text in sources() if BEGIN in text for name in declared(text, r"[^;{]*\{")}
        for path, text in sources():
            if BEGIN not in text:
                with self.subTest(file=path.relative_to(ROOT).as_posix()):
                    self.assertEqual(declared(text, ";") & exported, set())

    def test_no_public_header_includes_an_internal_one(self):
        # nn::MetaDevice is a scope that holds one of dtensor's; Linear and Hooked have a base that
        # tensor parallelism knows both by, which also makes products of Linears together; Hooked
        # makes parts of what it holds; scopes that a backward takes along are CarriedScopes;
        # attention's kernel is chosen where its operator is; a MetricLog has a Progress.
        found = {header: inner for header in public_headers()
                 if (inner := {name for name in includes(header) if "/detail/" in name})}
        self.assertEqual(found, {"tessera/dtensor/operator_mode.h": {"tessera/internals/detail/threads.h",
                                                                     "tessera/internals/detail/dispatch_keys.h"},
                                 "tessera/dtensor/strict_scope.h": {"tessera/internals/detail/threads.h"},
                                 "tessera/kernels/fake_mode.h": {"tessera/internals/detail/dispatch_keys.h"},
                                 "tessera/nn/meta_device.h": {"tessera/dtensor/detail/meta_factory.h"},
                                 "tessera/nn/attention_kernel.h": {"tessera/dtensor/detail/attention_kernel.h"},
                                 "tessera/nn/linear.h": {"tessera/nn/detail/deferred_bias.h",
                                                         "tessera/nn/detail/linear_product.h"},
                                 "tessera/training/recording.h": {"tessera/observe/detail/progress.h"},
                                 "tessera/nn/hooked.h": {"tessera/nn/detail/deferred_bias.h",
                                                         "tessera/nn/detail/adopted_module.h"}})


if __name__ == "__main__":
    unittest.main()
