"""docs/architecture.md is true: its arrows are those of CMake, sources include along them only, and
a subfolder of a layer includes only subfolders above it in the table."""
import collections
import os
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("src", "mesh", "tensor_parallel", "fsdp")
SOURCES = (".cpp", ".h", ".inl", ".inc", ".cu")


# What libtorch does not document for C++. Sources reach it by tessera/internals/detail/ only.
INTERNAL_INCLUDES = re.compile(
    r"(?m)^#include <((?:torch/csrc/(?!autograd/(?:autograd|custom_function)\.h)|torch/version|c10/core/impl/|ATen/detail/"
    r"|ATen/native/|ATen/core/boxing/|ATen/SequenceNumber|ATen/ThreadLocalState|ATen/autocast_mode|ATen/EmptyTensor"
    r"|ATen/TensorUtils|c10/core/(?:TensorImpl|AutogradState|CachingDeviceAllocator|CPUAllocator)\.h"
    r"|c10/cuda/CUDAGraphsC10Utils|c10/util/ThreadLocalDebugInfo|ATen/ops/\w+_dispatch)[^>]*)>")
INTERNAL_NAMES = re.compile(
    r"\b(TORCH_VERSION\w*|TESTING_ONLY\w*|CustomRNGKeyId|DeferredInit|DispatchKey::Fake|TORCH_LIBRARY_IMPL\(\w+, Fake"
    r"|c10::(?:impl|detail|cow)::\w+|at::(?:impl|detail|native|cpu|sequence_number|autocast|compositeimplicitautograd)::\w+"
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


def includes_of(path):
    return re.findall(r'(?m)^#include "([^"]+)"', path.read_text())


def subfolders_in_order():
    """The subfolders of each layer, "src/nn", as the table lists them: a subfolder uses those before it. "." are the
    files in the layer's own folder."""
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.split("\n## Subfolders\n")[1].split("\n## ")[0]
    sections = re.split(r"(?m)^\| \*\*`([\w/]+)`\*\*", table)
    return {layer: [name for line in text.splitlines()[1:] for name in re.findall(r"`(\w+|\.)/`", line.split("|")[1])]
            for layer, text in zip(sections[1::2], sections[2::2])}


class Subfolders:
    """Which file of a layer is in which subfolder. A header in include/ is in the subfolder of the source that bears its
    name, and includes it; if there is none, in no subfolder: what it includes counts for who includes it."""

    def __init__(self, layer):
        self.folder = ROOT / layer
        self.files = [path for path in sorted(self.folder.rglob("*")) if path.suffix in SOURCES]
        public = ROOT / "include/tessera" / self.folder.name
        self.headers = {path.relative_to(ROOT / "include").as_posix(): path for path in sorted(public.rglob("*.h"))}
        self.subfolder_of = {path: self._folder_of(path) for path in self.files}
        sources = collections.defaultdict(list)
        for path in self.files:
            sources[path.stem].append(path)
        for name, path in self.headers.items():
            own = [source for source in sources[path.stem] if source.suffix != ".h" and name in includes_of(source)]
            self.subfolder_of[path] = self._folder_of(own[0]) if own else None

    def _folder_of(self, path):
        parts = path.relative_to(self.folder).parts
        return parts[0] if len(parts) > 1 else "."

    def _target(self, path, include):
        """The file of this layer that an include names, or None."""
        if include in self.headers:
            return self.headers[include]
        places = (self.folder / include, pathlib.Path(os.path.normpath(path.parent / include)))
        return next((place for place in places if place in self.subfolder_of), None)

    def _subfolders_reached(self, path, include, seen):
        target = self._target(path, include)
        if target is None or target in seen:
            return set()
        if self.subfolder_of[target] is not None:
            return {self.subfolder_of[target]}
        return {subfolder for further in includes_of(target)
                for subfolder in self._subfolders_reached(target, further, {*seen, target})}

    def includes(self):
        """(file, its subfolder, subfolder, include) of each include from subfolder to subfolder."""
        for path, subfolder in self.subfolder_of.items():
            for include in includes_of(path) if subfolder is not None else ():
                for used in self._subfolders_reached(path, include, set()) - {subfolder}:
                    yield path.relative_to(ROOT).as_posix(), subfolder, used, include

    def backward(self, order):
        """Those that go back: to a subfolder that is not before the file's own in `order`."""
        place = {subfolder: number for number, subfolder in enumerate(order)}
        return [f"{file} includes {include}: {subfolder} uses {used}"
                for file, subfolder, used, include in self.includes() if place[used] >= place[subfolder]]


class Architecture(unittest.TestCase):
    def test_diagram_arrows_match_cmake(self):
        self.assertEqual(drawn_arrows(), cmake_arrows())

    def test_sources_include_only_lower_layers(self):
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

    def test_only_internals_use_non_public_libtorch(self):
        for path in sources():
            if "internals" in path.parts:
                continue
            code = re.sub(r"//.*|\"(?:[^\"\\\n]|\\.)*\"", "", path.read_text())
            with self.subTest(file=path.relative_to(ROOT).as_posix()):
                self.assertEqual(INTERNAL_NAMES.findall(code) + INTERNAL_INCLUDES.findall(code), [])

    def test_only_comm_uses_c10d(self):
        users = {path.relative_to(ROOT).as_posix() for path in sources()
                 if re.search(r'internals/detail/c10d|\bc10d::', path.read_text())}
        self.assertEqual({user for user in users if not re.match(r"src/comm/|.*internals/(detail/)?c10d", user)}, set())

    def test_every_internal_header_has_a_canary_and_a_row(self):
        page = (ROOT / "docs/libtorch_internals.md").read_text()
        tests = "".join(path.read_text() for path in (ROOT / "tests/internals").glob("*.cpp"))
        rows = re.findall(r"(?m)^\| `(\w+\.h)` \|.*\| `(\w+)` \|$", page)
        headers = {path.name: path.read_text() for path in (ROOT / "include/tessera/internals/detail").glob("*.h")}
        self.assertEqual({name for name, _ in rows}, headers.keys())
        self.assertEqual({(name, canary) for name, text in headers.items() for canary in re.findall(r"// Canary: (\w+)", text)},
                         set(rows))
        self.assertEqual(set(re.findall(r"TEST(?:_F)?\((\w+Canary),", tests)), {canary for _, canary in rows})

    def test_every_subfolder_is_in_the_table(self):
        for layer, order in subfolders_in_order().items():
            with self.subTest(layer=layer):
                found = {each for each in Subfolders(layer).subfolder_of.values() if each is not None}
                # A layer without subfolders has no order to tell.
                self.assertEqual(set(order) or {"."}, found)
                self.assertEqual(len(order), len(set(order)))

    def test_subfolders_include_only_earlier_subfolders(self):
        for layer, order in subfolders_in_order().items():
            with self.subTest(layer=layer):
                self.assertEqual(Subfolders(layer).backward(order or ["."]), [])

    def test_programs_include_no_detail_headers(self):
        # Benchmarks measure kernels of the library, too. tessera-run --explain reads the flight records.
        for path in [path for folder in ("examples", "tools") for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]:
            with self.subTest(file=path.relative_to(ROOT).as_posix()):
                self.assertLessEqual({name for name in includes_of(path) if "/detail/" in name},
                                     {"tessera/core/detail/flight_record.h"} if path.parent.name == "run" else set())
