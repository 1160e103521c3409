"""The program of docs/data.md that writes chats as prompts and completions, and training on its lines."""
import json
import re
import sys
import unittest

import programs
import tokenizers_of_kinds as kinds
import transformers

TURNS = [{"role": "user", "content": "What is 2 + 2?\n"}, {"role": "assistant", "content": " 4 \u00e9\U0001f600"},
         {"role": "user", "content": "And 'twice' \"that\"?"}, {"role": "assistant", "content": "8 <b>"}]
CHATML = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# As templates that drop the reasoning of earlier turns.
LAST_ALONE = "{% for message in messages %}{% if loop.last %}{{ message['content'] }}{% else %}.{% endif %}{% endfor %}"


class Chat(programs.WithSharedFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tokenizer = kinds.llama3(kinds.multilingual(50_000, seed=1))
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.save(str(cls.shared / "tokenizer.json"))
        page = (programs.ROOT / "docs/data.md").read_text()
        cls.program = cls.shared / "chats.py"
        cls.program.write_text(re.search(r"(?s)```python\n(.*?)```", page)[1])

    def write(self, template):
        """Runs the program on two chats."""
        (self.shared / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}))
        lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in (TURNS, TURNS[:3]))
        return programs.run([sys.executable, self.program, self.shared], input=lines)

    def test_the_assistants_turns_are_learned(self):
        done = self.write(CHATML)
        self.assertEqual(done.returncode, 0, done.stderr)
        both, first = map(json.loads, done.stdout.splitlines())
        self.assertEqual(both["completion"], [" 4 \u00e9\U0001f600<|im_end|>\n", "8 <b><|im_end|>\n"])
        self.assertEqual(first["completion"], both["completion"][:1])
        text = "".join(part for pair in zip(both["prompt"], both["completion"]) for part in pair)
        theirs = transformers.AutoTokenizer.from_pretrained(str(self.shared))
        self.assertEqual(text, theirs.apply_chat_template(TURNS, tokenize=False))

    def test_a_template_that_changes_earlier_messages_is_refused(self):
        done = self.write(LAST_ALONE)
        self.assertEqual(done.returncode, 1)
        self.assertIn("changes earlier messages", done.stderr)

    def test_a_run_learns_and_generates(self):
        data, model = self.shared / "data.jsonl", self.shared / "model"
        data.write_text(self.write(CHATML).stdout)
        config = programs.write_config(self.shared, programs.SMALL | {"vocab_size": 4000})
        programs.train(["--config", config, "--jsonl", data, "--tokenizer", self.shared / "tokenizer.json", "--seq", 160,
                        "--batch", 2, "--eos-token", 1, "--steps", 2, "--save-hf", model])
        (model / "tokenizer.json").write_bytes((self.shared / "tokenizer.json").read_bytes())
        prompts, prompt = self.shared / "prompts.jsonl", "<s><|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
        prompts.write_text(json.dumps({"prompt": [prompt]}) + "\n")
        done = programs.succeed([programs.BIN / "llama_generate", "--model", model, "--prompts", prompts,
                                 "--max-tokens", 2, "--json"])
        self.assertEqual(json.loads(done.stdout)["prompt"], prompt)
        prompts.write_text(json.dumps({"messages": TURNS}) + "\n")
        done = programs.run([programs.BIN / "llama_generate", "--model", model, "--prompts", prompts])
        self.assertEqual(done.returncode, 1)
        self.assertIn('prompts.jsonl:1: the object has no field "prompt"', done.stderr)
