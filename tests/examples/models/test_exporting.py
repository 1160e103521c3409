"""The program of docs/programs/exporting.md that exports a model with torch.export."""
import re
import sys
import unittest

import programs
import torch
import transformers

PAGE = programs.ROOT / "docs/programs/exporting.md"


class TorchExport(programs.InFolder):
    def test_the_exported_program_computes_the_logits_of_transformers(self):
        config = programs.write_config(self.folder, programs.SMALL | {"num_key_value_heads": 2})
        programs.train(["--config", config, "--tokens", self.tokens, "--seq", 32, "--batch", 4, "--steps", 2,
                        "--save-hf", self.folder / "run/model"], dp=2, tp=2)
        code = re.search(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text())[1]
        programs.succeed([sys.executable, "-c", code], cwd=self.folder)
        exported = torch.export.load(self.folder / "run/exported.pt2").module()
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "run/model", dtype=torch.float32)
        # Sizes other than those of the export.
        tokens = torch.tensor(programs.text_tokens(3 * 29, 256)).view(3, 29)
        with torch.no_grad():
            torch.testing.assert_close(exported(tokens), model(tokens).logits)


if __name__ == "__main__":
    unittest.main()
