"""docs/api/symbols.py: what counts as a change of the interface, and as named in the changelog."""
import importlib.util
import pathlib
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
    def test_no_change_needs_no_entry(self):
        self.assertEqual(unnamed(OLD, ""), [])

    def test_a_default_of_a_field_is_named_with_its_class(self):
        new = changed("tessera::Options::lr", "double = 1")
        self.assertEqual(unnamed(new, "`lr` and `Options` and Options::lr"), ["tessera::Options::lr"] * 2)
        self.assertEqual(unnamed(new, "`optim::Options::lr`"), [])

    def test_another_order_of_fields_needs_an_entry(self):
        self.assertEqual(unnamed(changed("tessera::Options", "struct { eps, lr }"), ""), ["tessera::Options"] * 2)

    def test_a_new_overload_needs_an_entry(self):
        new = [*OLD, "tessera::save | void (int, bool)"]
        self.assertEqual(unnamed(new, "`save_all`, `resave`"), ["tessera::save"])
        self.assertEqual(unnamed(new, "`save(rank, always)`"), [])

    def test_a_constructor_is_named_as_a_call(self):
        new = changed("tessera::Schedule::Schedule", "(double)")
        self.assertEqual(unnamed(new, "`Schedule`"), ["tessera::Schedule::Schedule"] * 2)
        self.assertEqual(unnamed(new, "`Schedule(options)`"), [])

    def test_a_removed_class_is_named_once(self):
        new = [line for line in OLD if "Schedule" not in line]
        self.assertEqual(len(unnamed(new, "")), 2)
        self.assertEqual(unnamed(new, "`Schedule`"), [])

    def test_a_header_is_named_by_its_file(self):
        new = [*OLD, "tessera/nn/lora.h | header"]
        self.assertEqual(unnamed(new, "`nn/blora.h`"), ["tessera/nn/lora.h"])
        self.assertEqual(unnamed(new, "`tessera/nn/lora.h`"), [])


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

    def test_only_entries_above_the_last_release_count(self):
        new = [*OLD, "tessera::load | void ()"]
        self.assertIn("+ tessera::load", self.faults("0.10.1", new, "# C\n\n## 0.10.0\n\n`load`\n"))
        self.assertEqual(self.faults("0.10.1", new, "# C\n\n## 0.10.1\n\n`load`\n\n## 0.10.0\n"), "")

    def test_a_removed_name_needs_a_greater_minor_version(self):
        new = [line for line in OLD if "save" not in line]
        self.assertIn("needs a greater number", self.faults("0.10.1", new, "`save`"))
        self.assertEqual(self.faults("0.11.0", new, "`save`"), "")

    def test_a_field_behind_the_others_needs_no_greater_version(self):
        new = [*changed("tessera::Options", "struct { lr, eps }"), "tessera::Options::eps | double = 0"]
        self.assertEqual(self.faults("0.10.1", new, "`Options::eps`, a field of `optim::Options`"), "")
        first = [*changed("tessera::Options", "struct { eps, lr }"), "tessera::Options::eps | double = 0"]
        self.assertIn("needs a greater number", self.faults("0.10.1", first, "`Options::eps`, `optim::Options`"))


if __name__ == "__main__":
    unittest.main()
