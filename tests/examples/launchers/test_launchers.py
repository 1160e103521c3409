"""Data parallelism under each launcher, and a world of the ranks that MPI has started. The batch script for Slurm, run by
stand-ins for sbatch and srun that start real tasks. The flags in the manifests for Kubernetes."""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import unittest

import yaml

import programs

SCRIPT = programs.ROOT / "examples" / "launch" / "llama_train.sbatch"
# Long options of sbatch(1) that a script may have.
SBATCH = {"job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output",
          "open-mode", "requeue", "signal", "mem", "account", "partition", "exclusive"}
# A stand-in for srun that runs the tasks of all nodes on this host. It refuses options that srun(1) lacks.
SRUN = '''#!{python}
import argparse, os, subprocess, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)
for option in ("--kill-on-bad-exit", "--wait", "--cpus-per-task", "--ntasks-per-node", "--nodes"):
    parser.add_argument(option)
parser.add_argument("command", nargs=argparse.REMAINDER)
arguments = parser.parse_args()
nodes = int(os.environ["SLURM_NNODES"])
each = int(arguments.ntasks_per_node or os.environ["SLURM_NTASKS_PER_NODE"])
count = nodes * each
tasks = [subprocess.Popen(arguments.command, env=os.environ | {{
    "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each), "SLURM_NODEID": str(rank // each),
    "SLURM_STEP_NUM_TASKS": str(count), "SLURM_NTASKS": str(count), "SLURM_STEP_NUM_NODES": str(nodes),
    "SLURM_STEP_ID": "0", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}}) for rank in range(count)]
while any(task.poll() is None for task in tasks):
    if arguments.kill_on_bad_exit == "1" and any(task.returncode for task in tasks):
        for task in tasks:
            task.terminate()
    time.sleep(0.01)
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
'''
SCONTROL = '''#!/bin/sh
echo "$@" >> "$SCONTROL_CALLS"
'''


def directives():
    """Returns the #SBATCH options of the script, which sbatch reads up to the first command."""
    found = {}
    for line in SCRIPT.read_text().splitlines()[1:]:
        if line.startswith("#SBATCH"):
            name, _, value = re.fullmatch(r"#SBATCH --([a-z-]+)(=(\S+))?", line).groups()
            found[name] = (value or "").removeprefix("=")
        elif line and not line.startswith("#"):
            break
    return found


def make_program(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class TestSbatch(programs.InFolder):
    def setUp(self):
        super().setUp()
        self.place = self.folder / "slurm"
        self.place.mkdir()
        make_program(self.place / "srun", SRUN.format(python=sys.executable))
        make_program(self.place / "scontrol", SCONTROL)

    def sbatch(self, *arguments, **variables):
        """Runs a copy of the script as sbatch does, with the variables of an allocation. The allocation has two nodes of
        one task each."""
        copy = self.folder / "slurm_script"
        copy.write_bytes(SCRIPT.read_bytes())
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment |= {"PATH": f"{self.place}:{environment['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2",
                        "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "1",
                        "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
                        "SLURM_SUBMIT_DIR": str(self.folder), "TESSERA_BIN": str(programs.BIN),
                        "SCONTROL_CALLS": str(self.folder / "scontrol")} | variables
        return subprocess.run(["bash", copy, *map(str, arguments)], env=environment, cwd="/", capture_output=True,
                              text=True, timeout=300)

    def train(self, *arguments, **variables):
        return self.sbatch("--config", self.config, "--tokens", "t.bin", "--batch", 2, "--seq", 16, "--dp", 2, *arguments,
                           **variables)

    def test_directives_are_known_to_sbatch(self):
        found = directives()
        self.assertEqual(set(found) - SBATCH, set())
        self.assertEqual((found["nodes"], found["ntasks-per-node"], found["signal"]), ("2", "8", "USR1@300"))

    def test_job_is_requeued_at_its_time_limit(self):
        # Each task gets the signal that Slurm sends when the time is over.
        make_program(self.place / "llama_train", '#!/bin/sh\n(until [ -s first.jsonl ]; do sleep 0.1; done; kill -USR1 $$) &\n'
                     f'exec {programs.BIN}/llama_train "$@"\n')
        done = self.train("--steps", 100000, "--checkpoint", "steps", "--resume", "auto", "--metrics", "first.jsonl",
                          TESSERA_BIN=str(self.place))
        self.assertEqual(done.returncode, 75, done.stderr)
        self.assertEqual((self.folder / "scontrol").read_text(), f"requeue {os.getpid()}\n")
        saved = max(int(re.search(r"\d+", path.name)[0]) for path in (self.folder / "steps").glob("*step*"))
        again = self.train("--steps", saved + 1, "--checkpoint", "steps", "--resume", "auto", "--metrics", "again.jsonl")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual([step["step"] for step in programs.read_metrics(self.folder / "again.jsonl")], [saved + 1])

    def test_a_failed_run_fails_the_job(self):
        done = self.train("--steps", 1, "--lr", "x")
        self.assertNotIn(done.returncode, (0, 75))
        self.assertIn("--lr", done.stderr)
        self.assertFalse((self.folder / "scontrol").exists())


class TestManifests(programs.InFolder):
    def test_manifests_use_valid_llama_train_flags(self):
        programs.train(["--config", self.config, "--steps", 0, "--save-hf", self.folder / "Llama-3.2-1B"])
        (self.folder / "book.txt").write_text("It was the best of times. " * 200)
        for name in ("train_job.yaml", "pytorch_job.yaml"):
            with self.subTest(name):
                spec = yaml.safe_load((SCRIPT.parent / name).read_text())["spec"]
                container = spec["trainer"] if "trainer" in spec else (
                    spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0])
                words = container["args"]
                flags = [word.replace("/data", str(self.folder)) for word in words[words.index("llama_train") + 1:]]
                self.assertIn("16", programs.succeed([programs.BIN / "llama_plan", *flags, "--gpu", "h100"]).stdout)


# Open MPI refuses root, and more ranks than cores, without these options.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np"]
MPI_RANKS = programs.BIN / "mpi_ranks"


def environment():
    """Returns variables with one thread, since launchers set different numbers, and a free port, since Open MPI sets none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}


def torchrun():
    return [os.path.join(sysconfig.get_path("scripts"), "torchrun"), "--standalone", "--no-python", "--nproc-per-node"]


class Launchers(unittest.TestCase):
    def losses(self, launcher):
        done = programs.succeed([*launcher, programs.BIN / "tutorial_01_data_parallel"], timeout=120, env=environment())
        return [line for line in done.stdout.splitlines() if "loss" in line]

    def test_torchrun_equals_tessera_run(self):
        self.assertEqual(self.losses([*torchrun(), "2"]), self.losses(programs.on_ranks(2, [])))

    @unittest.skipUnless(shutil.which("mpirun"), "Open MPI's mpirun is not installed")
    def test_mpirun_equals_tessera_run(self):
        self.assertEqual(self.losses([*MPIRUN, "2"]), self.losses(programs.on_ranks(2, [])))

    @unittest.skipUnless(MPI_RANKS.exists(), "mpi_ranks was built without MPI, or not at all")
    def test_mpi_communicator_becomes_a_world(self):
        self.assertIn("well", programs.succeed([*MPIRUN, "3", MPI_RANKS], timeout=120, env=environment()).stdout)
