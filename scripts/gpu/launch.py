"""Starts the ranks of a program by torchrun, on this host's cards or on the cards of all hosts of a job.

On the first host, run writes each command that all hosts start into the file job.json of a folder that the hosts share.
On every other host, follow() reads that file and starts the same command."""
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid

# The variables of torchrun and of srun: number of the host, number of hosts, number of the process on its host.
LAUNCHERS = [("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK"), ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID")]
OF_A_JOB = re.compile("(SLURM|PMIX?|TORCHELASTIC|GROUP|ROLE|LOCAL|MASTER)_.*|RANK|WORLD_SIZE")


def place():
    """Returns the values of LAUNCHERS; 0, 1, 0 without a launcher. The launcher's variables are removed, because the
    programs that this process starts are not ranks of the launcher's job."""
    names = next((names for names in LAUNCHERS if all(name in os.environ for name in names)), ())
    found = [int(os.environ[name]) for name in names] or [0, 1, 0]
    for name in filter(OF_A_JOB.fullmatch, list(os.environ)):
        del os.environ[name]
    return found


def end(child):
    """Ends a child's process group: first by SIGTERM, so that torchrun ends its ranks, which have sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            child.poll()  # otherwise the ended child remains a member of its group
            os.killpg(child.pid, 0)
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def write(path, text):
    """Replaces a file, so that another host reads the old text or the new text."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def wait_for_hosts(folder, hosts, seconds=120):
    """Waits until follow() runs on all other hosts. follow() writes its file again if the file is deleted, so files of an
    earlier job do not count."""
    for old in folder.glob("*.host"):
        old.unlink()
    until = time.monotonic() + seconds
    while len(list(folder.glob("*.host"))) < hosts - 1:
        if time.monotonic() > until:
            sys.exit(f"run: not all {hosts} hosts have started run; --out must be a folder that all hosts share")
        time.sleep(0.1)


def tell(folder, command):
    """Writes a command that the other hosts start instead of the command before; None ends follow()."""
    followers = [file.read_text() for file in folder.glob("*.host")]
    write(folder / "job.json", json.dumps({"id": time.time_ns(), "hosts": followers, "command": command}))


def follow(folder, number):
    """Starts on this host the commands that the first host writes."""
    name, last, child = uuid.uuid4().hex, None, None
    try:
        while True:
            if not (folder / f"{number}.host").exists():
                write(folder / f"{number}.host", name)
            job = json.loads((folder / "job.json").read_text()) if (folder / "job.json").exists() else {"hosts": []}
            if name in job["hosts"] and job["id"] != last:
                last = job["id"]
                if child:
                    end(child)
                if job["command"] is None:
                    return 0
                child = subprocess.Popen(job["command"], env=os.environ | {"PET_NODE_RANK": str(number)}, process_group=0,
                                         stdout=sys.stderr)
            time.sleep(0.1)
    finally:
        if child and child.poll() is None:
            end(child)


def torchrun(context, program, ranks, environment):
    """Runs ranks of a program on this host, or on all hosts if this host has fewer cards. Returns this host's finished
    torchrun. Only the program gets the environment, because torchrun runs with the machine's Python."""
    hosts = context.hosts if context.spans_hosts(ranks) else 1
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    variables = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts, "--nproc-per-node", ranks // hosts,
               "--master-addr", socket.gethostname() if hosts > 1 else "127.0.0.1", "--master-port", port, "--no-python",
               "env", *variables, *program]
    command = [str(part) for part in command]
    if hosts > 1:
        tell(context.shared, command)
    # Versions of torchrun before the flag --shutdown-timeout ignore the variable.
    own = os.environ | {"PET_NODE_RANK": "0", "PET_SHUTDOWN_TIMEOUT": "5"}
    return subprocess.run(command, env=own, capture_output=True, text=True)


def rows(done):
    """Returns the JSON objects that a finished process printed. NCCL may print other lines."""
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
