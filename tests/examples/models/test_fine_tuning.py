"""Training of LoRA adapters, with frozen parameters, and with an average of the weights."""

import programs

STEPS, BATCH, SEQUENCE = 3, 4, 32
LORA = ["--lora-rank", 3, "--lora-alpha", 12, "--lora-dropout", 0.2, "--lora-targets",
        "model.layers.*.self_attn.*_proj,model.layers.1.mlp.down_proj"]


class FineTuning(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.base = self.folder / "base"
        self.model = programs.make_architecture(self.base, programs.MODELS["qwen3"])
        self.data = ["--model", self.base, "--tokens", self.tokens, "--batch", BATCH, "--seq", SEQUENCE,
                     "--lr", 1e-2, "--seed", 5]

    def run_on(self, name, flags, dp=1, tp=1, steps=STEPS):
        """Trains on a mesh. Returns the folder of the run, the losses, and the output."""
        run = self.folder / name
        done = programs.train([*self.data, "--steps", steps, "--metrics", run / "metrics.jsonl", *flags,
                               "--save-hf", run / "model"], dp, tp)
        return run, [step["loss"] for step in programs.read_metrics(run / "metrics.jsonl")], done.stdout

    def weights(self, path):
        import safetensors.torch
        return safetensors.torch.load_file(path)

    def assert_close(self, one, four, delta=1e-5):
        self.assertEqual(one.keys(), four.keys())
        for name, value in one.items():
            self.assertLess((value - four[name]).abs().max().item(), delta, name)

    def test_adapters_of_a_mesh_equal_one_process_and_peft(self):
        import peft
        import torch
        import transformers
        one, losses, _ = self.run_on("one", [*LORA, "--merge-lora", "--save-lora", self.folder / "one/lora"])
        four, same, text = self.run_on("four", [*LORA, "--merge-lora", "--ac", "full", "--save-lora",
                                                self.folder / "four/lora"], 2, 2)
        self.assertIn("trained: ", text)
        for a, b in zip(losses, same):
            self.assertAlmostEqual(a, b, delta=1e-4)
        self.assertLess(losses[-1], losses[0])
        adapter = self.weights(four / "lora/adapter_model.safetensors")
        self.assert_close(self.weights(one / "lora/adapter_model.safetensors"), adapter)
        self.assert_close(self.weights(one / "model/model.safetensors"),
                          self.weights(four / "model/model.safetensors"))
        self.assertGreater(adapter["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].abs().max(), 0)
        x = torch.tensor([programs.text_tokens(SEQUENCE, 256)])
        merged = transformers.AutoModelForCausalLM.from_pretrained(four / "model", dtype=torch.float32)
        with torch.no_grad():
            before = self.model(x).logits
            theirs = peft.PeftModel.from_pretrained(self.model, four / "lora").eval()(x).logits
            ours = merged.eval()(x).logits
        self.assertLess((ours - theirs).abs().max().item(), 1e-4)
        self.assertGreater((ours - before).abs().max().item(), 1e-2)

    def test_adapters_of_experts_on_any_mesh_equal_peft(self):
        import peft
        import torch
        import transformers
        tokens = torch.tensor([range(SEQUENCE)])
        for name, targets in (("mixtral", "**.experts.w[13]"), ("qwen3_moe", "**.experts.*,**.q_proj")):
            base = self.folder / name
            model = programs.make_architecture(base, programs.MODELS[name])
            flags = [*self.data, "--model", base, "--lora-rank", 3, "--lora-alpha", 12, "--lora-targets", targets]
            one, _ = programs.metrics_of(self.folder, [*flags, "--steps", 4])
            steps = ["--checkpoint", base / "steps"]
            programs.train([*flags, *steps, "--steps", 2], dp=2, ep=2)
            four, _ = programs.metrics_of(base, [*flags, *steps, "--resume", "--steps", 4, "--save-lora", base / "lora",
                                                 "--merge-lora", "--save-hf", base / "merged"], tp=2, ep=2)
            for a, b in zip(one[2:], four, strict=True):
                self.assertAlmostEqual(a["loss"], b["loss"], delta=1e-4)
                self.assertAlmostEqual(a["grad_norm"], b["grad_norm"], delta=1e-4)
            merged = transformers.AutoModelForCausalLM.from_pretrained(base / "merged", dtype=torch.float32)
            with torch.no_grad():
                before = model(tokens).logits
                theirs = peft.PeftModel.from_pretrained(model, base / "lora").eval()(tokens).logits
                ours = merged.eval()(tokens).logits
            self.assertLess((ours - theirs).abs().max().item(), 1e-4, name)
            self.assertGreater((ours - before).abs().max().item(), 1e-2, name)

    def test_adapters_continue_from_a_checkpoint(self):
        steps = self.folder / "steps"
        flags = [*LORA, "--merge-lora", "--checkpoint", steps]
        whole, losses, _ = self.run_on("whole", [*LORA, "--merge-lora"], 2, 2, steps=4)
        programs.train([*self.data, *LORA, "--steps", 2, "--checkpoint", steps], 2, 2)
        resumed, rest, _ = self.run_on("resumed", [*flags, "--resume"], 2, 2, steps=4)
        self.assertEqual(losses[2:], rest)
        self.assertEqual((whole / "model/model.safetensors").read_bytes(),
                         (resumed / "model/model.safetensors").read_bytes())
        merged = self.folder / "merged"
        programs.train([*self.data, *LORA, "--initial-load", steps / "step-00000004", "--steps", 0, "--merge-lora",
                        "--save-hf", merged])
        self.assert_close(self.weights(merged / "model.safetensors"), self.weights(whole / "model/model.safetensors"))

    def test_loading_adapters_requires_the_same_lora_flags(self):
        steps, adapted = self.folder / "steps", self.folder / "adapted"
        lora = ["--lora-rank", 2, "--lora-alpha", 4, "--ema", 0.5]
        programs.train([*self.data, "--steps", 1, "--checkpoint", steps])
        programs.train([*self.data, *lora, "--steps", 1, "--checkpoint", adapted])
        load, resume = ["--initial-load", adapted], ["--steps", 2, "--checkpoint", adapted, "--resume"]
        for flags, message in (
                (["--initial-load", steps, "--lora-rank", 2], "--lora-rank is 2 instead of left out"),
                (load, "--lora-rank is left out instead of 2; pass the checkpoint's values"),
                ([*load, *lora[:4], "--lora-targets", "**.q_proj"], '--lora-targets[0] is "**.q_proj" instead of'),
                ([*load, "--lora-rank", 2, "--ema", 0.5], "--lora-alpha is 2.0 instead of 4.0; pass the checkpoint's values"),
                ([*resume, *lora, "--lora-alpha", 16], "--lora-alpha is 16.0 instead of 4.0"),
                ([*resume, *lora, "--lora-dropout", 0.5], "--lora-dropout is 0.5 instead of 0.0"),
                ([*resume, *lora, "--freeze", "model.norm.*"], '--freeze is ["model.norm.*"] instead of left out'),
                ([*resume, *lora[:4]], "--ema is left out instead of 0.5")):
            with self.subTest(message):
                self.refuse([programs.BIN / "llama_train", *self.data, *flags], message)
        programs.train([*self.data, *load, *lora, "--lora-dropout", 0.1, "--steps", 1])
        # If the optimizer state is excluded, the average of the weights begins anew.
        programs.train([*self.data, *lora[:4], *resume, "--exclude", "optimizer"])

    def test_frozen_parameters_do_not_change(self):
        flags = ["--freeze", "model.embed_tokens.**,model.layers.0.**,**.q_norm.weight", "--optimizer", "muon",
                 "--lr", 1e-3]
        one, losses, _ = self.run_on("one", flags)
        four, same, _ = self.run_on("four", flags, 2, 2)
        for a, b in zip(losses, same):
            self.assertAlmostEqual(a, b, delta=1e-4)
        before, after = self.weights(self.base / "model.safetensors"), self.weights(four / "model/model.safetensors")
        self.assert_close(self.weights(one / "model/model.safetensors"), after, 2e-4)
        for name, value in after.items():
            frozen = "embed" in name or "layers.0." in name or "q_norm" in name
            self.assertEqual(bool((value == before[name]).all()), frozen, name)

    def test_weight_average_is_correct_after_resuming(self):
        import torch
        flags = ["--ema", 0.5, "--lr", 1e-3]
        # The expected average is computed from the weights after each step.
        average = self.weights(self.base / "model.safetensors")
        for step in range(1, STEPS + 1):
            run, _, _ = self.run_on(f"plain{step}", ["--lr", 1e-3], steps=step)
            weights = self.weights(run / "model/model.safetensors")
            average = {name: torch.lerp(value, weights[name], 0.5) for name, value in average.items()}
        steps = self.folder / "steps"
        programs.train([*self.data, *flags, "--steps", 2, "--checkpoint", steps], 2, 2)
        resumed, _, _ = self.run_on("resumed", [*flags, "--checkpoint", steps, "--resume"], 2, 2)
        self.assert_close(self.weights(resumed / "model/model.safetensors"), average, 2e-4)

    def test_unwritable_output_ends_all_ranks(self):
        """Only rank 0 checks the output folders."""
        folder = self.folder / "lora"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        done = programs.fail(programs.on_ranks(2, [programs.BIN / "llama_train", *self.data, "--dp", 2, "--steps", 1,
                                                   *LORA, "--save-lora", folder]))
        lines = [line for line in done.stderr.splitlines() if "] llama_train: " in line]
        self.assertTrue(lines)
        for line in lines:
            self.assertIn(f"{folder}", line, done.stderr)

    def test_invalid_flags_are_refused(self):
        for flags, message in ((["--freeze", "model.layer.*"], "'model.layer.*' matches none"),
                               (["--freeze", "**"], "leaves no parameter to train"),
                               (["--lora-rank", 2, "--lora-targets", "model.norm"], "'model.norm' matches no nn::Linear"),
                               (["--lora-rank", 2, "--save-hf", self.folder / "x"], "--merge-lora"),
                               (["--lora-rank", 2, "--merge-lora"], "--merge-lora is given without --save-hf")):
            with self.subTest(message):
                self.refuse([programs.BIN / "llama_train", *self.data, *flags], message)
