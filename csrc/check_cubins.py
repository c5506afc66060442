"""Compile every .cu to cubins for sm_80 and sm_90, and fail where a kernel spills registers.

    python csrc/check_cubins.py [--require]

Needs nvcc and torch's headers, no GPU. Without nvcc nothing is checked, which is said loudly; with --require it is a failure.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

here = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location(
    "build_kernels", here.parent / "ds_sp_overlap/relayout/build.py"
)
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

ARCHITECTURES = ("sm_80", "sm_90")


def faults(log: str) -> tuple[int, list[str]]:
    """Kernels that ptxas reports on, and those that spill or keep a stack frame."""
    found = re.findall(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
    )
    return len(found), [
        f"{name}: stack {s}, spill stores {w}, loads {r} bytes"
        for name, s, w, r in found
        if s + w + r != "000"
    ]


def main() -> int:
    if build.nvcc() is None:
        print(
            "*** csrc/check_cubins.py: NO NVCC HERE, THE CUDA KERNELS WERE NOT COMPILED AND NOT CHECKED ***",
            file=sys.stderr,
        )
        return int("--require" in sys.argv)
    bad = 0
    for source in sorted(here.glob("*.cu")):
        for architecture in ARCHITECTURES:
            command = build.cuda_compile([f"-arch={architecture}"])[:-1]
            with tempfile.TemporaryDirectory() as scratch:
                command += [
                    "-Xptxas",
                    "-v",
                    "-cubin",
                    str(source),
                    "-o",
                    f"{scratch}/kernels.cubin",
                ]
                ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                print(ran.stdout + ran.stderr, file=sys.stderr)
                return 1
            kernels, spills = faults(ran.stderr)
            most = max(map(int, re.findall(r"Used (\d+) registers", ran.stderr)), default=0)
            print(
                f"{source.name} {architecture}: {kernels} kernels, at most {most} registers, {len(spills)} with spills"
            )
            print("\n".join(spills), end="\n" if spills else "")
            bad += len(spills) + (kernels == 0)  # no report at all would be blindness, not health
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
