"""Chat templates beside transformers' apply_chat_template, and training on messages."""
import json
import unittest

import chat_templates
import programs
import tokenizers_of_kinds as kinds
import transformers

SYSTEM = {"role": "system", "content": " Be brief. "}
TURNS = [{"role": "user", "content": "What is 2 + 2?\n"}, {"role": "assistant", "content": " 4 \u00e9\U0001f600"},
         {"role": "user", "content": "And 'twice' \"that\"?"}, {"role": "assistant", "content": "8 <b>&amp;\n\nthat is"}]
CALL = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1.5, None, "\u00e9"]}}}]},
    {"role": "tool", "content": "4"}, TURNS[3]]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class Chat(programs.WithSharedFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tokenizer = kinds.llama3(kinds.multilingual(50_000, seed=1))
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>"])
        tokenizer.save(str(cls.shared / "tokenizer.json"))

    def with_template(self, template):
        """transformers' tokenizer of the folder."""
        (self.shared / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "chat_template": template}))
        return transformers.AutoTokenizer.from_pretrained(str(self.shared))

    def render(self, chats):
        lines = self.shared / "lines.jsonl"
        lines.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        done = programs.succeed([programs.BIN / "token_ids", "--chat", self.shared, lines])
        return [json.loads(line) for line in done.stdout.rstrip("\n").split("\n")]

    def chats_of(self, name):
        chats = [{"messages": TURNS}, {"messages": TURNS[:3]}]
        if name not in ("gemma", "generation"):
            chats.append({"messages": [SYSTEM, *TURNS]})
        if name in ("llama3", "qwen2.5"):
            chats.append({"messages": CALL, "tools": TOOLS})
        return chats

    def test_texts_are_those_of_transformers(self):
        for name, template in chat_templates.TEMPLATES.items():
            with self.subTest(name):
                theirs = self.with_template(template)
                # What Mistral's puts before the last message makes turns that can't be told apart.
                chats = [chat for chat in self.chats_of(name) if name != "mistral" or chat["messages"][0] != SYSTEM]
                for chat, got in zip(chats, self.render(chats), strict=True):
                    render = lambda **options: theirs.apply_chat_template(  # noqa: E731
                        chat["messages"], tools=chat.get("tools"), tokenize=False, **options)
                    self.assertEqual(got["text"], render())
                    self.assertEqual(got["prompt"], render(add_generation_prompt=True))

    def test_values_are_written_as_by_transformers(self):
        numbers = [0, -1, 2**53 + 1, 2**63 - 1, -2**63, 2**64 - 1, 0.0, 1e-4, 1e-5, 1 / 3, 1e15, 123456789012345.6, 1e16, 1e300]
        text = "'\"" + "".join(map(chr, range(0x300))) + "\u200b\u2028\u3000\ufeff\ue000\U000e0001\U0001f600"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "numbers": numbers,
                                                       "texts": [text, text.replace('"', "")]}]
        for expression in "m", "m | tojson", "m.numbers[3] - 1", "m.numbers[2] // 2", "m.numbers[2] % 10", "m.numbers[10] * 10":
            with self.subTest(expression):
                theirs = self.with_template("{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}"
                                            "{% endgeneration %}{% endfor %}{% set m = messages[-1] %}{{ " + expression + " }}")
                got, = self.render([{"messages": messages}])
                self.assertEqual(got["text"], theirs.apply_chat_template(messages, tokenize=False))

    def test_the_loss_is_of_the_assistants_turns(self):
        for name, says in (("chatml", "8 <b>&amp;\n\nthat is<|im_end|>\n"), ("llama2", " 8 <b>&amp;\n\nthat is </s>"),
                           ("llama3", "8 <b>&amp;\n\nthat is<|eot_id|>"), ("mistral", " 8 <b>&amp;\n\nthat is</s>"),
                           ("gemma", "8 <b>&amp;\n\nthat is<end_of_turn>\n")):
            with self.subTest(name):
                self.with_template(chat_templates.TEMPLATES[name])
                got, = self.render([{"messages": TURNS}])
                begin, end = got["learnt"][-1]
                self.assertEqual(got["text"].encode()[begin:end].decode(), says)
                self.assertEqual(len(got["learnt"]), 2)

    def test_generation_is_marked_as_by_transformers(self):
        theirs = self.with_template(chat_templates.GENERATION)
        done = theirs.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
        got, = self.render([{"messages": TURNS}])
        text = got["text"].encode()
        learnt = [token for token, said in zip(done["input_ids"], done["assistant_masks"]) if said]
        self.assertEqual(theirs.decode(learnt), "".join(text[begin:end].decode() for begin, end in got["learnt"]))

    def test_a_run_learns_and_generates(self):
        self.with_template(chat_templates.CHATML)
        model = self.shared / "model"
        config = programs.write_config(self.shared, programs.SMALL | {"vocab_size": 4000})
        data = self.shared / "data.jsonl"
        data.write_text(json.dumps({"messages": TURNS}) + "\n" + json.dumps({"prompt": "a", "completion": "b"}) + "\n")
        flags = ["--config", config, "--jsonl", data, "--tokenizer", self.shared / "tokenizer.json", "--seq", 160,
                 "--batch", 2, "--eos-token", 1]
        programs.train([*flags, "--steps", 2, "--save-hf", model])
        for file in "tokenizer.json", "tokenizer_config.json":
            (model / file).write_bytes((self.shared / file).read_bytes())
        prompts = self.shared / "prompts.jsonl"
        prompts.write_text(json.dumps({"messages": TURNS[:1]}) + "\n")
        done = programs.succeed([programs.BIN / "llama_generate", "--model", model, "--prompts", prompts,
                                 "--max-tokens", 2, "--json"])
        self.assertEqual(json.loads(done.stdout)["prompt"],
                         "<|im_start|>user\nWhat is 2 + 2?\n<|im_end|>\n<|im_start|>assistant\n")
        (self.shared / "tokenizer_config.json").write_text("{}")
        done = programs.run([programs.BIN / "llama_train", *flags, "--steps", 1])
        self.assertIn("data.jsonl:1: the line has messages, but there is no chat template", done.stderr)
