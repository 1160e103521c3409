"""Models that transformers has written: their logits, and a training of them."""
import programs

SEQUENCE = 3 * programs.POSITIONS


def loss_of(model, rows, x):
    import torch
    out = model(x[:-1].view(rows, SEQUENCE))
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), x[1:])
    balance = out.get("aux_loss")  # of a model with experts and output_router_logits
    return loss if balance is None else loss + model.config.router_aux_loss_coef * balance


def losses_of_training(model, rows, x, steps, lr):
    """The loss of each step, on the same batch, and after the last step; with llama_train's defaults."""
    import torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, rows, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, loss_of(model, rows, x).item()]


class Architectures(programs.InFolder):
    def each(self, names=programs.MODELS):
        for name in names:
            with self.subTest(name):
                folder = self.folder / name
                yield name, folder, programs.make_architecture(folder, programs.MODELS[name])

    def test_logits_match_transformers(self):
        import torch
        tokens = programs.text_tokens(SEQUENCE, 256)
        for name, folder, model in self.each():
            out = self.folder / "logits"
            programs.succeed([programs.BIN / "llama_logits", folder, out, *tokens])
            ours = torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32)
            with torch.no_grad():
                theirs = model(torch.tensor([tokens])).logits[0]
            difference = (ours.view_as(theirs) - theirs).abs().max().item()
            self.assertLess(difference, 1e-4, name)
            self.assertGreater(theirs.abs().max().item(), 1, name)

    def test_training_on_2x2_matches_transformers_and_exports(self):
        import torch
        import transformers
        rows, steps = 4, 5
        x = torch.tensor(programs.text_tokens(rows * SEQUENCE + 1, 256))
        tokens = programs.write_tokens(self.folder / "few.bin", x.tolist())
        metrics = self.folder / "metrics.jsonl"
        # The scalings of positions differ in the logits alone.
        names = ("llama2_with_biases", "llama3", "mistral_with_window", "qwen2", "qwen3", *programs.WITH_EXPERTS)
        for number, (name, folder, model) in enumerate(self.each(names)):
            # With a larger step, rounding can change a router's choice between two nearly equal experts.
            lr = 3e-4 if name in programs.WITH_EXPERTS else 1e-3
            theirs = losses_of_training(model, rows, x, steps, lr)
            for mesh in ({"tp": 2}, {"ep": 2})[:2 if name in programs.WITH_EXPERTS else 1]:
                export = self.folder / f"{name}-{''.join(mesh)}"
                programs.train(["--model", folder, "--tokens", tokens, "--batch", rows, "--seq", SEQUENCE, "--lr", lr,
                                "--steps", steps, "--metrics", metrics, "--save-hf", export,
                                "--ac", ("none", "full", "selective")[number % 3]], 2, **mesh)
                ours = [step["loss"] for step in programs.read_metrics(metrics)]
                exported = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
                with torch.no_grad():
                    ours.append(loss_of(exported, rows, x).item())
                for mine, expected in zip(ours, theirs, strict=True):
                    self.assertAlmostEqual(mine, expected, delta=1e-4 * expected, msg=(name, mesh))
                self.assertLess(ours[-1], 0.9 * ours[0], name)
