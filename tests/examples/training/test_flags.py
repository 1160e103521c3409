"""The help of llama_train: short, whole, and by the sections of a --config-file."""
import re
import unittest

import programs


def sections(program, flag):
    """The flags that a program's help shows, as (section, flag), in order; those of no section have "Options"."""
    found, section = [], None
    for line in programs.succeed([programs.BIN / program, flag]).stdout.splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            section = heading[1].replace("OPTIONS", "Options")
        elif shown := re.match(r"  (?:-\w,)?--([a-z0-9-]+)", line):
            found.append((section, shown[1]))
    return found


class Help(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.all = sections("llama_train", "--help-all")
        cls.first = sections("llama_train", "--help")

    def test_long_help_has_each_flag_once(self):
        names = [name for _, name in self.all]
        self.assertEqual(sorted(set(names)), sorted(names))
        self.assertGreater(len(names), 70)

    def test_short_help_has_some_of_these_flags_in_the_same_sections(self):
        self.assertLess(set(self.first), set(self.all))
        self.assertLess(len(self.first), 30)
        text = programs.succeed([programs.BIN / "llama_train", "--help"]).stdout
        self.assertLess(len(text.splitlines()), 66)
        self.assertIn("--help-all", text)

    def test_a_section_is_shown_once(self):
        headings = [section for i, (section, _) in enumerate(self.all) if i == 0 or self.all[i - 1][0] != section]
        self.assertEqual(sorted(set(headings)), sorted(headings))

    def test_a_plan_has_its_own_flags_beside_them(self):
        shared = {name for _, name in self.all}
        own = {name for section, name in sections("llama_plan", "--help-all") if section == "plan"}
        self.assertLess({"gpu", "search", "gpus", "json"}, own | {"x"})
        self.assertEqual({name for _, name in sections("llama_plan", "--help-all")}, shared | own)
        self.assertEqual(own - {name for _, name in sections("llama_plan", "--help")}, set())
