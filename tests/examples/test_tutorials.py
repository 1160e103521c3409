"""Every tutorial runs, alone and on four ranks."""
import unittest

import programs


class Tutorials(unittest.TestCase):
    def run_tutorial(self, name):
        program = programs.BIN / f"tutorial_{name}"
        for command in ([program], [programs.BIN / "tessera-run", "--nproc", 4, "--", program]):
            with self.subTest(ranks=4 if len(command) > 1 else 1):
                done = programs.run(command, timeout=120)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue(done.stdout)
                yield done.stdout

    def test_mesh(self):
        alone, four = self.run_tutorial("01_mesh")
        self.assertIn("row sum 0", alone)
        self.assertIn("(dp=2, tp=2)", four)

    def test_distributed_tensor(self):
        _, four = self.run_tutorial("02_distributed_tensor")
        self.assertIn("[Partial(sum)] -> [Shard(0)]", four)

    def test_train_2d_learns(self):
        for output in self.run_tutorial("03_train_2d"):
            losses = [float(line.split()[-1]) for line in output.splitlines()]
            self.assertEqual(len(losses), 20)
            self.assertLess(losses[-1], losses[0])


if __name__ == "__main__":
    unittest.main()
