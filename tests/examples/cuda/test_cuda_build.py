"""The CUDA libraries of a build with CUDA, and the registers and the stack of their kernels."""
import collections
import dataclasses
import pathlib
import re
import shutil
import struct
import subprocess

import pytest

import programs

BUILD = programs.BIN.parent
LIBRARY = BUILD / "lib" / "libtessera_cuda.so"
GPUS = (80, 90, 100)

# The most registers a thread of any kernel of a family, on each of GPUS, by CUDA 13.0. With at most 64 an H100 keeps four
# blocks of 256 threads on a multiprocessor, which hide the latency of its memory. One that needs more says why.
REGISTERS = {
    "adamw_kernel": (78, 80, 78),  # a vector of each of four tensors, and what they are multiplied by
    "check_indices_kernel": (24, 24, 24),
    "clip_norm_kernel": (24, 26, 26),
    "cross_entropy_backward_kernel": (62, 40, 40),
    "cross_entropy_kernel": (40, 40, 32),
    "cross_entropy_rows_kernel": (25, 22, 22),
    "dropout_kernel": (36, 36, 40),
    "embedding_backward_kernel": (62, 64, 64),
    "embedding_backward_rows_kernel": (29, 29, 28),
    "embedding_kernel": (39, 32, 48),
    "fill_kernel": (38, 36, 42),
    "pack_kernel": (32, 32, 32),
    "quantize_fp8_kernel": (32, 40, 32),
    "rms_norm_backward_kernel": (56, 56, 64),
    "rms_norm_kernel": (58, 48, 62),
    "rms_norm_weight_kernel": (32, 32, 32),
    "rotary_kernel": (80, 100, 120),  # its part of the tables, read once for several heads; two blocks fit an SM
    "scale_kernel": (28, 30, 32),
    "silu_mul_backward_kernel": (48, 40, 59),
    "silu_mul_kernel": (40, 32, 40),
    "square_sums_kernel": (32, 32, 32),
    "sum_kinds_kernel": (30, 30, 32),
}
# Other releases of nvcc give kernels slightly different numbers of registers.
SLACK = 4

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="built without CUDA")


# ---- Registers and stack of the kernels for each GPU, as cuobjdump -res-usage prints them, without cuobjdump.

FATBIN_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
ELF_KIND = 2
# Attributes of a kernel in the section .nv.info: an index of a symbol, and a number.
REGISTER_COUNT, FRAME = 0x2F, 0x11
WITH_SIZE = 4  # the format of such attributes: a size and as many bytes; others have two bytes


@dataclasses.dataclass(frozen=True)
class Kernel:
    arch: int  # 90 for sm_90a
    name: str  # mangled
    registers: int
    stack: int  # bytes a thread, of spilled registers and arrays


def elves(library):
    """The machine code in the library: a GPU's number and an ELF file each."""
    data = pathlib.Path(library).read_bytes()
    begin = data.find(FATBIN_MAGIC)
    while begin >= 0:
        size, = struct.unpack_from("<Q", data, begin + 8)
        at, end = begin + 16, begin + 16 + size
        while at < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
            arch, = struct.unpack_from("<I", data, at + 28)
            if kind == ELF_KIND:
                yield arch, data[at + header:at + header + payload]
            at += header + payload
        begin = data.find(FATBIN_MAGIC, end)


def text_at(table, offset):
    return table[offset:table.index(b"\0", offset)].decode()


def sections(elf):
    """Returns the bytes of each section, by the section's name."""
    table, = struct.unpack_from("<Q", elf, 0x28)
    _, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    contents = [elf[offset:offset + size] for _, _, _, _, offset, size in headers]
    return {text_at(contents[names], header[0]): content for header, content in zip(headers, contents)}


def attributes(info):
    """(attribute, its bytes) of a section .nv.info."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        size = size if kind == WITH_SIZE else 0
        yield attribute, info[at + 4:at + 4 + size]
        at += 4 + size


def kernels_of(library):
    found = []
    for arch, elf in elves(library):
        parts = sections(elf)
        names = [text_at(parts[".strtab"], offset) for offset, in struct.iter_unpack("<I20x", parts[".symtab"])]
        numbers = {REGISTER_COUNT: {}, FRAME: {}}
        for attribute, content in attributes(parts[".nv.info"]):
            if attribute in numbers:
                symbol, number = struct.unpack("<II", content)
                numbers[attribute][names[symbol]] = number
        found += [Kernel(arch, name, registers, numbers[FRAME].get(name, 0))
                  for name, registers in numbers[REGISTER_COUNT].items() if ".text." + name in parts]
    return found


# ---- The tests.

def output_of(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          check=True).stdout


def test_programs_depend_on_the_cuda_library():
    ninja = shutil.which("ninja")
    if ninja is None or not (BUILD / "build.ninja").exists():
        pytest.skip("not built with ninja")
    assert "lib/libtessera_cuda.so" in output_of(ninja, "-C", BUILD, "-t", "query", "bin/llama_train")


def test_cuda_library_has_no_undefined_tessera_symbols():
    loaded = subprocess.run(["ldd", "-r", LIBRARY], capture_output=True, text=True)
    missing = [line for line in (loaded.stdout + loaded.stderr).splitlines()
               if "undefined symbol" in line and "tessera" in line.split("(")[0]]
    assert missing == []


def kernels():
    """The library's kernels by family, the name of their template."""
    found = kernels_of(LIBRARY)
    names = subprocess.run(["c++filt"], input="\n".join(kernel.name for kernel in found), capture_output=True, text=True,
                           check=True).stdout.splitlines()
    families = collections.defaultdict(list)
    for kernel, name in zip(found, names):
        families[re.search(r"(\w+)(<.*>)?\(", name.replace("(anonymous namespace)::", ""))[1]].append(kernel)
    return families


def test_kernels_stay_within_their_register_budget():
    families = kernels()
    assert REGISTERS.keys() == families.keys()
    for name, family in families.items():
        assert {kernel.arch for kernel in family} == set(GPUS), name
        for kernel in family:
            most = REGISTERS[name][GPUS.index(kernel.arch)] + SLACK
            assert kernel.stack == 0 and kernel.registers <= most, f"{kernel}: {most} registers are its budget, and no stack"
