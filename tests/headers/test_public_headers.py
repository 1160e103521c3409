"""The public headers: what they include and declare, the list of symbols, and compiler messages of wrong programs."""

from unittest import mock
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
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
    def test_umbrella_header_includes_all_but_mpi(self):
        self.assertEqual(includes("tessera/tessera.hpp"), public_headers() - {"tessera/comm/mpi_world.h"})

    def test_all_declarations_are_exported(self):
        for path in sorted(INCLUDE.rglob("*.h")):
            text = path.read_text()
            with self.subTest(header=path.relative_to(INCLUDE).as_posix()):
                marks = re.findall(r"(?m)^(?:namespace tessera\b|TESSERA_API_(?:BEGIN|END)$)", text)
                if "namespace tessera" in marks:
                    self.assertEqual((marks[0], marks[-1]), ("TESSERA_API_BEGIN", "TESSERA_API_END"))
                    self.assertEqual(len(marks), 2 + marks.count("namespace tessera"))

    def test_forward_declarations_are_exported(self):
        # g++ decides by that one.
        exported = {name for _, text in sources() if BEGIN in text for name in declared(text, r"[^;{]*\{")}
        for path, text in sources():
            if BEGIN not in text:
                with self.subTest(file=path.relative_to(ROOT).as_posix()):
                    self.assertEqual(declared(text, ";") & exported, set())

    def test_public_headers_include_few_internal_headers(self):
        # Types that a program gets and passes on, base classes and members of public classes.
        inner = {(header, name) for header in public_headers() for name in includes(header)
                 if "/detail/" in name and "no_copy" not in name}
        self.assertLess(len(inner), 30, sorted(inner))


spec = importlib.util.spec_from_file_location("symbols", ROOT / "docs/api/symbols.py")
symbols = importlib.util.module_from_spec(spec)
spec.loader.exec_module(symbols)

OLD = ["tessera::Options | struct { lr }", "tessera::Options::lr | double = 0", "tessera::save | void (int)",
       "tessera::Schedule | class", "tessera::Schedule::Schedule | (int)"]


def unnamed(new, changelog):
    return [line[2:].split(" | ")[0] for line in symbols.unnamed(OLD, new, changelog)]


def changed(name, what):
    return [f"{name} | {what}" if line.startswith(f"{name} |") else line for line in OLD]


class Names(unittest.TestCase):
    """Which changes of the list of symbols a changelog must name, and how."""

    def test_changelog_must_name_every_change(self):
        lr, order, schedule = "tessera::Options::lr", "tessera::Options", "tessera::Schedule::Schedule"
        overload = [*OLD, "tessera::save | void (int, bool)"]
        without = [line for line in OLD if "Schedule" not in line]
        header = [*OLD, "tessera/nn/lora.h | header"]
        for new, changelog, missing in (
                (OLD, "", []),
                # A default of a field is named with its class.
                (changed(lr, "double = 1"), "`lr` and `Options` and Options::lr", [lr] * 2),
                (changed(lr, "double = 1"), "`optim::Options::lr`", []),
                (changed(order, "struct { eps, lr }"), "", [order] * 2),
                (overload, "`save_all`, `resave`", ["tessera::save"]), (overload, "`save(rank, always)`", []),
                # A constructor is named as a call.
                (changed(schedule, "(double)"), "`Schedule`", [schedule] * 2),
                (changed(schedule, "(double)"), "`Schedule(options)`", []),
                (without, "", ["tessera::Schedule", schedule]), (without, "`Schedule`", []),
                (header, "`nn/blora.h`", ["tessera/nn/lora.h"]), (header, "`tessera/nn/lora.h`", [])):
            with self.subTest(changelog):
                self.assertEqual(sorted(unnamed(new, changelog)), sorted(missing))


class Releases(unittest.TestCase):
    def faults(self, version, found, changelog):
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            for path, text in (("docs/api/symbols.txt", "\n".join(["0.10.0", *OLD])), ("CHANGELOG.md", changelog),
                               ("include/tessera/version.h", f'#define TESSERA_VERSION "{version}"')):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            with mock.patch.multiple(symbols, ROOT=root, LIST=root / "docs/api/symbols.txt"):
                return "\n".join(symbols.faults(found))

    def test_changelog_entries_of_the_last_release_do_not_count(self):
        new = [*OLD, "tessera::load | void ()"]
        self.assertIn("+ tessera::load", self.faults("0.10.1", new, "# C\n\n## 0.10.0\n\n`load`\n"))
        self.assertEqual(self.faults("0.10.1", new, "# C\n\n## 0.10.1\n\n`load`\n\n## 0.10.0\n"), "")

    def test_removed_name_needs_a_new_minor_version(self):
        new = [line for line in OLD if "save" not in line]
        self.assertIn("needs a greater number", self.faults("0.10.1", new, "`save`"))
        self.assertEqual(self.faults("0.11.0", new, "`save`"), "")

    def test_appended_field_needs_no_new_minor_version(self):
        new = [*changed("tessera::Options", "struct { lr, eps }"), "tessera::Options::eps | double = 0"]
        self.assertEqual(self.faults("0.10.1", new, "`Options::eps`, a field of `optim::Options`"), "")
        first = [*changed("tessera::Options", "struct { eps, lr }"), "tessera::Options::eps | double = 0"]
        self.assertIn("needs a greater number", self.faults("0.10.1", first, "`Options::eps`, `optim::Options`"))


TORCH = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "include"


def compiler_says(program):
    """The output of the compiler, which only checks the program."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "program.cpp")
        source.write_text(program)
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-I", ROOT / "include",
                   "-isystem", TORCH, "-isystem", TORCH / "torch/csrc/api/include", source]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    return done.stderr


WRONG_CALLS = """
#include <memory>
#include "tessera/nn/layers.h"
using namespace tessera;
struct NoForward : nn::Module<NoForward> {};
struct TwoArguments : nn::Module<TwoArguments> {
  at::Tensor forward(const at::Tensor& x, int n) { return x * n; }
};
void call(const at::Tensor& x) {
  NoForward without;
  const at::Tensor y = without(x);
  nn::Sequential steps(std::make_shared<NoForward>());
  TwoArguments two;
  two(x);
  two(x, "three");
  nn::Linear linear(3, 4);
  linear(x, x);
}
"""

# The two lines of the README, beside all of ATen and what a program prints.
EVERY_NAME = """
#include <ATen/ATen.h>
#include <iostream>
#include <string>
#include "tessera/tessera.hpp"
using namespace tessera;
using namespace tensor_parallel;
void use(const at::Tensor& x, const DeviceMesh& mesh, nn::ModuleBase& module) {
  if (is_distributed(x)) {
    std::cout << DistributedTensor(x).placements() << DistributedTensor(x).layout() << sharding_spec(x)
              << mesh << mesh.shape() << Placement(Shard{0}) << ReduceOp::kSum;
  }
  parallelize_module(module, mesh["tp"], {{"up", colwise_parallel()}});
  cross_entropy(x, x);
  distribute_tensor(x, mesh, {Shard{0}});
  zeros({2, 3}, mesh, {Replicate{}});
  rand({2, 3}, RandomKey{1, 2}, mesh, {Replicate{}});
  local_tensor(x);
}
"""


def public_types():
    """Types of the two namespaces that are no templates."""
    found = set()
    for path in sorted((ROOT / "include/tessera").rglob("*.h")):
        if "detail" in path.parts:
            continue
        for space, body in re.findall(r"(?ms)^namespace (tessera(?:::tensor_parallel)?) \{$(.*?)^\}  // namespace \1$",
                                      path.read_text()):
            body = re.sub(r"(?ms)^namespace [\w:]+ \{$.*?^\}  // namespace", "", body)
            body = re.sub(r"(?m)^template\b.*\n.*$", "", body)
            found |= set(re.findall(r"(?m)^(?:class|struct|enum class|using) (\w+)\b(?!;| \[\[deprecated)", body))
    return found


class CompilerMessages(unittest.TestCase):
    def test_a_wrong_call_of_a_module_is_one_readable_line(self):
        said = compiler_says(WRONG_CALLS)
        errors = [line for line in said.splitlines() if " error: " in line]
        needs_forward = [line for line in errors if "a module that is called needs a public forward" in line]
        takes_others = [line for line in errors if "this module's forward does not take these arguments" in line]
        self.assertEqual((len(needs_forward), len(takes_others), len(errors)), (1, 3, 4), said)
        self.assertLess(len(said.splitlines()), 12 * len(errors), said)

    def test_readme_using_directives_make_no_name_ambiguous(self):
        types = public_types()
        self.assertTrue({"DeviceMesh", "Shard", "ShardingSpec", "ParallelizePlan", "StylePtr", "RandomKey"} <= types, types)
        aliases = "".join(f"using Alias{i} = {name};\n" for i, name in enumerate(sorted(types)))
        said = compiler_says(EVERY_NAME + aliases)
        self.assertFalse(said, said)
