"""Hosts of one machine, for tests of jobs on several: each has a network, a name, processes, /tmp and /dev/shm of its
own, and shares all other files with the others, as hosts share a file system."""
import itertools
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time

import network
import programs
# A tree below /tmp is mounted into each host's own.
TREE = pathlib.Path(__file__).resolve().parents[2]
SET_UP = """
exec 3< {tree} && mount --make-rprivate / && mount -t tmpfs none /dev/shm && mount -t tmpfs none /tmp &&
mkdir -p {tree} && mount -c --rbind /proc/self/fd/3 {tree} && exec 3<&- &&
(echo 127.0.0.1 localhost; for i in $(seq 9); do echo 10.77.0.$i host$((i - 1)); done) > /tmp/names &&
mount --bind /tmp/names /etc/hosts &&
hostname {name} && ip link set lo up && echo ready && exec sleep infinity
"""


def why_not():
    """Why this machine allows no such hosts; None where it does."""
    try:
        with Hosts(2) as hosts:
            done = hosts[0].run(["true"])
            return done.stderr.strip() or None
    except (OSError, RuntimeError) as error:
        return str(error)


class Host:
    def __init__(self, number):
        self.name = f"host{number}"
        self.ip = f"10.77.0.{number + 1}"
        self.address = socket.inet_aton(self.ip)
        # The first process of a PID namespace takes all others of it along.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child",
             "sh", "-c", SET_UP.format(name=self.name, tree=shlex.quote(str(TREE)))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(self._holder.communicate()[1].strip() or "unshare failed")
        children = pathlib.Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self._first = int(children.split()[0])

    @property
    def namespace(self):
        return f"/proc/{self._first}/ns/net"

    def command(self, words):
        return ["nsenter", "--target", self._first, "--net", "--mount", "--uts", "--ipc", "--pid", "--", *words]

    def start(self, words, environment=None):
        """A process of this host. Its outputs go to one file: a pipe would stay open as long as any of its children."""
        output = tempfile.TemporaryFile("w+", errors="replace")
        started = subprocess.Popen([str(word) for word in self.command(words)], stdout=output, stderr=subprocess.STDOUT,
                                   env=os.environ | (environment or {}))
        started.output = output
        return started

    def run(self, words):
        return subprocess.run([str(word) for word in self.command(words)], capture_output=True, text=True, timeout=60)

    def processes(self):
        """The commands that run here, but for the host's first process."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if (os.readlink(folder / "ns/net") == os.readlink(self.namespace) and
                        int(folder.name) not in (self._first, self._holder.pid)):
                    found.append((int(folder.name), (folder / "cmdline").read_text().split("\0")[0]))
            except OSError:
                continue
        return found

    def processes_of(self, program):
        """The numbers of those here that run a program of this name."""
        return sorted(pid for pid, command in self.processes() if pathlib.Path(command).name == program)

    def end(self):
        """As if it lost its power."""
        if self._holder.poll() is None:
            os.kill(self._first, signal.SIGKILL)
            self._holder.wait()
        self._holder.stdout.close()
        self._holder.stderr.close()


class Hosts:
    def __init__(self, count):
        self._hosts = []
        try:
            for number in range(count):
                self._hosts.append(Host(number))
            devices = {}
            for host in self._hosts:
                devices[host.address] = network.open_device(host.namespace, "net0")
            self.network = network.Network(devices)
            for host in self._hosts:
                done = host.run(["sh", "-c", f"ip addr add {host.ip}/24 dev net0 && ip link set net0 mtu 60000 up"])
                if done.returncode:
                    raise RuntimeError(done.stderr.strip())
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getitem__(self, number):
        return self._hosts[number]

    def __len__(self):
        return len(self._hosts)

    def __iter__(self):
        return iter(self._hosts)

    def close(self):
        for host in self._hosts:
            host.end()
        if hasattr(self, "network"):
            self.network.close()

    def cut(self, number):
        self.network.cut(self[number].address)

    def restore(self, number):
        self.network.restore(self[number].address)

    def start(self, nproc, program, port=29500, environment=None, restarts=0):
        """torchrun on each host, with `nproc` ranks each."""
        return [host.start([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", nproc, "--nnodes", len(self),
                            "--node-rank", number, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self[0].ip}:{port}",
                            "--max-restarts", restarts, "--shutdown-timeout", 1, "--no-python", *program], environment)
                for number, host in enumerate(self._hosts)]


def output_of(launcher):
    """What it has printed so far."""
    launcher.output.seek(0)
    return launcher.output.read()


def finish(launchers, timeout=120):
    """(status, output) of each launcher. Throws if one has not ended in time."""
    ends_at = time.monotonic() + timeout
    for launcher in launchers:
        try:
            launcher.wait(timeout=max(0.1, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{shlex.join(map(str, launcher.args))} did not end:\n{output_of(launcher)}") from None
    return [(launcher.returncode, output_of(launcher)) for launcher in launchers]


def wait_for_ranks_to_end(hosts, launchers, timeout):
    """Each launcher's output once no rank runs. torchrun itself may wait longer: its rendezvous has its own time limit."""
    ends_at = time.monotonic() + timeout
    while any(host.processes_of("llama_train") for host in hosts):
        if time.monotonic() > ends_at:
            raise AssertionError("\n".join(["ranks did not end:", *map(output_of, launchers)]))
        time.sleep(0.1)
    return list(map(output_of, launchers))


# Runs of llama_train that the tests start and watch.
numbers = itertools.count()


class Run:
    """llama_train with its files in a new folder."""
    def __init__(self, folder, *flags):
        self.folder = folder / str(next(numbers))
        self.folder.mkdir()
        config = programs.write_config(self.folder, programs.SMALL)
        tokens = programs.write_tokens(self.folder / "t.bin", programs.text_tokens(5000, 256))
        self.metrics = self.folder / "m.jsonl"
        given = ["--config", config, "--tokens", tokens, "--batch", 8, "--seq", 32, "--steps", 6, "--metrics", self.metrics]
        self.program = programs.words([programs.BIN / "llama_train", *given, *flags])

    def on_one_host(self):
        programs.succeed(programs.on_ranks(4, self.program))
        return self.losses()

    def on(self, machines, **kwargs):
        for status, output in finish(machines.start(4 // len(machines), self.program, **kwargs)):
            assert status == 0, output
        return self.losses()

    def losses(self):
        return [(step["loss"], step["grad_norm"]) for step in programs.read_metrics(self.metrics)]

    def steps(self):
        """How far it has come: the last step that the file names."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return len(lines)


def wait_for_step(run, step, launchers):
    """Until the run has trained so far."""
    ends_at = time.monotonic() + 60
    while run.steps() < step:
        if time.monotonic() > ends_at or any(launcher.poll() is not None for launcher in launchers):
            raise AssertionError(f"{run.steps()} steps were trained:\n{finish(launchers, timeout=1)}")
        time.sleep(0.05)
