"""How `tests.fuzz` damages files: anywhere, or below a format's compression and checksums, which then are right."""

import gzip
import io
import struct
import zipfile
import zlib

import numpy as np

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """`content` with one to four damages: bits, bytes, lengths, blocks, an end too early."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        if not data:
            break
        # Half of all damages hit the first 512 bytes: headers are there.
        place = int(rng.integers(min(len(data), 512) if rng.integers(2) else len(data)))
        match rng.integers(8):
            case 0:
                data[place] ^= 1 << int(rng.integers(8))
            case 1:
                data[place] = int(rng.integers(256))
            case 2:
                del data[place:]
            case 3:
                data[place:place] = rng.bytes(int(rng.integers(1, 17)))
            case 4:
                del data[place : place + int(rng.integers(1, 65))]
            case 5:
                block = data[place : place + int(rng.integers(1, 65))]
                data[place:place] = block * int(rng.integers(1, 40))
            case 6:
                width, order = int(rng.choice([1, 2, 4, 8])), str(rng.choice(["little", "big"]))
                value = EXTREMES[rng.integers(len(EXTREMES))] % 256**width
                data[place : place + width] = value.to_bytes(width, order)
            case 7:
                digits = [i for i, byte in enumerate(data[:4096]) if 48 <= byte < 58]
                if digits:  # numbers written as text
                    at, numbers = int(rng.choice(digits)), (b"-1", b"0", b"9" * 19, b"1e400", b"x")
                    data[at : at + 1] = numbers[rng.integers(len(numbers))]
    return bytes(data)


def in_gzip(content: bytes, rng: np.random.Generator) -> bytes:
    """A whole gzip with its content damaged."""
    return gzip.compress(mutate(gzip.decompress(content), rng), 1, mtime=0)


def in_zip(content: bytes, rng: np.random.Generator) -> bytes:
    """A whole zip with one of its members damaged."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(stream, "w") as damaged:
        members = archive.infolist()
        chosen = int(rng.integers(len(members)))
        for i, info in enumerate(members):
            part = archive.read(info)
            damaged.writestr(info, mutate(part, rng) if i == chosen else part)
    return stream.getvalue()


def in_png(content: bytes, rng: np.random.Generator) -> bytes:
    """A whole PNG with one of its chunks damaged, absent, twice or elsewhere, or with pixels damaged before deflate."""
    chunks, at = [], 8
    while at < len(content):
        (size,) = struct.unpack_from(">I", content, at)
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
        at += 12 + size
    chosen = int(rng.integers(len(chunks)))
    kind, body = chunks.pop(chosen)
    elsewhere = int(rng.integers(len(chunks) + 1))
    match rng.integers(6):
        case 0:
            chunks.insert(elsewhere, (kind, body))
        case 1:
            chunks[chosen:chosen] = [(kind, body)] * 2
        case 2:
            pass
        case 3 if kind == b"IDAT":
            chunks.insert(chosen, (kind, zlib.compress(mutate(zlib.decompress(body), rng))))
        case _:
            chunks.insert(chosen, (kind, mutate(body, rng)))
    packed = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
              for kind, body in chunks)  # fmt: skip
    return content[:8] + b"".join(packed)
