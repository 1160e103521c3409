"""The CUDA half of a build, where there is one."""
import json
import shutil
import subprocess

import pytest

import programs

BUILD = programs.BIN.parent
LIBRARY = BUILD / "lib" / "libtessera_cuda.so"

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
        for code in ("sm_80", "sm_90a", "sm_100", "compute_100"):
            assert f"code={code}" in command
