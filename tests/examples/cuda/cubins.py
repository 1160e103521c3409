"""What nvcc made of the kernels in a library: registers and stack, by GPU. cuobjdump -res-usage, where there is none."""
import dataclasses
import pathlib
import struct

FATBIN_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
ELF_KIND = 2
# Attributes of a kernel in the section .nv.info: an index of a symbol, and a number.
REGISTERS, FRAME = 0x2F, 0x11
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
    """By name: the bytes."""
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


def kernels(library):
    found = []
    for arch, elf in elves(library):
        parts = sections(elf)
        names = [text_at(parts[".strtab"], offset) for offset, in struct.iter_unpack("<I20x", parts[".symtab"])]
        numbers = {REGISTERS: {}, FRAME: {}}
        for attribute, content in attributes(parts[".nv.info"]):
            if attribute in numbers:
                symbol, number = struct.unpack("<II", content)
                numbers[attribute][names[symbol]] = number
        found += [Kernel(arch, name, registers, numbers[FRAME].get(name, 0))
                  for name, registers in numbers[REGISTERS].items() if ".text." + name in parts]
    return found
