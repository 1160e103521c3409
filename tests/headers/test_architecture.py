"""docs/architecture.md is true: its arrows are those of CMake, and sources include along them only."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("src", "mesh", "tensor_parallel", "fsdp")


# What libtorch does not document for C++. Sources reach it by tessera/internals/detail/ only.
INTERNAL_INCLUDES = re.compile(
    r"(?m)^#include <((?:torch/csrc/(?!autograd/(?:autograd|custom_function)\.h)|torch/version|c10/core/impl/|ATen/detail/"
    r"|ATen/native/|ATen/core/boxing/|ATen/SequenceNumber|ATen/ThreadLocalState|ATen/autocast_mode|ATen/EmptyTensor"
    r"|ATen/TensorUtils|c10/core/(?:TensorImpl|AutogradState|CachingDeviceAllocator|CPUAllocator)\.h"
    r"|c10/cuda/CUDAGraphsC10Utils|c10/util/ThreadLocalDebugInfo|ATen/ops/\w+_dispatch)[^>]*)>")
INTERNAL_NAMES = re.compile(
    r"\b(TORCH_VERSION\w*|TESTING_ONLY\w*|CustomRNGKeyId|DeferredInit|DispatchKey::Fake|TORCH_LIBRARY_IMPL\(\w+, Fake"
    r"|c10::(?:impl|detail|cow)::\w+|at::(?:impl|detail|native|sequence_number|autocast|compositeimplicitautograd)::\w+"
    r"|torch::autograd::(?!Function\b|AutogradContext|variable_list|grad\b|backward\b)\w+|c10d::\w+"
    r"|unsafe[A-Z]\w*|unsafe_(?:reclaim|storage)\w*|getIntrusivePtr|TensorImpl|StorageImpl|VariableVersion|autograd_meta"
    r"|(?:set_)?version_counter|bump_version|set_storage_keep_dtype|set_data_ptr_noswap|shallow_copy_and_detach"
    r"|set_wrapped_number|set_history|collect_next_edges|queue_callback|initLogging|getDeviceAllocator"
    r"|[GS]etCPUAllocator|ThreadLocalState\w*|DebugInfo\w*)\b")


def sources():
    """All that is built but the tests, which may look at libtorch as they like."""
    return [path for folder in (*FOLDERS, "include", "examples", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.*")
            if path.suffix in (".cpp", ".h", ".inl", ".cu")]


def cmake_arrows():
    """The pairs (layer, layer that it uses) of all tessera_layer calls."""
    arrows = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("CMakeLists.txt"):
            for name, words in re.findall(r"(?s)tessera_layer\((\w+)(.*?)\)", path.read_text()):
                uses = re.search(r"\bUSES\s(.*?)(?=\b(?:SOURCES|ALONE|PRIVATE|NO_TORCH)\b|$)", words, re.S)
                arrows |= {(name, used) for used in re.findall(r"tessera::(\w+)", uses.group(1) if uses else "")}
    return arrows


def drawn_arrows():
    graph = (ROOT / "docs/architecture.md").read_text().split("```mermaid\n")[1].split("```")[0]
    return set(re.findall(r"(\w+) --> (\w+)", graph))


def below(layer, arrows):
    """A layer and all that it uses, directly or not."""
    reached, to_visit = set(), [layer]
    while to_visit:
        layer = to_visit.pop()
        if layer not in reached:
            reached.add(layer)
            to_visit += [used for user, used in arrows if user == layer]
    return reached


class Architecture(unittest.TestCase):
    def test_the_drawn_arrows_are_those_of_cmake(self):
        self.assertEqual(drawn_arrows(), cmake_arrows())

    def test_sources_include_the_layers_below_them_only(self):
        arrows = drawn_arrows()
        layers = {layer for arrow in arrows for layer in arrow}
        for path in [*(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")),
                     *(ROOT / "include/tessera").glob("*/**/*.h")]:
            layer = next((part for part in path.relative_to(ROOT).parts if part in layers), None)
            if layer is None or path.suffix not in (".cpp", ".h", ".inl", ".cu"):
                continue
            for used in re.findall(r'(?m)^#include "tessera/(\w+)/', path.read_text()):
                with self.subTest(file=path.relative_to(ROOT).as_posix(), includes=used):
                    self.assertIn(used, below(layer, arrows))

    def test_only_internals_name_what_is_not_public_of_libtorch(self):
        for path in sources():
            if "internals" in path.parts:
                continue
            code = re.sub(r"//.*|\"(?:[^\"\\\n]|\\.)*\"", "", path.read_text())
            with self.subTest(file=path.relative_to(ROOT).as_posix()):
                self.assertEqual(INTERNAL_NAMES.findall(code) + INTERNAL_INCLUDES.findall(code), [])

    def test_only_comm_uses_c10d(self):
        users = {path.relative_to(ROOT).as_posix() for path in sources()
                 if re.search(r'internals/detail/c10d_|\bc10d::', path.read_text())}
        self.assertEqual({user for user in users if not re.match(r"src/comm/|.*internals/(detail/)?c10d_", user)}, set())

    def test_every_internal_header_has_a_canary_and_a_row(self):
        page = (ROOT / "docs/libtorch_internals.md").read_text()
        tests = "".join(path.read_text() for path in (ROOT / "tests/internals").glob("*.cpp"))
        rows = dict(re.findall(r"(?m)^\| `(\w+\.h)` \|.*\| `(\w+)` \|$", page))
        headers = {path.name: path.read_text() for path in (ROOT / "include/tessera/internals/detail").glob("*.h")}
        self.assertEqual(rows.keys(), headers.keys())
        for name, text in headers.items():
            with self.subTest(header=name):
                self.assertIn(f"// Canary: {rows[name]}", text)
                self.assertRegex(text, r"[Vv]ersion|2\.1\d")
                self.assertRegex(tests, rf"TEST(_F)?\({rows[name]},")

    def test_every_room_is_in_the_table(self):
        page = (ROOT / "docs/architecture.md").read_text()
        table = page.split("\n## Rooms\n")[1].split("\n## ")[0]
        sections = re.split(r"(?m)^\| \*\*`([\w/]+)`\*\*", table)
        named = {f"{layer}/{room}" for layer, text in zip(sections[1::2], sections[2::2])
                 for line in text.splitlines()[1:] for room in re.findall(r"`(\w+)/`", line.split("|")[1])}
        rooms = {path.parent.relative_to(ROOT).as_posix()
                 for folder in FOLDERS for path in (ROOT / folder).rglob("*.cpp")}
        layers = set(sections[1::2])
        self.assertEqual(named | layers, rooms | layers)

    def test_every_room_is_drawn(self):
        drawn = set(re.findall(r"\w+", " ".join(re.findall(r">([^<>]+)</text>",
                                                          (ROOT / "docs/architecture.svg").read_text()))))
        rooms = {part for folder in FOLDERS for path in (ROOT / folder).rglob("*.cpp")
                 for part in path.parent.relative_to(ROOT).parts} - {"src"}
        self.assertEqual(rooms - drawn, set())


if __name__ == "__main__":
    unittest.main()
