"""tessera-ckpt push and pull, with a small server that has the faults of stores: 503, slow answers, objects cut short."""
import collections
import http.server
import pathlib
import sys
import tempfile
import threading
import time
import urllib.parse

import pytest

import programs

# As a vendor's program would: it knows neither of steps nor of retries.
CLIENT = """import sys, urllib.request
what, url, *file = sys.argv[1:]
data = open(file[0], "rb").read() if what == "put" else None
answer = urllib.request.urlopen(urllib.request.Request(url, data, method=what.upper())).read()
if what == "get":
    (open(file[0], "wb") if file else sys.stdout.buffer).write(answer)
"""


class Store(http.server.ThreadingHTTPServer):
    """Objects by key. The first `times` calls for each go wrong as `fault` says."""
    def __init__(self, fault, times):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.times = fault, times
        self.calls = collections.Counter()
        self.objects = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def goes_wrong(self, call):
        self.calls[call] += 1
        return self.calls[call] <= self.times


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fails(self):
        """Whether this call has been answered by a fault."""
        if not self.server.goes_wrong((self.command, self.path)):
            return False
        if self.server.fault == "slow":
            time.sleep(0.3)
        if self.server.fault == "503":
            self.answer(503)
        return self.server.fault == "503"

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.fails():
            return
        cut = self.server.fault == "truncated" and self.server.calls["PUT", self.path] <= self.server.times
        self.server.objects[urllib.parse.unquote(self.path[1:])] = body[:len(body) // 2] if cut else body
        self.answer(200)

    def do_GET(self):
        if self.fails():
            return
        path, _, prefix = urllib.parse.unquote(self.path[1:]).partition("?list=")
        if path and path not in self.server.objects:
            self.answer(404)
        elif path:
            self.answer(200, self.server.objects[path])
        else:
            found = [f"{len(body)} {key}\n" for key, body in self.server.objects.items() if key.startswith(prefix)]
            self.answer(200, "".join(found).encode())


@pytest.fixture(scope="module")
def steps():
    """The steps of a run, saved by two ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokens = programs.write_tokens(folder / "t.bin", programs.text_tokens(2000, 256))
        programs.train(["--config", programs.write_config(folder, programs.SMALL), "--tokens", tokens, "--steps", 2,
                        "--batch", 4, "--seq", 32, "--checkpoint", folder / "steps"], dp=2)
        yield folder / "steps"


def commands(store, folder):
    client = folder / "client.py"
    client.write_text(CLIENT)
    url = f"http://127.0.0.1:{store.server_port}/"
    run = f"{sys.executable} {client}"
    return {"put": f"{run} put {url}{{key}} {{file}}", "get": f"{run} get {url}{{key}} {{file}}",
            "list": f"{run} get {url}?list={{key}}"}


@pytest.mark.parametrize("fault", ["503", "slow", "truncated"])
def test_a_store_that_fails_twice_gets_and_gives_every_byte(steps, tmp_path, fault):
    store = Store(fault, times=2)
    use = commands(store, tmp_path)
    ckpt, named = programs.BIN / "tessera-ckpt", ["--prefix", "run", "--list", use["list"]]
    programs.succeed(programs.on_ranks(2, [ckpt, "push", steps, *named, "--put", use["put"]]))
    programs.succeed([ckpt, "pull", tmp_path / "back", *named, "--get", use["get"]])
    assert "every byte is as it was written" in programs.succeed([ckpt, "verify", tmp_path / "back"]).stdout
    assert "the tensors are equal" in programs.succeed([ckpt, "diff", steps, tmp_path / "back"]).stdout


def test_a_store_that_goes_on_failing_is_an_error_and_has_no_step(steps, tmp_path):
    store = Store("503", times=1000)
    use = commands(store, tmp_path)
    done = programs.run([programs.BIN / "tessera-ckpt", "push", steps, "--put", use["put"], "--list", use["list"]])
    assert done.returncode == 2 and "503" in done.stderr and done.stderr.count("\n") == 1
    assert store.objects == {}


def test_a_list_that_hides_its_failure_does_not_replace_a_step(steps, tmp_path):
    store = Store("none", times=0)
    use = commands(store, tmp_path)
    push = [programs.BIN / "tessera-ckpt", "push", steps, "--put", use["put"], "--get", use["get"], "--list"]
    programs.succeed([*push, use["list"]])
    before = dict(store.objects)
    done = programs.run([*push, "false | cat"])
    assert done.returncode == 2 and "already: remove its manifest.json first" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and store.objects == before


def test_slashes_behind_the_prefix_and_a_command_that_writes_nothing(steps, tmp_path):
    store = Store("none", times=0)
    use = commands(store, tmp_path)
    ckpt = programs.BIN / "tessera-ckpt"
    programs.succeed([ckpt, "push", steps, "--prefix", "run//", "--put", use["put"], "--list", use["list"]])
    assert store.objects and all(key.startswith("run/step-") for key in store.objects)
    pull = [ckpt, "pull", tmp_path / "back", "--prefix", "run/", "--list", use["list"], "--get"]
    done = programs.run([*pull, f"case {{key}} in *.safetensors) ;; *) {use['get']};; esac"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "0 came, however often" in done.stderr, done.stderr
    assert "step-" in programs.succeed([*pull, use["get"]]).stdout
