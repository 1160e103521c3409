"""Data parallelism under each launcher, and a world of the ranks that MPI has started."""
import os
import shutil
import socket
import sysconfig
import unittest

import programs

# Open MPI refuses root, and more ranks than cores, without these options.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np"]
MPI_RANKS = programs.BIN / "mpi_ranks"


def environment():
    """One thread, because the launchers set different numbers of threads; a free port, because Open MPI sets none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}


def torchrun():
    return [os.path.join(sysconfig.get_path("scripts"), "torchrun"), "--standalone", "--no-python", "--nproc-per-node"]


class Launchers(unittest.TestCase):
    def losses(self, launcher):
        done = programs.run([*launcher, programs.BIN / "tutorial_01_data_parallel"], timeout=120, env=environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line for line in done.stdout.splitlines() if "loss" in line]

    def test_torchrun_starts_the_ranks_that_tessera_run_starts(self):
        self.assertEqual(self.losses([*torchrun(), "2"]), self.losses(programs.on_ranks(2, [])))

    @unittest.skipUnless(shutil.which("mpirun"), "Open MPI's mpirun is not installed")
    def test_mpirun_starts_the_ranks_that_tessera_run_starts(self):
        self.assertEqual(self.losses([*MPIRUN, "2"]), self.losses(programs.on_ranks(2, [])))

    @unittest.skipUnless(MPI_RANKS.exists(), "mpi_ranks was built without MPI, or not at all")
    def test_a_world_is_made_of_a_communicator(self):
        done = programs.run([*MPIRUN, "3", MPI_RANKS], timeout=120, env=environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("well", done.stdout)


if __name__ == "__main__":
    unittest.main()
