"""tessera-run with torchrun's command lines: what Python's torchrun makes of one is what is started."""
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import programs
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

PRINT = ["sh", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $TESSERA_JOB_TOKEN '
         '$0 $@"', "program", "--nnodes", "a b", "--", "-m"]
# Arguments, PET_ variables. Ports are given, or nobody but the launcher knows them.
LINES = [
    ([], {}),
    (["--nproc-per-node", "2"], {}),
    (["--nproc_per_node=2", "--no_python"], {}),
    (["--nproc-per-node", "cpu"], {}),
    (["--nnodes=1:1", "--nproc-per-node=2", "--max-restarts", "0"], {}),
    (["--nnodes", "2", "--node-rank", "1", "--master-addr", "node0", "--master-port", "4711"], {}),
    (["--nnodes", "2", "--node_rank=1", "--nproc-per-node", "2", "--master_addr", "[::2]"], {}),
    (["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:4711", "--rdzv-id", "job"], {}),
    (["--nnodes", "2", "--node-rank", "1", "--rdzv_endpoint", "node0:4711", "--master-port", "1"], {}),
    (["--nnodes=2", "--node-rank=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node0", "--rdzv-id=7"], {}),
    (["--nnodes=2", "--node-rank=1", "--rdzv-backend=c10d", "--rdzv-endpoint=[::2]:47"], {}),
    ([], {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0",
          "PET_MASTER_PORT": "4711"}),
    (["--nproc-per-node", "1", "--master-port", "3"],
     {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0",
      "PET_MASTER_PORT": "4711"}),
    (["--master-addr", "node1"], {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_RDZV_ENDPOINT": "node0:4711"}),
    ([], {"PET_NNODES": "2:2", "PET_NODE_RANK": "1", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "node0:4711",
          "PET_RDZV_ID": "job", "PET_MONITOR_INTERVAL": "5", "PET_START_METHOD": "spawn"}),
]


def clean(variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return environment | variables


def by_torchrun(arguments, variables):
    """The lines that torchrun's ranks of this node would print, from what it makes of the command line."""
    # Without a Python's own -u and -m a program is started as it is.
    with mock.patch.dict(os.environ, clean(variables), clear=True), contextlib.redirect_stderr(None), \
            mock.patch.object(torchrun, "elastic_launch") as launch:
        args = torchrun.parse_args(["--no-python", *arguments, *PRINT])
        torchrun.run(args)
    config, command = launch.call_args.kwargs["config"], launch.call_args.kwargs["entrypoint"]
    rest = launch.return_value.call_args.args
    world = config.max_nodes * config.nproc_per_node
    is_c10d = config.rdzv_backend == "c10d"
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, 29400 if is_c10d else -1)
    token = "" if config.run_id == "none" else config.run_id
    words = " ".join(rest[2:])
    assert command == "sh" and config.min_nodes == config.max_nodes, config
    first = args.node_rank * config.nproc_per_node
    place = f"{host} {port} {token} " if config.max_nodes > 1 else ""
    return sorted(f"{first + i} {i} {world} {config.nproc_per_node} {place}{words}"
                  for i in range(config.nproc_per_node))


def by_tessera_run(arguments, variables):
    done = subprocess.run([programs.BIN / "tessera-run", *arguments, *PRINT], capture_output=True, text=True,
                          env=clean(variables), timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] if line.startswith("[rank") else line for line in done.stdout.splitlines()]
    if int(lines[0].split()[2]) > int(lines[0].split()[3]):
        return sorted(lines)
    # On one node torchrun's port is fixed; here the system chooses it.
    return sorted(" ".join(words[:4] + words[7:]) for words in (line.split(" ") for line in lines))


class TestCommandLines(unittest.TestCase):
    def test_starts_what_torchrun_would_start(self):
        for arguments, variables in LINES:
            with self.subTest(arguments=arguments, variables=variables):
                self.assertEqual(by_tessera_run(arguments, variables), by_torchrun(arguments, variables))

    def test_knows_every_option_of_torchrun(self):
        """Taken, or refused in a line that says what to do: never an unknown one."""
        taken = {"--nnodes": "1", "--nproc-per-node": "1", "--rdzv-backend": "static", "--rdzv-endpoint": "127.0.0.1:0",
                 "--rdzv-id": "x", "--standalone": None, "--max-restarts": "0", "--monitor-interval": "1",
                 "--start-method": "spawn", "--no-python": None, "--log-dir": None, "--redirects": "0", "--tee": "0",
                 "--local-ranks-filter": "0", "--node-rank": "0", "--master-addr": "127.0.0.1", "--master-port": "0",
                 "--shutdown-timeout": "5"}
        for action in torchrun.get_args_parser()._actions:
            if not action.option_strings or "--help" in action.option_strings:
                continue
            name = max((text for text in action.option_strings if "_" not in text), key=len)
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                value = folder if name == "--log-dir" else taken.get(name, "x")
                for form in action.option_strings:
                    words = [form] if action.nargs == 0 else [form, value]
                    done = subprocess.run([programs.BIN / "tessera-run", *words, "true"], capture_output=True,
                                          text=True, env=clean({}), timeout=60)
                    if name in taken:
                        self.assertEqual(done.returncode, 0, done.stderr)
                    else:
                        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
                        self.assertIn("is torchrun's alone; ", done.stderr)

    def test_writes_the_files_that_torchrun_writes(self):
        script = "echo out $LOCAL_RANK; echo err $LOCAL_RANK >&2"
        # Newer ones choose an id by themselves where there is no port.
        arguments = ["--nproc-per-node", "2", "--redirects", "0:3,1:2", "--tee", "1:1", "--rdzv-id", "run",
                     "--master-port", "0"]

        def files(launcher):
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([*launcher, "--log-dir", folder, *arguments, "sh", "-c", script], check=True,
                               capture_output=True, env=clean({}), timeout=120)
                job, = pathlib.Path(folder).iterdir()
                self.assertTrue(job.name.startswith("run_"), job)
                return {str(file.relative_to(job)): file.read_text() for file in job.rglob("*.log") if file.stat().st_size}

        ours = files([programs.BIN / "tessera-run"])
        self.assertEqual(ours, files([sys.executable, "-m", "torch.distributed.run", "--no-python"]))
        self.assertEqual(len(ours), 4)
