"""What a mesh sends in a step, by llama_train's own metrics, against the formulas of ZeRO-2, ZeRO-3 and HSDP. --verify: before
the first step, a mesh is compared with one rank."""
import json
import re

import programs

FP32 = 4


def pieces(size, parts):
    """Returns the rows of the largest piece if `size` rows are split over `parts` ranks, to which other pieces are padded."""
    return -(-size // parts)


def unit_shapes(config, tp):
    """Returns the shapes of rank 0's tensor-parallel parameters: of a block, and of embedding, final norm and head."""
    c, heads = config, config["num_attention_heads"]
    head = c.get("head_dim", c["hidden_size"] // heads)
    hidden, inner = c["hidden_size"], pieces(c["intermediate_size"], tp)
    q, kv = heads * head // tp, c["num_key_value_heads"] * head // tp
    block = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (inner, hidden), (inner, hidden),
             (hidden, inner), (hidden,), (hidden,)]
    vocabulary = pieces(c["vocab_size"], tp)
    return block, [(vocabulary, hidden), (vocabulary, hidden), (hidden,)]


def shard(shapes, dp):
    """Returns the elements of a rank's shard of a unit with parameters of these shapes."""
    return sum(pieces(rows, dp) * (rest[0] if rest else 1) for rows, *rest in shapes)


def packed(shapes, dp):
    """Returns the elements of the shard in a flat buffer, where each parameter begins at a multiple of 64 bytes."""
    return sum(pieces(shard([shape], dp), 64 // FP32) * 64 // FP32 for shape in shapes)


def reduced(shapes, dp):
    """Returns the elements of a rank's part of a unit's reduce-scatter, which is in place if dp divides all rows."""
    return (packed if any(rows % dp for rows, *_ in shapes) else shard)(shapes, dp)


class Communication(programs.InFolder):
    def check(self, config, dp, tp, replicas=1, zero=3, accumulate=1, ac="none", more=()):
        (first, second), said = programs.metrics_of(self.folder, [
            "--config", programs.write_config(self.folder, config), "--tokens", self.tokens, "--steps", 2, "--batch", 24, "--seq", 16,
            "--zero", zero, "--accumulate", accumulate, "--ac", ac, "--verify", *more], dp, tp, replicas)
        self.assertLess(float(re.search(EQUAL, said)[1]), 1e-5)
        self.assertEqual(first["comm"], second["comm"])
        comm, layers = second["comm"], config["num_hidden_layers"]
        shapes = unit_shapes(config, tp)
        block, root = (shard(each, dp) for each in shapes)
        # ZeRO-3 gathers all blocks but the last one twice.
        twice = layers - 1 if zero == 3 else 0
        # ZeRO-2 gathers and reduces once a step, ZeRO-3 once a micro-batch.
        rounds = accumulate if zero == 3 else 1
        # The units are the blocks, the embedding, and the final norm with the head.
        calls, elements = layers + 2, layers * block + root
        reductions, flat = (layers * size(shapes[0], dp) + size(shapes[1], dp) for size in (reduced, packed))
        if dp > 1:
            self.assertEqual(comm["dp"]["all_gather"],
                             {"calls": rounds * (calls + twice),
                              "bytes": rounds * FP32 * (elements + twice * block)})
            self.assertEqual(comm["dp"]["reduce_scatter"],
                             {"calls": rounds * calls, "bytes": rounds * FP32 * dp * reductions})
        if replicas > 1:
            self.assertEqual(comm["dp_replicate"], {"all_reduce": {
                "calls": rounds * calls, "bytes": rounds * FP32 * flat}})
        if tp > 1:
            self.check_tensor_parallel(comm["tp"], layers, accumulate, ac == "full",
                                       "--no-sp-regather" in more)

    def check_tensor_parallel(self, comm, layers, accumulate, recomputed, keeps):
        # Each half of a block gathers and scatters once forward and once backward; so do the
        # embedding and the head between them. The halves' inputs and the head's are gathered again
        # in backward, unless they are kept. The recomputation of a block gathers the halves' inputs,
        # and stops before the block's last reduce-scatter.
        gathers, scatters, others = (6, 5, 3) if recomputed else (4, 4, 2) if keeps else (6, 4, 3)
        self.assertEqual(comm["all_gather"]["calls"], accumulate * (gathers * layers + others))
        self.assertEqual(comm["reduce_scatter"]["calls"], accumulate * (scatters * layers + 2))

    def test_every_kind_of_fsdp_equals_one_rank(self):
        """Each kind of FSDP, with what it combines with; --verify finds each equal to one rank."""
        for config, mesh, options in (
                (programs.SMALL, (4, 1), {"accumulate": 3}),
                (programs.ODD, (2, 2), {}),
                (programs.ODD, (2, 1, 2), {"accumulate": 2}),
                (programs.SMALL, (2, 2), {"zero": 2, "accumulate": 3}),
                (programs.SMALL, (2, 2), {"ac": "full"}),
                (programs.SMALL, (1, 2), {"more": ["--no-sp-regather"]})):
            with self.subTest(mesh=mesh, options=options):
                self.check(config, *mesh, **options)


EQUAL = r"verify: 29 modules and 21 parameters equal one rank's \(largest difference (\S+) of the largest value\)"
ADAPTERS = "verify: 57 modules and 28 parameters equal"  # only adapters are compared if only adapters are trained
LOSS = "verify: the loss and 21 parameters equal one rank's"


class Verify(programs.InFolder):
    def setUp(self):
        super().setUp()
        text = programs.write(self.folder / "text", "A mesh computes what one rank does.\n" * 200)
        self.flags = ["--config", self.config, "--text", text, "--steps", 2, "--batch", 4, "--seq", 32]

    def test_verify_accepts_every_mesh(self):
        few = programs.write(self.folder / "few.json", json.dumps(programs.SMALL | {"num_key_value_heads": 2}))
        documents = ["--document-mask", "--eos-token", 10]
        for mesh, flags, said in (
                ({"replicas": 2, "tp": 2}, ["--ac", "selective", "--no-sp", "--no-loss-parallel", *documents], EQUAL),
                ({"dp": 2, "tp": 2}, ["--param-dtype", "bf16", "--reduce-dtype", "bf16"], EQUAL),
                ({"dp": 2}, ["--param-dtype", "fp16"], EQUAL),
                # Several ranks compute one head.
                ({"tp": 4}, ["--config", few, "--lora-rank", 2, "--lora-dropout", 0.1], ADAPTERS),
                ({"ep": 2}, ["--config", programs.ROOT / "examples/llama/configs/tiny-moe.json", "--dropout", 0.1],
                 "verify: 25 modules and 23 parameters equal"),
                ({"cp": 2, "tp": 2}, [], LOSS),
                ({"cp": 2, "dp": 2}, documents, "outputs are not compared")):
            with self.subTest(mesh=mesh, flags=flags):
                self.assertRegex(programs.train([*self.flags, "--verify", *flags], **mesh).stdout, said)

    def test_verify_names_an_unsummed_gradient(self):
        done = programs.fail(programs.on_ranks(2, [programs.BIN / "llama_unsummed_norm", "--tp", 2, *self.flags, "--verify"]))
        errors = [line for line in done.stderr.splitlines() if "verify: " in line]
        self.assertIn(len(errors), (1, 2), done.stderr)  # the launcher may end the other rank before it prints its line
        self.assertRegex(errors[0], r"\[rank \d\] llama_unsummed_norm: verify: the gradient of parameter "
                                    r"'model\.norm\.weight', \[64\] on \(dp=1, tp=2\) as .* differs from .*: "
                                    r"at \[.*; all outputs, .*are equal, so look at what computes this gradient")
        self.assertNotIn("step:", done.stdout)
