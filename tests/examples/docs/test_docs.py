"""What the documents say of the programs is what the programs are."""
import re
import unittest

import programs

PAGES = [programs.ROOT / "README.md", *sorted((programs.ROOT / "docs").rglob("*.md"))]


def flags(text):
    """Long flags, without those that only negate another."""
    return {flag for flag in re.findall(r"--(?:\[no-\])?([a-z][a-z0-9-]+)", text)
            if not flag.startswith("no-")} - {"help", "help-all"}


def anchors(page):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Documents(unittest.TestCase):
    def test_what_tutorials_mark_is_shown_as_it_is(self):
        shown = "".join(page.read_text() for page in PAGES)
        marked = [part for source in sorted((programs.ROOT / "examples/tutorials").glob("*.cpp"))
                  for _, part in re.findall(r"(?ms)^// \[(\w+)\]\n(.*?)^// \[\1\]$", source.read_text())]
        self.assertTrue(marked)
        for part in marked:
            with self.subTest(part.splitlines()[0]):
                self.assertTrue("```cpp\n" + part + "```" in shown)

    def test_the_names_beside_pytorchs_are_in_the_headers(self):
        headers = "".join(path.read_text() for path in (programs.ROOT / "include").rglob("*.h"))
        table = (programs.ROOT / "docs/from_pytorch.md").read_text().split("| PyTorch | Tessera |\n")[1].split("\n\n")[0]
        for row in table.splitlines()[1:]:
            for code in re.findall(r"`([^`]+)`", row.split("|")[2]):
                for name in re.findall(r"[A-Za-z_]\w*(?=[^\w\"]|$)", re.sub(r"\(.*", "", code)):
                    if name not in ("tessera", "run", "torchrun", "Derived", "Block"):
                        with self.subTest(code):
                            self.assertRegex(headers, rf"\b{name}\b")

    def test_links_lead_to_files_and_headings(self):
        for page in PAGES:
            for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
                with self.subTest(page=page.name, target=target, heading=heading):
                    file = page.parent / target if target else page
                    self.assertTrue(file.exists())
                    if heading:
                        self.assertIn(heading, anchors(file))

    def test_files_that_the_pages_name_exist(self):
        folders = "src|fsdp|mesh|tensor_parallel|tools|include|tests|examples|benchmarks|scripts|docs"
        for page in PAGES:
            for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
                with self.subTest(page=page.name, name=name):
                    self.assertTrue((programs.ROOT / name).exists())

    def test_every_flag_is_explained_and_no_other(self):
        for program, page, all_flags in (("llama_train", "training", "--help-all"), ("llama_generate", "generation", "--help")):
            text = (programs.ROOT / f"docs/programs/{page}.md").read_text()
            table = "\n".join(line for line in text.splitlines() if line.startswith("| `--"))
            with self.subTest(program):
                done = programs.succeed([programs.BIN / program, all_flags])
                self.assertEqual(flags(table), flags(re.sub(r"(?m)^ {30}.*", "", done.stdout)))
