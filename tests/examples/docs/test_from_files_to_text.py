"""Runs the commands of docs/programs/from_files_to_text.md on a small model and files that it makes itself."""
import json
import os
import re
import unittest

import architectures
import programs
import tokenizers_of_kinds as kinds

PAGE = programs.ROOT / "docs/programs/from_files_to_text.md"
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
        blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", PAGE.read_text())
        self.assertEqual(len(blocks), 7)
        said = [programs.succeed(["bash", "-ec", block], cwd=self.folder).stdout for block in blocks]
        before, after = (float(each) for each in re.findall(r"perplexity: ([\d.]+)", said[4]))
        self.assertLess(after, before)
        self.assertIn("The shell", said[5])
        for name in ("run/model", "run/tuned", "run/exported"):
            with self.subTest(name):
                transformers.AutoModelForCausalLM.from_pretrained(self.folder / name)
                transformers.AutoTokenizer.from_pretrained(self.folder / name)
