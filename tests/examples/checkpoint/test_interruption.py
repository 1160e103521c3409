"""A run that ends at any moment loses the steps since its last checkpoint, and nothing else."""
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import time

import programs

# The number of kills; TESSERA_KILLS=50 makes the test thorough.
KILLS = int(os.environ.get("TESSERA_KILLS", "2"))
STOPPED = 75
MANY = 100_000


class Signals(programs.TrainingRuns):
    def stop(self, send):
        """Stops a run on two ranks by the signal that `send` sends. Returns the run's folder and its last step."""
        run = self.folder / "run"
        # The learning rate is constant, because the number of steps is not known in advance.
        arguments = [*self.flags(run, MANY), *self.checkpoints(run), "--schedule", "constant", "--log-every", 1]
        with programs.Job(arguments, tp=1) as job:
            job.wait_for_line("step:  3 ")
            send(job)
            code, errors = job.end()
        self.assertEqual(code, STOPPED, errors)
        steps = len(programs.figures(run / "metrics.jsonl"))
        self.assertEqual([path.name for path in (run / "steps").glob("step-*")], [f"step-{steps:08}"])
        return run, steps

    def test_sigterm_to_the_launcher_saves_a_step(self):
        run, steps = self.stop(lambda job: job.process.send_signal(signal.SIGTERM))
        constant = ["--schedule", "constant"]
        self.train(run.name, [*self.checkpoints(run), "--resume", *constant], tp=1, steps=steps + 2)
        self.assert_equal_runs(run, self.train("unbroken", constant, tp=1, steps=steps + 2))

    def test_sigusr1_to_one_rank_stops_all(self):
        self.stop(lambda job: os.kill(job.ranks()[1], signal.SIGUSR1))

    def test_sigterm_after_a_failed_save_saves_the_step(self):
        run = self.folder / "run"
        taken = run / "steps/step-00000100"  # a file in place of the step's folder, so that the save fails
        taken.parent.mkdir(parents=True)
        taken.write_text("no folder")
        arguments = [*self.flags(run, MANY), *self.checkpoints(run), "--checkpoint-every", 100]
        with programs.Job(arguments, tp=1) as job:
            job.wait_for_line("checkpoint: ")
            job.process.send_signal(signal.SIGTERM)
            code, errors = job.end()
        self.assertEqual(code, STOPPED, errors)
        self.assertIn("warning: a checkpoint was not saved: ", errors)
        self.assertIn("step-00000100", errors)
        last = len(programs.figures(run / "metrics.jsonl"))
        self.assertLess(last, 200)
        self.assertEqual([path.name for path in taken.parent.glob("step-*") if path.is_dir()],
                         [f"step-{last:08}"])

    def test_sigusr1_during_the_rendezvous_ends_the_run(self):
        run = self.folder / "run"
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        command = [programs.BIN / "llama_train", "--dp", 2, *self.flags(run), *self.checkpoints(run)]
        ranks = []
        for rank in (0, 1):
            job = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            ranks.append(subprocess.Popen([str(part) for part in command], env=job, stdout=subprocess.DEVNULL))
            self.addCleanup(ranks[-1].kill)
            if rank == 0:
                self.wait_for_handler(ranks[0].pid, signal.SIGUSR1)
                ranks[0].send_signal(signal.SIGUSR1)
        self.assertEqual([rank.wait(timeout=120) for rank in ranks], [STOPPED, STOPPED])
        self.assertEqual(programs.figures(run / "metrics.jsonl"), [])
        self.assertEqual(list((run / "steps").glob("step-*")), [])

    def wait_for_handler(self, pid, number):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            caught = re.search(r"SigCgt:\s*(\w+)", pathlib.Path(f"/proc/{pid}/status").read_text())
            if int(caught[1], 16) >> (number - 1) & 1:
                return
            time.sleep(0.01)
        self.fail("the signal is not handled while a rank waits for the others")

    def test_sigterm_during_the_evaluation(self):
        run, text = self.folder / "run", self.folder / "held_out.txt"
        text.write_text("All work and no play makes Jack a dull boy. " * 200)
        flags = [*self.checkpoints(run), "--eval-text", text]
        with programs.Job([*self.flags(run), *flags], tp=1) as job:
            job.wait_for_line("checkpoint: ")  # the checkpoint of the last step
            job.process.send_signal(signal.SIGTERM)
            code, errors = job.end()
        self.assertEqual(code, STOPPED, errors)
        self.assertFalse((run / "model").exists())
        self.train(run.name, [*flags, "--resume"], tp=1)
        self.assertTrue((run / "model").exists())


class Kills(programs.TrainingRuns):
    def test_random_kills_do_not_change_the_result(self):
        seed = random.randrange(1 << 30)
        draw = random.Random(seed)
        run, steps = self.folder / "run", 40 * KILLS
        arguments = [*self.flags(run, steps), *self.checkpoints(run), "--resume", "auto", "--keep", 2,
                     "--checkpoint-every", 5]
        killed = 0
        for _ in range(KILLS):
            with programs.Job(arguments) as job:
                killed += self.kill_one(job, run, draw)
                code, errors = job.end(timeout=1800)
            self.assertEqual(code, 128 + signal.SIGKILL, errors)
        with programs.Job(arguments) as job:
            code, errors = job.end(timeout=1800)
        self.assertEqual(code, 0, errors)
        self.assertEqual(killed, KILLS, f"seed {seed}")
        self.assert_equal_runs(run, self.train("unbroken", steps=steps, timeout=1800))

    def kill_one(self, job, run, draw):
        """Kills a random rank, sometimes while the ranks start, mostly during steps and saves."""
        if draw.random() < 0.8:
            self.wait_for_growth(job, run / "metrics.jsonl")
        time.sleep(draw.random() * 0.5)
        ranks = {}
        while job.process.poll() is None and len(ranks) < 4:
            ranks = job.ranks()
        if not ranks:
            return False
        os.kill(ranks[draw.randrange(4)], signal.SIGKILL)
        return True

    def wait_for_growth(self, job, metrics):
        def size():
            return metrics.stat().st_size if metrics.exists() else 0
        first = size()
        # The next start first shortens the file of metrics, which then grows.
        while job.process.poll() is None and size() <= first:
            time.sleep(0.01)
            first = min(first, size())
