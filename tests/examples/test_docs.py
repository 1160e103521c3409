"""What the documents say of the programs is what the programs are."""
import re
import unittest

import programs


def flags(text):
    """Long flags, without those that only negate another."""
    return {flag for flag in re.findall(r"--(?:\[no-\])?([a-z][a-z-]+)", text)
            if not flag.startswith("no-")} - {"help"}


class Documents(unittest.TestCase):
    def test_the_readme_shows_the_tutorial(self):
        source = (programs.ROOT / "examples/tutorials/03_train_2d.cpp").read_text()
        self.assertIn(source.split("// [readme]\n")[1], (programs.ROOT / "README.md").read_text())

    def test_every_flag_is_explained_and_no_other(self):
        text = (programs.ROOT / "docs/training.md").read_text()
        train, generate = text.split("\n## llama_generate\n")
        table = "\n".join(line for line in train.splitlines() if line.startswith("| `--"))
        for program, words in (("llama_train", table), ("llama_generate", generate)):
            with self.subTest(program):
                done = programs.run([programs.BIN / program, "--help"])
                self.assertEqual(flags(words), flags(re.sub(r"(?m)^ {30}.*", "", done.stdout)))


if __name__ == "__main__":
    unittest.main()
