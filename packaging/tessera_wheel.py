"""The build backend of the wheel. scikit-build-core alone cannot take a dependency from the result of the build.

This backend adds the requirement of the torch version that CMake found to the wheel. There is no function
prepare_metadata_for_build_wheel, because the requirement is only known after the build.
"""
import base64
import csv
import hashlib
import io
import os
import pathlib
import zipfile

from scikit_build_core.build import build_wheel as build_wheel_without_torch
from scikit_build_core.build import get_requires_for_build_wheel

__all__ = ["build_wheel", "get_requires_for_build_wheel"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # CMake's default compilers. scikit-build-core would choose the compilers of Python, and so compile all files
    # of a build folder again that CMake has made.
    os.environ.setdefault("CC", "cc")
    os.environ.setdefault("CXX", "c++")
    name = build_wheel_without_torch(wheel_directory, config_settings, metadata_directory)
    wheel = pathlib.Path(wheel_directory) / name
    require_torch(wheel)
    return name


def require_torch(wheel):
    changed = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        torch = old.read("tessera/torch-version").decode().strip()
        for file in old.infolist():
            content = old.read(file)
            if file.filename.endswith(".dist-info/METADATA"):
                head, body = content.decode().split("\n\n", 1)
                content = f"{head}\nRequires-Dist: torch=={torch}.*\n\n{body}".encode()
                metadata = file.filename, content
            elif file.filename.endswith(".dist-info/RECORD"):
                content = with_hash(content.decode(), *metadata).encode()
            new.writestr(file, content)
    os.replace(changed, wheel)


def with_hash(record, name, content):
    """Returns the wheel's table RECORD with new content of the file `name`."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    result = io.StringIO()
    rows = ([name, f"sha256={digest}", len(content)] if row[0] == name else row for row in csv.reader(io.StringIO(record)))
    csv.writer(result, lineterminator="\n").writerows(rows)
    return result.getvalue()
