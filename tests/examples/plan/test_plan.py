"""Compares calls, bytes and peak memory of llama_plan with real runs. Bounds the bytes of memory-bound operators."""

import functools
import json
import os
import pathlib
import resource
import tempfile

import pytest

import programs

STEP = ["--batch", 24, "--seq", 16]
# A model with fewer key-value heads than tensor-parallel ranks.
FEW_HEADS = programs.ODD | {"num_key_value_heads": 2}
WINDOW = programs.SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 700,
                           "num_hidden_layers": 3, "num_key_value_heads": 2, "sliding_window": 10}
QWEN2 = programs.SMALL | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 509,
                          "hidden_size": 72, "intermediate_size": 190, "num_hidden_layers": 5, "num_key_value_heads": 1}
# The model, the mesh (dp, tp, replicas) or (dp, tp, replicas, cp), and flags.
RUNS = [
    (programs.ODD, (2, 2, 1), ["--zero", 2, "--accumulate", 2]),
    (programs.TIED, (2, 1, 2), ["--ac", "selective", "--offload", "--ema", 0.9]),
    (FEW_HEADS, (1, 4, 1), ["--no-loss-parallel", "--param-dtype", "bf16"]),
    (programs.ODD, (1, 2, 1, 2), []),
    (programs.ODD, (2, 2, 1), ["--ac", "selective", "--dropout", 0.1]),
    (programs.SMALL, (2, 1, 1), ["--fp8", "--param-dtype", "bf16"]),
    (programs.ODD, (2, 2, 1), ["--lora-rank", 4, "--lora-dropout", 0.1, "--ac", "full"]),
    (WINDOW, (2, 1, 1, 2), ["--document-mask", "--eos-token", 699]),
    (QWEN2, (2, 2, 1), ["--optimizer", "muon", "--param-dtype", "fp16", "--offload"]),
]


def evenly_routed(folder, config):
    """A Mixtral that routes token t to the experts 2 t and 2 t + 1, modulo their number. Attention and experts add 0, so that each
    layer has the embedding, a unit vector, as its input."""
    import torch
    from safetensors.torch import save_file
    folder.mkdir(exist_ok=True)
    hidden, inner, experts = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    router = torch.zeros(experts, hidden)
    for token in range(experts):
        router[2 * token % experts, token], router[(2 * token + 1) % experts, token] = 3, 2
    weights = {"model.embed_tokens.weight": torch.eye(config["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden),
               "lm_head.weight": torch.ones(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm": torch.ones(hidden), "post_attention_layernorm": torch.ones(hidden), "block_sparse_moe.gate": router.clone()}
        layer |= {f"self_attn.{name}_proj": torch.zeros(hidden, hidden) for name in "qkvo"}
        for e in range(experts):
            layer |= {f"block_sparse_moe.experts.{e}.w{n}": torch.zeros(*((hidden, inner) if n == 2 else (inner, hidden))) for n in (1, 2, 3)}
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    programs.write_config(folder, config)
    return folder


class Plan(programs.InFolder):
    def plan(self, config, arguments, dp=1, tp=1, replicas=1, cp=1, ep=1, **kwargs):
        path = programs.write_config(self.folder, config) if isinstance(config, dict) else config
        file = self.folder / "plan.json"
        programs.succeed([programs.BIN / "llama_plan", "--config", path, "--dp", dp, "--tp", tp,
                          "--cp", cp, "--dp-replicate", replicas, "--ep", ep, "--json", file, *arguments],
                         **kwargs)
        return json.loads(file.read_text())

    def train(self, config, arguments, dp, tp, replicas, cp=1):
        """Returns the metrics of the second step of a real run."""
        flags = ["--config", programs.write_config(self.folder, config), "--tokens", self.tokens, "--steps", 2, *arguments]
        return programs.metrics_of(self.folder, flags, dp, tp, replicas, cp,
                                   env=dict(os.environ, TESSERA_COUNT_MEMORY="1", OMP_NUM_THREADS="1"))[0][-1]

    def test_plan_equals_the_run(self):
        for config, mesh, flags in RUNS:
            with self.subTest(config=config, mesh=mesh, flags=flags):
                real = self.train(config, STEP + flags, *mesh)
                plan = self.plan(config, STEP + flags, *mesh)
                planned = plan["kinds"][0]
                self.assertEqual(planned["comm"], real["comm"])
                self.assertEqual(self.sums(plan["modules"]), real["comm"])
                self.assertLess(abs(planned["peak_bytes"] / real["peak_active_bytes"] - 1), 0.05)

    def test_plan_of_experts_equals_an_evenly_routed_run(self):
        for experts, (dp, tp, ep), flags in [(8, (2, 1, 2), ["--accumulate", 2]), (6, (1, 1, 4), []), (8, (2, 2, 2), ["--ac", "full"])]:
            with self.subTest(experts=experts, dp=dp, tp=tp, ep=ep):
                config = programs.MOE | {"num_local_experts": experts}
                tokens = programs.write_tokens(self.folder / "even.bin", [i % experts for i in range(5000)])
                run = ["--model", evenly_routed(self.folder / "model", config), "--tokens", tokens, "--steps", 2, "--lr", 0, *STEP, *flags]
                real = programs.metrics_of(self.folder, run, dp, tp, ep=ep,
                                           env=dict(os.environ, TESSERA_COUNT_MEMORY="1", OMP_NUM_THREADS="1"))[0][-1]
                plan = self.plan(config, STEP + flags, dp, tp, ep=ep)
                planned, said = plan["kinds"][0], plan["experts"]
                self.assertEqual(real["expert_load"], 1)
                self.assertEqual(planned["comm"], real["comm"])
                self.assertLess(abs(planned["peak_bytes"] / real["peak_active_bytes"] - 1), 0.05)
                # The features of each exchange, and the numbers of rows for each expert before them.
                forwards = 2 * (2 if "full" in flags else 1) * plan["layers"] * (2 if "--accumulate" in flags else 1)
                backwards, counts = 2 * plan["layers"] * (2 if "--accumulate" in flags else 1), -(-experts // ep) * ep * 8
                sent = planned["comm"]["ep"]["all_to_all"]
                features = (forwards + backwards) * said["all_to_all_bytes"] // 4
                self.assertEqual(sent["bytes"], features + forwards // 2 * counts)
                tokens = 24 * 16 / dp / tp / (2 if "--accumulate" in flags else 1)
                self.assertEqual((said["mean_rows"], said["largest_rows"], said["most_rows"]), (tokens * 2 / experts,) * 2 + (tokens,))
                loaded = self.plan(config, [*STEP, *flags, "--expert-load", experts / 2], dp, tp, ep=ep)
                self.assertGreater(loaded["peak_bytes"], plan["peak_bytes"])
                self.assertEqual(loaded["experts"]["largest_rows"], tokens)

    def test_flops_count_only_active_parameters(self):
        flags, config = [*STEP, "--gpu", "h100"], programs.MOE
        plan = self.plan(config, flags)
        hidden, inner, layers, head = 64, 128, 2, 256 * 64
        shared, expert = layers * (4 * hidden * hidden + 8 * hidden + 2 * hidden) + hidden + head, layers * 3 * hidden * inner
        said = plan["experts"]
        self.assertEqual((said["parameters"], said["active_parameters"]), (head + shared + 8 * expert, head + shared + 2 * expert))
        per_token = plan["tflops"] * 1e12 * plan["step_time_s"] / (24 * 16)
        self.assertAlmostEqual(per_token / (6 * (shared + 2 * expert) + 3 * layers * 4 * hidden * 16), 1)
        # On a GPU, a product of all experts is one call.
        products = {row["name"]: row for row in plan["operators"]}["aten::_grouped_mm"]
        self.assertEqual((products["calls"], products["flops"]), (9 * layers, 6 * 24 * 16 * 2 * expert))
        self.assertEqual(plan["flops"], self.plan(config, [*flags, "--device", "cpu"])["flops"])
        for config, total, active in (("mixtral-8x7b", 46702792704, 12879925248), ("qwen3-30b-a3b", 30532122624, 3353032704)):
            plan = self.plan(programs.ROOT / f"examples/llama/configs/{config}.json", [*STEP, "--gpu", "h200"], ep=8)
            self.assertEqual((plan["experts"]["parameters"], plan["experts"]["active_parameters"]), (total, active))
        dense = [programs.BIN / "llama_plan", "--config", programs.write_config(self.folder, programs.SMALL)]
        for flag in ("--ep", "--router-aux-loss", "--router-z-loss", "--expert-load"):
            self.refuse([*dense, flag, 2], flag + " is given, but the model ", "has no experts")
        # More ranks than experts: each rank has a part of each expert.
        shards = [kind["parameters_bytes"] for kind in self.plan(programs.MOE, ["--batch", 32, "--seq", 16], dp=16)["kinds"]]
        self.assertLess(max(shards), 1.1 * 4 * said["parameters"] / 16)

    @staticmethod
    def sums(modules):
        """Returns the sums of calls and bytes of all modules, in the form of metrics."""
        comm = {}
        for row in modules:
            entry = comm.setdefault(row["group"], {}).setdefault(row["collective"], {"calls": 0, "bytes": 0})
            entry["calls"] += row["calls"]
            entry["bytes"] += row["bytes"]
        return comm

    def test_collectives_are_listed_by_module(self):
        modules = self.plan(programs.ODD, STEP, tp=2)["modules"]
        layers = [row for row in modules if row["module"].startswith("model.layers.*")]
        self.assertEqual({(row["backward"], row["collective"]) for row in layers},
                         {(False, "all_gather"), (False, "reduce_scatter"), (True, "all_gather"), (True, "reduce_scatter")})

    def test_ranks_of_a_split_sequence_have_equal_flops(self):
        kinds = self.plan(programs.SMALL, [*STEP, "--gpu", "h100"], cp=4)["kinds"]
        # Kinds of ranks: the first chunk has no keys before it, and the two chunks of the last rank are adjacent.
        self.assertEqual([kind["ranks"] for kind in kinds], [1, 2, 1])
        self.assertEqual(len({kind["flops"] for kind in kinds}), 1)
        self.assertEqual(len({kind["parameters_bytes"] for kind in kinds}), 1)

    def test_split_sequences_make_no_masks(self):
        """Activations grow with the tokens, not with their square: twice the tokens on twice the ranks are
        as many on each, and keys and values of all of them."""
        width = programs.SMALL["hidden_size"]
        peaks = [self.plan(programs.SMALL, ["--batch", 1, "--seq", seq, "--zero", 2], cp=cp)["kinds"][0]["activations_bytes"]
                 for seq, cp in ((8192, 4), (16384, 8))]
        gathered = programs.SMALL["num_hidden_layers"] * 2 * 4 * 8192 * width
        self.assertLess(peaks[1] - peaks[0], 3 * gathered)

    def test_plan_of_405b_takes_seconds_and_little_memory(self):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        plan = self.plan(programs.ROOT / "examples/llama/configs/llama3.1-405b.json",
                         ["--batch", 512, "--seq", 8192, "--ac", "full", "--gpu", "h200"], dp=64, tp=8)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.assertEqual(plan["ranks"], 512)
        self.assertLess(after.ru_utime - before.ru_utime, 10)
        self.assertLess(after.ru_maxrss << 10, 2e9)

    def machine(self, **numbers):
        """Writes the file of a machine on which only what `numbers` say takes time."""
        fast = dict(memory_bytes=1e15, flops_half=1e30, flops_fp32=1e30, memory_bandwidth=1e30, link_bandwidth=1e30,
                    network_bandwidth=1e30, product_share=1, attention_share=1, attention_share_64=1, memory_share=1,
                    network_share=1, operator_latency_s=0, link_latency_s=0, network_latency_s=0, reserved_bytes=0) | numbers
        file = pathlib.Path(self.folder, "machine.toml")
        file.write_text('name = "m"\n' + "".join(f"{key} = {value:.6e}\n" if isinstance(value, float) else
                                                 f"{key} = {value}\n" for key, value in fast.items()))
        return file

    def test_frozen_weights_have_no_gradient(self):
        # A plan's tflops are of a rank; times the time of a step, they are the same on any machine.
        def per_token(config, *flags):
            plan = self.plan(config, [*STEP, *flags, "--gpu", "h100"])
            return plan["tflops"] * 1e12 * plan["step_time_s"] / (24 * 16)
        config = programs.SMALL
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"] + config["num_key_value_heads"]
        head_dim = hidden // config["num_attention_heads"]
        layer = 2 * hidden * heads * head_dim + 3 * hidden * inner + 2 * hidden
        layers, head = config["num_hidden_layers"], config["vocab_size"] * hidden
        scores = 4 * hidden * 16
        self.assertAlmostEqual(per_token(config) / (6 * (layers * layer + hidden + head) + 3 * layers * scores), 1)
        only_head = 2 * (layers * layer + hidden) + 4 * head + layers * scores
        self.assertAlmostEqual(per_token(config, "--freeze", "model.**") / only_head, 1)
        last = 2 * (layers - 1) * layer + 6 * layer + 4 * (hidden + head) + (layers + 2) * scores
        others = ["model.embed_tokens.**", "model.norm.**", "lm_head.**"]
        freeze = ",".join([f"model.layers.{i}.**" for i in range(layers - 1)] + others)
        self.assertAlmostEqual(per_token(config, "--freeze", freeze) / last, 1)

    def test_communication_time_follows_the_bytes(self):
        """Times are those of a ring's bytes, also if they are hidden. The few bytes of the hosts' agreement are not counted."""
        plan = self.plan(programs.SMALL, [*STEP, "--gpu", self.machine(link_bandwidth=1e9, network_share=0.5)],
                         dp=2, tp=4)
        for group, ranks in (("dp", 2), ("tp", 4)):
            seconds = 0
            for kind, sent in plan["comm"][group].items():
                share = {"all_gather": ranks - 1, "all_reduce": 2 * (ranks - 1) / ranks,
                         "reduce_scatter": (ranks - 1) / ranks}[kind]
                seconds += share * sent["bytes"] / 0.5e9
            self.assertAlmostEqual(plan["communication_s"][group], seconds, delta=0.01 * seconds)
            self.assertLessEqual(plan["exposed_s"][group], plan["communication_s"][group])
        # Nothing else takes time.
        self.assertAlmostEqual(plan["step_time_s"], sum(plan["exposed_s"].values()), delta=1e-9)

    def test_bad_machines_are_one_line(self):
        file = pathlib.Path(self.folder, "machine.toml")
        path = programs.write_config(self.folder, programs.SMALL)
        for text, message in [('like = "h200"\nmemory_byte = 1', 'did you mean memory_bytes?'),
                              ('name = "x"', '"memory_bytes" is missing'),
                              ('like = "h200"\nranks_per_node = 0', '"ranks_per_node" must be a whole number from 1 to'),
                              ('like = "h200"\noperator_latency_s = inf', '"operator_latency_s" must be a finite number'),
                              ('like = "h200"\nproduct_share = 70', "write 0.7 for 70 %"),
                              ('like = "h200"\nmemory_bytes = 1e30', "write at most 1e+18"),
                              ('like = "h200"\nmemory_bytes = 1e9', "leaves no memory for tensors"),
                              ('like = ', "machine.toml: "),
                              ('like = "h201"', 'like = "h201" is not a known machine')]:
            file.write_text(text)
            self.refuse([programs.BIN / "llama_plan", "--config", path, "--gpu", file], message)
        self.refuse([programs.BIN / "llama_plan", "--config", path, "--gpu", "h201"], "--gpu h201 is not known")
        done = programs.run([programs.BIN / "llama_plan", "--config", path, "--gpu", self.folder / "no.toml"])
        self.assertRegex(done.stderr, r"^llama_plan: can't read --gpu .*no\.toml: .*\n$")


LLAMA_1B = programs.ROOT / "examples/llama/configs/llama3.2-1b.json"
HIDDEN = 2048
# Bytes a token and layer in bf16, forward and backward, as multiples of the hidden size: what they are, and a little room. A
# change that needs more says why; one that needs less lowers them.
MOST = {"--ac none": 128, "--ac full": 153}


def is_memory_bound(row):
    return row["flops"] == 0 and "attention" not in row["name"]


@functools.cache
def bytes_of_step(layers, batch, flags):
    """Returns the bytes of a step by operator, without products and attention."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        config = json.loads(LLAMA_1B.read_text()) | {"num_hidden_layers": layers}
        file = folder / "plan.json"
        programs.succeed([programs.BIN / "llama_plan", "--config", programs.write_config(folder, config), "--gpu", "h200",
                          "--batch", batch, "--seq", 2048, *flags.split(), "--json", file])
        rows = json.loads(file.read_text())["operators"]
    return {row["name"]: row["bytes"] for row in rows if is_memory_bound(row)}


def difference(more, less):
    return {name: more.get(name, 0) - less.get(name, 0) for name in more.keys() | less.keys()}


def of_a_layer_and_token(flags):
    """Returns the bytes of a layer and token by operator, divided by the hidden size, without the bytes of parameters."""
    of_layers = [difference(bytes_of_step(6, batch, flags), bytes_of_step(4, batch, flags)) for batch in (2, 1)]
    counts = difference(*of_layers)
    return {name: count / 2 / 2048 / HIDDEN for name, count in counts.items() if count > 0}


@pytest.mark.parametrize("flags", MOST)
def test_layer_moves_few_bytes(flags):
    counts = of_a_layer_and_token(flags)
    table = "\n".join(f"{count:8.1f} {name}" for name, count in sorted(counts.items(), key=lambda row: -row[1]))
    print(table)
    assert 0 < sum(counts.values()) <= MOST[flags], f"{sum(counts.values()):.1f} H:\n{table}"


# The smallest MFU, in percent, that the plan of a configuration may predict.
PREDICTED = [("llama3.1-8b.json", "h100", 8, 57), ("llama3.2-1b.json", "h200", 1, 57)]


@pytest.mark.parametrize("config, gpu, dp, least", PREDICTED)
def test_predicted_mfu_does_not_fall(config, gpu, dp, least):
    with tempfile.TemporaryDirectory() as name:
        file = pathlib.Path(name, "plan.json")
        done = programs.succeed([programs.BIN / "llama_plan", "--config", LLAMA_1B.with_name(config), "--gpu", gpu, "--dp", dp,
                                 "--batch", 8, "--seq", 8192, "--ac", "selective", "--json", file])
        assert json.loads(file.read_text())["mfu"] >= least
    assert f"Predicted, not measured. A {gpu}: products at 76 %" in done.stdout
    assert "measured on: one H200, libtorch 2.11" in done.stdout
