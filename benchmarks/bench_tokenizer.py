"""MB for each second of the processor, encoding on one thread beside the `tokenizers` package: medians of rounds that
take turns.

    .deps/venv/bin/python benchmarks/bench_tokenizer.py [--rounds 5] [--megabytes 2] [--tokenizer FILE]
"""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "examples"))

import tokenizers  # noqa: E402
import tokenizers_of_kinds as kinds  # noqa: E402

BIN = pathlib.Path(os.environ.get("TESSERA_BIN", ROOT / "build" / "bin"))


def theirs(path, text):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    start = time.process_time()
    tokenizer.encode(text, add_special_tokens=False)
    return len(text.encode()) / 1e6 / (time.process_time() - start)


def ours(path, file):
    """A process a round, so that no round finds the words of the last one."""
    line = subprocess.run([BIN / "bench_tokenizer", path, file, "1"], check=True, capture_output=True, text=True).stdout
    return float(line.split()[0])


def main():
    parser = argparse.ArgumentParser(description="Encoding beside the tokenizers package.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=2)
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a tokenizer.json instead of those trained here")
    options = parser.parse_args()
    size = int(options.megabytes * 1e6)
    texts = {"code": kinds.code(ROOT, size), "multilingual": kinds.multilingual(size, seed=2)}
    with tempfile.TemporaryDirectory() as folder:
        if options.tokenizer:
            paths = [options.tokenizer]
        else:
            kinds.save_all(folder, kinds.multilingual(200_000, seed=1) + kinds.code(ROOT / "docs", 100_000))
            paths = [pathlib.Path(folder, f"{kind}.json") for kind in ("llama2", "llama3", "mistral", "qwen")]
        file = pathlib.Path(folder, "text")
        for name, text in texts.items():
            file.write_bytes(text.encode())
            for path in paths:
                rounds = [(theirs(path, text), ours(path, file)) for _ in range(options.rounds)]
                peer, own = (statistics.median(column) for column in zip(*rounds))
                ratio = statistics.median(b / a for a, b in rounds)
                print(f"{path.stem:12} {name:13} tokenizers {peer:7.2f} MB/s   tessera {own:7.2f} MB/s   "
                      f"{ratio:5.1f} times as fast")


if __name__ == "__main__":
    main()
