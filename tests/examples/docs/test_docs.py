"""Flags, links and commands in the documents are those of the programs; the commands of two pages run."""

import json
import os
import re
import shutil
import unittest

import architectures
import programs
import tokenizers_of_kinds as kinds

PAGES = [*(programs.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
         *sorted((programs.ROOT / "docs").rglob("*.md"))]


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


FILES_TO_TEXT = programs.ROOT / "docs/programs/from_files_to_text.md"
SENTENCE = "The shell of a tessera is a small tile, and {} of them make a picture.\n"


class FromFilesToText(programs.InFolder):
    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def make_files(self):
        text = "".join(SENTENCE.format(i) for i in range(600))
        tokenizer = kinds.llama3(text)
        folder = self.folder / "Llama-3.2-1B"
        architectures.make(folder, architectures.MODELS["llama3"] | {
            "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256,
            "bos_token_id": tokenizer.token_to_id("<s>"), "eos_token_id": tokenizer.token_to_id("<|eot|>")})
        tokenizer.save(str(folder / "tokenizer.json"))
        self.write("texts/tiles.txt", text)
        self.write("texts/more.jsonl", "".join(json.dumps({"text": SENTENCE.format(-i) * 20}) + "\n" for i in range(20)))
        self.write("held_out.txt", "".join(SENTENCE.format(1000 + i) for i in range(30)))
        self.write("questions.jsonl", "".join(json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) + "\n"
                                              for i in range(64)))
        os.symlink(programs.BIN.parent, self.folder / "build")

    def test_every_command_does_what_it_says(self):
        import transformers
        self.make_files()
        blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", FILES_TO_TEXT.read_text())
        self.assertEqual(len(blocks), 7)
        said = [programs.succeed(["bash", "-ec", block], cwd=self.folder).stdout for block in blocks]
        before, after = (float(each) for each in re.findall(r"perplexity: ([\d.]+)", said[4]))
        self.assertLess(after, before)
        self.assertIn("The shell", said[5])
        for name in ("run/model", "run/tuned", "run/exported"):
            with self.subTest(name):
                transformers.AutoModelForCausalLM.from_pretrained(self.folder / name)
                transformers.AutoTokenizer.from_pretrained(self.folder / name)


PLAN_OF_70B = programs.ROOT / "docs/programs/plan_a_70b_run.md"
# The others of its commands only if asked, since each takes some seconds.
ALWAYS = (1, 3)


class PlanA70bRun(programs.InFolder):
    def test_what_the_page_shows_is_what_its_commands_print(self):
        for name, target in (("build", programs.BIN.parent), ("examples", programs.ROOT / "examples"),
                             ("tools", programs.ROOT / "tools"), (".deps", programs.ROOT / ".deps")):
            os.symlink(target, self.folder / name)
        blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", PLAN_OF_70B.read_text())
        self.assertEqual(len(blocks), 4)
        for number, (command, shown) in enumerate(blocks):
            if number in ALWAYS or os.environ.get("TESSERA_ALL_PLANS"):
                with self.subTest(command):
                    said = programs.succeed([shutil.which("bash"), "-ec", command], cwd=self.folder).stdout
                    for line in shown.splitlines():
                        # The last digit of a throughput depends on the processor's libm.
                        self.assertIn(re.sub(r"\d\d$", "", line), said)
        self.assertIn("Time line", (self.folder / "plan.html").read_text())
