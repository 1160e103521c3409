"""A group of ranks as child processes, which the parent drives case by case and starts anew after
a hang or a crash."""
import collections
import multiprocessing
import multiprocessing.connection
import socket
import time

CASE_PATIENCE_S = 120  # the library ends what hangs after 15 s; a busy machine may be slow
START_PATIENCE_S = 60
# The worst class of an operator's cases is the operator's.
CLASSES = ("crash", "hang", "wrong", "error", "refused", "right", "not comparable")
# The order in which reports count them.
COLUMNS = ("right", "wrong", "refused", "error", "hang", "crash", "not comparable")


class Lost(Exception):
    """The group cannot continue; args: class and message."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Group:
    def __init__(self, options, main):
        # Forked from a parent that has imported all of torch: quick to start again.
        context = multiprocessing.get_context("fork")
        port = free_port()
        self.channels, self.processes = [], []
        for r in range(options.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(r, port, options, theirs), daemon=True)
            process.start()
            theirs.close()
            self.channels.append(ours)
            self.processes.append(process)
        self.receive(START_PATIENCE_S)

    def receive(self, patience):
        """One message of every rank."""
        deadline, messages = time.monotonic() + patience, {}
        while len(messages) < len(self.channels):
            waiting = [c for r, c in enumerate(self.channels) if r not in messages]
            ready = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
            if not ready:
                late = [r for r in range(len(self.channels)) if r not in messages]
                raise Lost("hang", f"ranks {late} did not answer within {patience} s")
            for channel in ready:
                r = self.channels.index(channel)
                try:
                    messages[r] = channel.recv()
                except EOFError:
                    self.processes[r].join(5)
                    raise Lost("crash", f"rank {r} ended with {self.processes[r].exitcode}") from None
        return [messages[r] for r in range(len(self.channels))]

    def send(self, message):
        for channel in self.channels:
            channel.send(message)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()


def verdict(answers):
    """One class and message for a case from those of all ranks."""
    statuses = {status for status, _, _ in answers}
    if statuses & {"refused", "error"} and (len(statuses) > 1 or any("ranks disagree" in m for _, m, _ in answers)):
        each = "; ".join(f"rank {r}: {s} {m}" for r, (s, m, _) in enumerate(answers))
        return "hang", f"the ranks part: {each}"[:900]
    return min(((s, m) for s, m, _ in answers), key=lambda answer: CLASSES.index(answer[0]))


class Driver:
    """`main(rank, port, options, channel)` is one rank: it sends "ready", then for each operator it
    receives one (class, message, case) a case, waiting for an answer, and None after the last."""

    def __init__(self, options, main, patience=CASE_PATIENCE_S):
        self.options, self.main, self.patience, self.group = options, main, patience, None

    def check_operator(self, index, name):
        """A record of all its cases. The group survives unless its ranks have parted."""
        counts, messages, case = collections.Counter(), {}, "start"
        start = time.monotonic()
        try:
            if self.group is None:
                self.group = Group(self.options, self.main)
            self.group.send(index)
            while (answers := self.group.receive(self.patience))[0] is not None:
                status, message = verdict(answers)
                case = answers[0][2]
                counts[status] += 1
                messages.setdefault(status, []).append(f"{case}: {message}" if case else message)
                if status == "hang":
                    raise Lost(None, None)
                self.group.send("next")
        except Lost as lost:
            status, message = lost.args
            if status:
                counts[status] += 1
                messages.setdefault(status, []).append(f"after {case}: {message}")
            self.close()
        result = next((c for c in CLASSES if counts[c]), "not comparable")
        if not counts:
            messages["not comparable"] = ["the database has no sample of a type that the CPU takes"]
        return {"name": name, "class": result, "cases": dict(counts),
                "messages": [] if result == "right" else messages[result][:3],
                "seconds": round(time.monotonic() - start, 2)}

    def close(self):
        if self.group:
            self.group.kill()
        self.group = None
