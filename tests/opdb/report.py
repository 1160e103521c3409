"""docs/operators/operator_database.md from the records of whole sweeps.

    report.py A=A.json B=B.json C=C.json > docs/operators/operator_database.md
"""
import collections
import json
import pathlib
import re
import sys

import torch

from ranks import COLUMNS

MESHES = {"A": "1-D mesh of 4 ranks, sizes divisible by 4", "B": "mesh of 2 × 2 ranks, sizes not divisible by 4",
          "C": "1-D mesh of 4 ranks, sizes not divisible by 4, empty shards"}
# PyTorch 2.11's DTensor, with the samples and placements of A and B: right, comparable, hanging.
PYTORCH = {"A": (322, 649, 2), "B": (305, 654, 10)}

HEAD = """# PyTorch's operator database

`run.py` runs the {entries} entries of `torch.testing._internal.common_methods_invocations.op_db` (PyTorch
{version}) through `libtessera_torch.so` on 4 ranks, forward and backward. Every sample input is
distributed in several placements of each tensor argument; results and gradients are compared with the
results and gradients of the plain operator on one device. The class of an operator is the worst class of
the operator's cases. The following commands test all operators (`run.py --help` explains the options and
the classes):

```sh
.deps/venv/bin/python tests/opdb/run.py --configuration A --json A.json   # and B, C
.deps/venv/bin/python tests/opdb/report.py A=A.json B=B.json C=C.json > docs/operators/operator_database.md
```

With `--partial`, arguments may be partial sums. With `--transposed`, arguments are transposed in memory.
`--variant` selects two differentiations, in-place or `out=` variants, calls without a gradient, or inference mode.
The class "refused" means that Tessera raised an error on every rank; the next call works.
"""


def table(sweeps):
    rows = ["| configuration | " + " | ".join(COLUMNS) + " | cases |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, records in sweeps.items():
        counts = collections.Counter(record["class"] for record in records)
        cases = sum(n for record in records for status, n in record["cases"].items()
                    if status != "not comparable")
        rows.append(f"| {name}: {MESHES[name]} | " + " | ".join(str(counts[c]) for c in COLUMNS) + f" | {cases} |")
        if name in PYTORCH:
            right, comparable, hanging = PYTORCH[name]
            rows.append(f"| {name}, with PyTorch 2.11's DTensor | {right} of {comparable} | | | | {hanging} | | | |")
    return rows


def reason(message):
    """A message without the case that it came from and the numbers of this run."""
    message = re.sub(r"^sample \d+, (\[\]|.*?\]\]): ", "", message)
    message = message.split(". ")[0].split(".  ")[0]
    return (message[:200] + "…" if len(message) > 200 else message).replace("|", "\\|")


def failures(sweeps):
    rows = [f"| `{record['name']}` | {name} | {record['class']} | {reason(record['messages'][0])} |"
            for name, records in sweeps.items() for record in records
            if record["class"] not in ("right", "not comparable")]
    if not rows:
        return ["In every configuration, every comparable entry of the operator database is right."]
    return ["| entry | configuration | class | reason |", "|---|---|---|---|", *rows]


def not_comparable(sweeps):
    names = collections.defaultdict(dict)
    for records in sweeps.values():
        for record in records:
            if record["class"] == "not comparable":
                names[reason(record["messages"][0])].setdefault(record["name"])
    return ["| reason | entries |", "|---|---|",
            *(f"| {why} | " + ", ".join(f"`{name}`" for name in entries) + " |" for why, entries in names.items())]


def main(arguments):
    sweeps = {}
    for argument in arguments:
        name, path = argument.split("=", 1)
        sweeps[name] = json.loads(pathlib.Path(path).read_text())
    entries = len(next(iter(sweeps.values())))
    print("\n".join([HEAD.format(entries=entries, version=torch.__version__.split("+")[0]), *table(sweeps), "",
                     "## Refused, or otherwise not right", "", *failures(sweeps), "",
                     "## Not comparable", "", *not_comparable(sweeps)]))


if __name__ == "__main__":
    main(sys.argv[1:])
