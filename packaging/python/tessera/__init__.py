"""Tessera: DTensor, FSDP and tensor parallelism for C++ on libtorch.

`import tessera` registers the operators torch.ops.tessera. The folder of this package also has Tessera's programs,
libraries, headers and CMake package: `python -m tessera --cmake-prefix` prints what CMAKE_PREFIX_PATH needs.
"""
import importlib.metadata
import sys

import tessera_programs

__version__ = importlib.metadata.version("tessera-mesh")

_torch = tessera_programs.find_torch()

#: The folders for CMAKE_PREFIX_PATH, in CMake's notation: this package and, if torch is elsewhere, torch.
cmake_prefix_path = ";".join(map(str, [tessera_programs.TREE, *tessera_programs.folders_elsewhere(_torch)]))

# While Python looks for the module of `python -m tessera`, sys.argv[0] is "-m". That program needs no operators, and torch
# cannot be imported without torch's CUDA libraries.
if sys.argv[0] != "-m":
    import torch

    torch.ops.load_library(str(next((tessera_programs.TREE / "lib").glob("libtessera_torch.so*"))))
