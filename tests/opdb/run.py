"""PyTorch's operator database through torch.ops.tessera, forward and backward, on several ranks.

    run.py [--configuration A|B|C] [--ops NAME,...] [--sample N] [--samples N] [--placements N]
           [--partial] [--transposed] [--variant VARIANT] [--json FILE] [--library FILE]

Every sample input of every operator is distributed in several placements of each tensor argument;
results and gradients are compared with the plain operator's on a single device. Configuration A is
a 1-D mesh of 4 with sizes that it divides, B a 2 x 2 mesh with sizes that it does not, C a 1-D mesh
of 4 with sizes that it does not (some shards are empty). Each case is

    right, wrong     the values are, or are not, those of the plain operator
    refused          the library raised its error, alike on all ranks
    error            another exception, alike on all ranks
    hang             a rank did not come back, or the ranks parted
    crash            a rank died
    not comparable   takes no tensor, sparse, 8-bit floating point, fails on plain tensors

and the operator takes the worst of its cases. The choice of samples and placements is always the
same. Exit status 1 for a wrong, hanging or crashing one.
"""
import argparse
import collections
import json
import os
import pathlib
import sys
import tempfile

import ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = pathlib.Path(os.environ.get("TESSERA_BIN", ROOT / "build" / "bin")).parent / "lib" / "libtessera_torch.so"
CONFIGURATIONS = {"A": ([4], True), "B": ([2, 2], False), "C": ([4], False)}
FAILURES = ("crash", "hang", "wrong")


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", choices=CONFIGURATIONS, default="A")
    parser.add_argument("--ops", default="", help="only these, separated by commas")
    parser.add_argument("--sample", type=int, default=1, help="only each N-th operator")
    parser.add_argument("--samples", type=int, default=4, help="inputs an operator, at most")
    parser.add_argument("--placements", type=int, default=3, help="assignments an input, at most")
    parser.add_argument("--partial", action="store_true", help="arguments may be partial sums as well")
    parser.add_argument("--transposed", action="store_true",
                        help="arguments are transposed in memory, first and last dimension swapped")
    parser.add_argument("--variant", choices=("function", "double", "inplace", "out", "nograd", "inference"),
                        default="function", help="the function differentiated twice; or, forward only, what "
                        "writes to its first argument or to out=, the function of tensors that want no "
                        "gradient, or in inference mode")
    parser.add_argument("--json", help="write the records here")
    parser.add_argument("--library", default=str(LIBRARY))
    options = parser.parse_args(argv)
    options.mesh, options.even = CONFIGURATIONS[options.configuration]
    options.ranks = 4
    return options


def check_all(options, report=lambda record: None):
    """The records of all chosen operators. Torch is imported here, after the environment is set."""
    # Libtorch's own exceptions then say so, and differ from the library's; its flight recorder,
    # which would show in every group, is off.
    os.environ.update(OMP_NUM_THREADS="1", TORCH_SHOW_CPP_STACKTRACES="1",
                      TORCH_DISABLE_ADDR2LINE="1", TORCH_FR_BUFFER_SIZE="0")
    import torch

    import rank
    import samples

    torch.set_num_threads(1)
    torch.ops.load_library(options.library)
    samples.use_sizes(options.even)
    names = set(filter(None, options.ops.split(",")))
    records = []
    with tempfile.TemporaryDirectory() as folder:
        options.log = str(pathlib.Path(folder, "ranks.log"))
        driver = ranks.Driver(options, rank.main)
        try:
            for index, name in samples.select(names, options.sample):
                records.append(driver.check_operator(index, name))
                report(records[-1])
        finally:
            driver.close()
    return records


def summary(records):
    counts = collections.Counter(record["class"] for record in records)
    return ", ".join(f"{counts[c]} {c}" for c in ranks.COLUMNS)


def main(argv):
    options = arguments(argv)

    def report(record):
        if record["class"] not in ("right", "not comparable"):
            print(f"{record['class']:8} {record['name']:36} {record['messages'][0]}", flush=True)

    records = check_all(options, report)
    print(f"configuration {options.configuration}: {summary(records)}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(records, indent=1))
    return any(record["class"] in FAILURES for record in records)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
