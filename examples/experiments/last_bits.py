"""Makes weights that differ from others only by rounding."""
import json
import random

# Large enough for speed, small enough for any machine's memory.
CHUNK = 1 << 24


def flip(path, seed, bit=0):
    """Flips one bit of the mantissa (0: the last) of every second fp32 value of the matrices in a safetensors
    file.
    `seed` determines which values are flipped. Norm weights are not changed: they are often 1, whose last bit
    would change all of them in the same direction.
    """
    draw = random.Random(f"{seed} {path.name}")
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name == "__metadata__" or tensor["dtype"] != "F32" or len(tensor["shape"]) < 2:
                continue
            begin, end = tensor["data_offsets"]
            for at in range(begin, end, CHUNK):
                length = min(CHUNK, end - at)
                lowest = int.from_bytes((1 << bit).to_bytes(4, "little") * (length // 4), "little")
                bits = int.from_bytes(draw.randbytes(length), "little") & lowest
                file.seek(8 + size + at)
                value = int.from_bytes(file.read(length), "little") ^ bits
                file.seek(8 + size + at)
                file.write(value.to_bytes(length, "little"))
