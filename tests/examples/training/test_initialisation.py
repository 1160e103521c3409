"""The same seed gives the same bytes on every mesh."""
import hashlib
import unittest

import programs

MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (3, 1)]
# Changes only with the generator, its transforms, the initialisers or the names of parameters:
# then everybody's runs change, so do it knowingly.
GOLDEN = "826585b8668fe5ae88972c7f55aacb5d04d31a4707a652485e2490d0f5963438"


class Initialisation(programs.InFolder):
    def exported_bytes(self, dp, tp, seed=1, flags=()):
        config = programs.write_config(self.folder, programs.ODD | {"num_hidden_layers": 1})
        out = self.folder / f"{dp}x{tp}-{seed}"
        programs.train(["--config", config, "--seed", seed, "--steps", 0, "--batch", 12,
                        "--save-hf", out, *flags], dp, tp)
        return (out / "model.safetensors").read_bytes()

    def test_is_byte_equal_on_every_mesh_and_has_the_golden_hash(self):
        for dp, tp in MESHES:
            with self.subTest(dp=dp, tp=tp):
                digest = hashlib.sha256(self.exported_bytes(dp, tp)).hexdigest()
                self.assertEqual(digest, GOLDEN)

    def test_depends_on_the_seed(self):
        self.assertNotEqual(self.exported_bytes(1, 1, seed=1), self.exported_bytes(1, 1, seed=2))
