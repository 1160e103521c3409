"""The CUDA half of a build, where there is one."""
import json
import pathlib
import re
import shutil
import subprocess
import sysconfig

import pytest

import programs

BUILD = programs.BIN.parent
LIBRARY = BUILD / "lib" / "libtessera_cuda.so"
SOURCE = pathlib.Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="built without CUDA")


def output_of(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          check=True).stdout


def test_a_program_is_built_with_the_library_that_it_opens():
    ninja = shutil.which("ninja")
    if ninja is None or not (BUILD / "build.ninja").exists():
        pytest.skip("not built with ninja")
    assert "lib/libtessera_cuda.so" in output_of(ninja, "-C", BUILD, "-t", "query", "bin/llama_train")


def test_it_finds_all_that_it_uses_of_the_other_libraries():
    loaded = subprocess.run(["ldd", "-r", LIBRARY], capture_output=True, text=True)
    missing = [line for line in (loaded.stdout + loaded.stderr).splitlines()
               if "undefined symbol" in line and "tessera" in line.split("(")[0]]
    assert missing == []


def test_kernels_are_compiled_for_several_gpus():
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    kernels = [entry["command"] for entry in commands if entry["file"].endswith(".cu")]
    assert kernels
    for command in kernels:
        codes = set(re.findall(r"(?:sm|compute)_\w+", " ".join(re.findall(r"code=\S+", command))))
        assert codes >= {"sm_80", "sm_90a", "sm_100", "compute_100"}


def test_fused_kernels_include_nothing_of_libtorch_but_its_half_types():
    """So they compile in seconds."""
    include = pathlib.Path(sysconfig.get_path("purelib"), "torch", "include")
    headers = sorted((SOURCE / "src/kernels/device").glob("*.h"))
    assert headers
    for header in headers:
        if "cuda_runtime_api.h" in header.read_text():
            continue  # the toolkit's headers need not be where the compiler looks
        used = output_of("c++", "-std=c++20", "-x", "c++", "-M", "-I", SOURCE / "include", "-I", SOURCE / "src/kernels",
                         "-I", include, header).split()
        of_libtorch = [path for path in used if "/ATen/" in path or "/c10/core/" in path]
        assert of_libtorch == [], header
