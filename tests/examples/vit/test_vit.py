"""Compares vit_train with PyTorch's training of the same model on all meshes, and tests resuming, exports and plans."""
import json
import shutil

import programs
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

# Sizes that the ranks do not divide: 26 tokens are 13 + 13, 7 classes 4 + 3, 27 features of the MLP 14 + 13.
SIZES = {"image_size": 15, "channels": 2, "patch_size": 3, "dim": 20, "depth": 2, "heads": 2, "mlp_dim": 27,
         "classes": 7, "dropout": 0.0}
MESHES = ((1, 1), (2, 1), (2, 2))
EVERY = 3  # steps between saves


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads, 1e-6), nn.LayerNorm(dim // heads, 1e-6)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads, mlp_dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, 1e-6), nn.LayerNorm(dim, 1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, mlp_dim), "fc2": nn.Linear(mlp_dim, dim)})

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        dim, patch = c["dim"], c["patch_size"]
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(c["channels"], dim, patch, stride=patch)})
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (c["image_size"] // patch) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim, c["heads"], c["mlp_dim"]) for _ in range(c["depth"])))
        self.norm, self.head = nn.LayerNorm(dim, 1e-6), nn.Linear(dim, c["classes"])

    def forward(self, images):
        patches = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        token = self.cls_token.expand(len(images), -1, -1)
        x = self.blocks(torch.cat([token, patches], 1) + self.pos_embed)
        return self.head(self.norm(x[:, 0]))


def stripes(c, step, batch):
    """Returns the images and labels of a step of examples/vit/vit_train.cpp."""
    images, labels = torch.empty(batch, c["channels"], c["image_size"], c["image_size"]), []
    y, x = torch.meshgrid(torch.arange(c["image_size"]), torch.arange(c["image_size"]), indexing="ij")
    for row in range(batch):
        hashed = ((step * batch + row) * 2654435761 + 12345) % 2**32
        label = hashed // 256 % c["classes"]
        for channel in range(c["channels"]):
            phase = label % 3 * y + label // 3 * x + hashed % 8 + channel
            images[row, channel] = phase % 8 / 4 - 1
        labels.append(label)
    return images, torch.tensor(labels)


def load(folder):
    """Returns an exported model in PyTorch, whose state dict must have the names and sizes of the export."""
    model = VisionTransformer(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


class VitRuns(programs.WithSharedFolder, programs.WithFolder):
    """The tests of a class share runs with equal flags."""
    @staticmethod
    def command(folder, dp, tp, batch, steps, flags, changes):
        return programs.on_ranks(dp * tp, [
            programs.BIN / "vit_train", "--config", programs.write_config(folder, SIZES | changes), "--dp", dp,
            "--tp", tp, "--batch", batch, "--steps", steps, "--lr", 0.03, *flags])

    def run_into(self, run, *flags, dp=1, tp=1, batch=5, steps=6, **changes):
        """Makes a run with all outputs in the folder `run`, which must succeed."""
        run.mkdir(exist_ok=True)
        outputs = ["--metrics", run / "metrics.jsonl", "--save-hf", run / "model", "--checkpoint", run / "steps",
                   "--checkpoint-every", EVERY]
        programs.succeed(self.command(run, dp, tp, batch, steps, [*outputs, *flags], changes))
        return run

    def run_once(self, **how):
        run = self.shared / "-".join(f"{key}{value}" for key, value in how.items())
        return run if run.exists() else self.run_into(run, **how)

    @staticmethod
    def figures(run):
        return [(record["step"], record["loss"], record["grad_norm"])
                for record in programs.read_metrics(run / "metrics.jsonl")]

    def assert_close(self, got, want, within=1e-4):
        self.assertEqual(len(got), len(want))
        for ours, theirs in zip(got, want):
            self.assertEqual(ours[0], theirs[0])
            for a, b in zip(ours[1:], theirs[1:]):
                self.assertLess(abs(a - b), within * abs(b), f"{ours} instead of {theirs}")


class Training(VitRuns):
    def train_in_torch(self, metrics, batch):
        """The model, trained from the same weights at the learning rates of the metrics, with its
        losses and norms of gradients."""
        model, figures = load(self.run_once(steps=0) / "model"), []
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
        for record in metrics:
            images, labels = stripes(SIZES, record["step"] - 1, batch)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = record["lr"]
            optimizer.step()
            figures.append((record["step"], loss.item(), norm.item()))
        return model, figures

    def test_every_mesh_equals_pytorch(self):
        for dp, tp in MESHES:
            with self.subTest(dp=dp, tp=tp):
                run = self.run_once(dp=dp, tp=tp)
                model, figures = self.train_in_torch(programs.read_metrics(run / "metrics.jsonl"), 5)
                self.assert_close(self.figures(run), figures)
                trained = load(run / "model").state_dict()
                for name, tensor in model.state_dict().items():
                    # This bias adds the same number to all scores of a query, so that its gradient is only rounding.
                    if not name.endswith("k_norm.bias"):
                        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=1e-4, msg=name)

    def test_ranks_without_images_take_part(self):
        run = self.run_once(dp=2, tp=2, batch=1)
        want = self.train_in_torch(programs.read_metrics(run / "metrics.jsonl"), 1)[1]
        self.assert_close(self.figures(run), want)

    def test_dropout_equals_one_rank(self):
        alone = self.figures(self.run_once(dropout=0.2))
        self.assert_close(self.figures(self.run_once(dp=2, tp=2, dropout=0.2)), alone)
        self.assertGreater(abs(alone[0][1] / self.figures(self.run_once(dp=1, tp=1))[0][1] - 1), 1e-3)

    def test_plan_equals_the_run(self):
        for dp, tp in MESHES[1:]:
            with self.subTest(dp=dp, tp=tp):
                run = self.run_once(dp=dp, tp=tp)
                done = programs.succeed([programs.BIN / "vit_train", "--config", run / "config.json", "--dp", dp, "--tp", tp,
                                         "--batch", 5, "--plan", "--json"])
                planned, ran = json.loads(done.stdout)["kinds"][0], programs.read_metrics(run / "metrics.jsonl")[1]
                self.assertEqual(planned["comm"], ran["comm"])
                self.assertLess(abs(planned["peak_bytes"] / ran["peak_active_bytes"] - 1), 0.05)


class Resuming(VitRuns):
    def test_resumed_run_equals_the_whole_run(self):
        run = self.run_once(dp=2, tp=2, dropout=0.1)
        for dp, tp in (2, 2), (1, 2):
            copy = self.folder / f"{dp}"  # like a run that was killed after its first save
            shutil.copytree(run / f"steps/step-0000000{EVERY}", copy / f"steps/step-0000000{EVERY}")
            shutil.copy(run / "metrics.jsonl", copy)
            self.run_into(copy, "--resume", dp=dp, tp=tp, dropout=0.1)
            self.assert_close(self.figures(copy), self.figures(run))
            same = self.figures(copy) == self.figures(run) and len(
                {(of / "model/model.safetensors").read_bytes() for of in (copy, run)}) == 1
            self.assertTrue(same or dp == 1)
        for flags, changes, part in (([], {}, "has steps of a run; pass --resume"),
                                     (["--resume"], {"dropout": 0.5}, "has another model")):
            programs.fail(self.command(self.folder, 1, 1, 5, 8, ["--checkpoint", run / "steps", *flags], changes), part)


class Planning(VitRuns):
    @staticmethod
    def plan(*flags):
        return programs.succeed(
            [programs.BIN / "vit_train", "--dp", 2, "--tp", 2, "--batch", 16, "--plan", *flags]).stdout

    def test_plan_for_a_gpu_has_times(self):
        plan = json.loads(self.plan("--gpu", "h100", "--json"))
        self.assertTrue(plan["fits"])
        self.assertEqual(set(plan["communication_s"]), {"dp", "tp", "dp_tp"})
        exposed = sum(plan["exposed_s"].values())
        self.assertTrue(0 < exposed < plan["step_time_s"], plan)
        self.assertIn("It fits: ", self.plan("--gpu", "h100"))


class Refusals(VitRuns):
    """Each refusal is one line with the file or flag, the value, and the values that are accepted."""
    def refuse_line(self, part, *arguments):
        done = programs.fail([programs.BIN / "vit_train", *arguments, "--plan"], part)
        self.assertEqual((done.stdout, done.stderr.count("\n")), ("", 1), done.stderr)

    def test_indivisible_heads(self):
        programs.fail(self.command(self.folder, 1, 2, 5, 1, [], {"heads": 5}),
                      "'blocks.0.attn.proj': rowwise_parallel: 2 ranks do not divide 5 heads")

    def test_invalid_flags(self):
        for flag, value in (("--batch", 0), ("--dp", 2**40), ("--lr", 0)):
            self.refuse_line(f"{flag}: Value {value} not in range", f"{flag}={value}")
        self.refuse_line("--gpu h201 is not known; pass a100, h100", "--gpu", "h201")
        out = self.folder / "out"
        self.refuse_line("--save-hf and --metrics are both", "--metrics", out, "--save-hf", f"{out}/")
        programs.fail([programs.BIN / "vit_train", "--resume"], "error: --resume requires --checkpoint\n")

    def test_invalid_config_files(self):
        path = self.folder / "c.json"
        texts = {'{"dim": 0}': f'{path}: "dim" is 0, but must be an integer from 1', '{"depth": 1.5}': f'{path}: "depth" is 1.5, but must be',
                 "[1]": "c.json: JSON does not begin with '{'; write an object such as {", "{nope": "line 1, column 3",
                 '{"dropout": 1}': "of at least 0, below 1", '{"head": 2}': '"head" is an unknown key',
                 '{"patch_size": 3}': '"patch_size":3', '{"heads": 3}': "heads must divide dim"}
        for text, part in texts.items():
            with self.subTest(text=text):
                path.write_text(text)
                self.refuse_line(part, "--config", path)

    def test_flags_that_differ_between_ranks(self):
        script = f'[ "$RANK" = 1 ] && batch=10; exec {programs.BIN}/vit_train --dp 2 --steps 1 --batch ${{batch:-9}}'
        programs.fail(programs.on_ranks(2, ["sh", "-c", script]),
                      "rank 1 has --batch 10, but rank 0 has --batch 9; start all ranks with the same options")
