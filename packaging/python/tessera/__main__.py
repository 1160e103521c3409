"""Implements python -m tessera --cmake-prefix"""
import argparse

from . import __version__, cmake_prefix_path

parser = argparse.ArgumentParser(prog="python -m tessera", description="Where Tessera is installed.")
parser.add_argument("--version", action="version", version=__version__)
parser.add_argument("--cmake-prefix", action="store_true", required=True, help="print the value for CMAKE_PREFIX_PATH")
parser.parse_args()
print(cmake_prefix_path)
