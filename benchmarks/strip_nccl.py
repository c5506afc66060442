"""Make NCCL's library small: keep the machine code of one GPU architecture, and compress (252 MB become 14).

    python benchmarks/strip_nccl.py LIBRARY TARGET.xz [--architecture 90]

A fat binary has a header, and an entry for each architecture. The entries of other architectures are overwritten with zeros in
place, so that no offset changes. So is the relocatable device code, which only a linker reads. Zeros compress to almost nothing.
"""

import argparse
import lzma
import re
import struct
import subprocess
import tempfile
from pathlib import Path

MAGIC = 0xBA55ED50
# Header of a fat binary: magic number, version, bytes of this header, bytes of the entries.
BINARY = struct.Struct("<IHHQ")
# Header of an entry: kind, version, bytes of this header, bytes of the code; after 12 more bytes, the architecture.
ENTRY = struct.Struct("<HHIQ12xI")


def sections(library: Path) -> dict[str, tuple[int, int]]:
    """Return offset and size of each section of an ELF file."""
    listed = subprocess.run(["readelf", "-SW", library], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"\] (\S+) +PROGBITS +\w+ (\w+) (\w+)", listed)
    return {name: (int(offset, 16), int(size, 16)) for name, offset, size in found}


def keep_one(data: bytearray, begin: int, size: int, architecture: int) -> int:
    """Zero the code of other architectures in a section of fat binaries; return how many entries are kept."""
    kept, at, end = 0, begin, begin + size
    while at + BINARY.size <= end:
        magic, _, header, length = BINARY.unpack_from(data, at)
        if magic != MAGIC:
            at += 8  # fat binaries are aligned to 8 bytes
            continue
        at += header
        stop = at + length
        while at < stop:
            _, _, header, length, of = ENTRY.unpack_from(data, at)
            at += header
            if of == architecture:
                kept += 1
            else:
                data[at : at + length] = bytes(length)
            at += length
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    args = parser.parse_args()
    data, where = bytearray(args.library.read_bytes()), sections(args.library)
    if not keep_one(data, *where[".nv_fatbin"], args.architecture):
        raise SystemExit(f"strip_nccl: {args.library} has no code for architecture {args.architecture}")
    if "__nv_relfatbin" in where:
        offset, size = where["__nv_relfatbin"]
        data[offset : offset + size] = bytes(size)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        subprocess.run(["strip", "--strip-debug", file.name], check=True)
        args.target.write_bytes(lzma.compress(Path(file.name).read_bytes()))
    print(f"{args.target}: {args.target.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
