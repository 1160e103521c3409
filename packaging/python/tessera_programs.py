"""Starts Tessera's programs, which are in the folder of the package `tessera`.

This module is not a part of `tessera`, because `import tessera` loads torch, which takes seconds and which Python cannot
import on a machine without torch's CUDA libraries. The programs need neither Python's torch nor these libraries.
"""
import importlib.util
import os
import pathlib
import re
import sys

TREE = pathlib.Path(__file__).resolve().parent / "tessera"


def find_torch():
    """Returns the folder of the torch that this Python imports; throws ImportError if Tessera needs another version."""
    wanted = (TREE / "torch-version").read_text().strip()
    spec = importlib.util.find_spec("torch")
    folder = pathlib.Path(spec.origin).parent if spec and spec.origin else None
    version = re.search(r"__version__ *= *'([^']*)'", (folder / "version.py").read_text())[1] if folder else ""
    if not version.startswith(wanted + "."):
        raise ImportError(f"Tessera was built with torch {wanted}, and " +
                          (f"torch {version} was found in {folder}" if folder else f"{sys.executable} has no torch") +
                          f": run {sys.executable} -m pip install 'torch=={wanted}.*', or build Tessera with the torch that "
                          "you need")
    return folder


def folders_elsewhere(torch):
    """Returns torch's folder, in a list; empty if torch is next to Tessera, where Tessera's run paths find torch."""
    return [] if TREE.parent.samefile(torch.parent) else [torch]


def main():
    """Replaces this process by the program that has the name of this script."""
    name = pathlib.Path(sys.argv[0]).name
    try:
        for folder in folders_elsewhere(find_torch()):
            searched = os.environ.get("LD_LIBRARY_PATH", "").split(":")
            if str(folder / "lib") not in searched:
                os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(folder / "lib"), *searched]))
    except ImportError as error:
        sys.exit(f"{name}: {error}")
    program = str(TREE / "bin" / name)
    command = [sys.executable, program] if name == "bench_mfu" or name.endswith(".py") else [program]
    os.execv(command[0], command + sys.argv[1:])
