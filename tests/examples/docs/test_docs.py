"""Flags, links and commands in the documents are those of the programs; the commands of two pages run, and so do the
tutorials, alone and on several ranks."""

import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

import programs
import tokenizers_of_kinds as kinds

PAGES = [*(programs.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
         *sorted((programs.ROOT / "docs").rglob("*.md"))]


def flags(text):
    """Returns the long flags in a text, without flags that negate other flags."""
    return {flag for flag in re.findall(r"--(?:\[no-\])?([a-z][a-z0-9-]+)", text)
            if not flag.startswith("no-")} - {"help", "help-all"}


def anchors(page):
    """Returns the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Documents(unittest.TestCase):
    def test_marked_tutorial_code_is_shown_unchanged(self):
        shown = "".join(page.read_text() for page in PAGES)
        marked = [part for source in sorted((programs.ROOT / "examples/tutorials").glob("*.cpp"))
                  for _, part in re.findall(r"(?ms)^// \[(\w+)\]\n(.*?)^// \[\1\]$", source.read_text())]
        self.assertTrue(marked)
        for part in marked:
            with self.subTest(part.splitlines()[0]):
                self.assertTrue("```cpp\n" + part + "```" in shown)

    def test_names_in_the_pytorch_table_are_in_the_headers(self):
        headers = "".join(path.read_text() for path in (programs.ROOT / "include").rglob("*.h"))
        table = (programs.ROOT / "docs/from_pytorch.md").read_text().split("| PyTorch | Tessera |\n")[1].split("\n\n")[0]
        for row in table.splitlines()[1:]:
            for code in re.findall(r"`([^`]+)`", row.split("|")[2]):
                for name in re.findall(r"[A-Za-z_]\w*(?=[^\w\"]|$)", re.sub(r"\(.*", "", code)):
                    if name not in ("tessera", "run", "torchrun", "Derived", "Block"):
                        with self.subTest(code):
                            self.assertRegex(headers, rf"\b{name}\b")

    def test_rows_of_tables_are_on_lines_of_their_own(self):
        for page in PAGES:
            for line in page.read_text().splitlines():
                if "|---|" in line:
                    self.assertRegex(line, r"^[ |:-]+$", page.name)

    def test_links_point_to_existing_files_and_headings(self):
        for page in PAGES:
            for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
                with self.subTest(page=page.name, target=target, heading=heading):
                    file = page.parent / target if target else page
                    self.assertTrue(file.exists())
                    if heading:
                        self.assertIn(heading, anchors(file))

    def test_named_files_exist(self):
        folders = "src|fsdp|mesh|tensor_parallel|tools|include|tests|examples|benchmarks|scripts|docs"
        for page in PAGES:
            for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
                with self.subTest(page=page.name, name=name):
                    self.assertTrue((programs.ROOT / name).exists())

    def test_exactly_the_flags_of_llama_generate_are_explained(self):
        text = (programs.ROOT / "docs/programs/generation.md").read_text()
        table = "\n".join(line for line in text.splitlines() if line.startswith("| `--"))
        done = programs.succeed([programs.BIN / "llama_generate", "--help"])
        self.assertEqual(flags(table), flags(re.sub(r"(?m)^ {30}.*", "", done.stdout)))

    def test_every_metric_is_explained(self):
        code = (programs.ROOT / "src/observe/metrics.cpp").read_text().split("ordered_json json = ")[1].split("return ")[0]
        keys = re.findall(r'[{[]"(\w+)"', code)
        self.assertIn("eval_loss", keys)
        page = (programs.ROOT / "docs/programs/training.md").read_text()
        self.assertEqual([key for key in keys if f"`{key}`" not in page], [])


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
        programs.make_architecture(folder, programs.MODELS["llama3"] | {
            "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256,
            "bos_token_id": tokenizer.token_to_id("<s>"), "eos_token_id": tokenizer.token_to_id("<|eot|>")})
        tokenizer.save(str(folder / "tokenizer.json"))
        self.write("texts/tiles.txt", text)
        self.write("texts/more.jsonl", "".join(json.dumps({"text": SENTENCE.format(-i) * 20}) + "\n" for i in range(20)))
        self.write("held_out.txt", "".join(SENTENCE.format(1000 + i) for i in range(30)))
        self.write("questions.jsonl", "".join(json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) + "\n"
                                              for i in range(64)))
        os.symlink(programs.BIN.parent, self.folder / "build")

    def test_every_command_of_the_page_works(self):
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
# The numbers of the commands that always run. The others, which take some seconds each, run with TESSERA_ALL_PLANS.
ALWAYS = (1, 3)


class PlanA70bRun(programs.InFolder):
    def test_commands_print_the_output_that_the_page_shows(self):
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
        plan, page = json.loads((self.folder / "plan.json").read_text()), (programs.ROOT / "docs/planning.md").read_text()
        self.assertEqual([key for key in (*plan, *plan["kinds"][0]) if f"`{key}`" not in page], [])


class TorchExport(programs.InFolder):
    def test_exported_program_equals_transformers(self):
        """The program of docs/programs/exporting.md that exports a model with torch.export."""
        import torch
        import transformers
        config = programs.write_config(self.folder, programs.SMALL | {"num_key_value_heads": 2})
        programs.train(["--config", config, "--tokens", self.tokens, "--seq", 32, "--batch", 4, "--steps", 2,
                        "--save-hf", self.folder / "run/model"], dp=2, tp=2)
        code = re.search(r"(?ms)^```python\n(.*?)^```$", (programs.ROOT / "docs/programs/exporting.md").read_text())[1]
        programs.succeed([sys.executable, "-c", code], cwd=self.folder)
        exported = torch.export.load(self.folder / "run/exported.pt2").module()
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "run/model", dtype=torch.float32)
        # The sizes differ from those of the export.
        tokens = torch.tensor(programs.text_tokens(3 * 29, 256)).view(3, 29)
        with torch.no_grad():
            torch.testing.assert_close(exported(tokens), model(tokens).logits)


# ---- The tutorials.

def losses_of(output):
    return [float(loss) for loss in re.findall(r"\bloss:? +(-?\d\S*)", output)]


class Tutorials(unittest.TestCase):
    def run_tutorial(self, name, *arguments, on=(1, 4)):
        """Yields the output of a tutorial on each number of ranks in `on`."""
        for ranks in on:
            with self.subTest(name, ranks=ranks):
                program = [programs.BIN / f"tutorial_{name}", *arguments]
                yield programs.succeed(programs.on_ranks(ranks, program), timeout=120).stdout

    def test_each_tutorial_prints_its_result(self):
        equal = "every gradient is as one rank computes it"
        with tempfile.TemporaryDirectory() as folder:
            for name, arguments, on, patterns in (
                    ("02_distributed_tensor", (), (4,), [r"\(dp=2, tp=2\)", r"\[Partial\(sum\)\] -> \[Shard\(0\)\]"]),
                    ("04_operators", (), (4,), [r"the product is \[Partial\(sum\)\], the softmax \[Shard\(1\)\], "
                                                r"the gradients \[Shard\(1\)\] and \[Shard\(0\)\]"]),
                    ("06_fsdp", (), (4,), ["(?m)^up: ", "(?m)^down: "]),
                    ("11_experts", (), (2,), [r"one of \d+ alike", "(?m)^ +ep +all_to_all "]),
                    # With 3 experts on 4 ranks of ep, one rank has none.
                    ("11_experts", (3, 4), (4,), ["step 20 loss"]),
                    ("12_losses", (), (2, 4), [equal]),
                    ("13_own_parameters", (), (2, 4), [equal]),
                    ("16_plain_inference", (folder,), (3,), ["the plain model computes the same bits"])):
                for output in self.run_tutorial(name, *arguments, on=on):
                    for pattern in patterns:
                        self.assertRegex(output, pattern)

    def test_losses_fall(self):
        for name in ("03_train_2d", "06_fsdp", "08_your_own_module"):
            for output in self.run_tutorial(name, on=(4,)):
                losses = losses_of(output)
                self.assertEqual(len(losses), 20)
                self.assertLess(losses[-1], losses[0])

    def test_losses_equal_one_rank(self):
        """`fall`: the last loss as a share of the first one. `early`: the tolerance of the first three steps, before rounding
        has been multiplied by the steps."""
        for name, on, count, fall, early, late in (
                ("01_data_parallel", (3, 4), 5, 0.8, 1e-4, 1e-4), ("09_gpt2", (4,), 20, 0.9, 2e-5, 2e-3),
                ("11_experts", (4,), 20, 1, 1e-3, 1e-3), ("14_your_own_program", (4,), 10, 0.2, 2e-2, 2e-2),
                ("15_torch_nn", (2, 4), 20, 0.8, 1e-3, 1e-3)):
            alone, *others = self.run_tutorial(name, on=(1, *on))
            want = losses_of(alone)
            self.assertEqual(len(want), count)
            self.assertLess(want[-1], fall * want[0])
            sums = {re.search(r"sum of parameters (-?\d+\.\d{10}\d*)", output)[1] for output in (alone, *others) if name == "09_gpt2"}
            self.assertLess(len(sums), 2)  # initial weights are those of one rank
            for output in others:
                for step, (one, same) in enumerate(zip(want, losses_of(output), strict=True)):
                    self.assertAlmostEqual(one, same, delta=(early if step < 3 else late) * one, msg=f"{name}, step {step}")

    def test_your_own_program_writes_the_requested_files(self):
        with tempfile.TemporaryDirectory() as folder:
            list(self.run_tutorial("14_your_own_program", folder, on=(2,)))
            out = pathlib.Path(folder)
            events = json.loads((out / "profile.json").read_text())["traceEvents"]
            names = {event.get("name") for event in events}
            self.assertIn("Curve: forward", names)
            self.assertEqual(len(list((out / "board").iterdir())), 1)
