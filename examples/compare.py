"""Compare the losses of a run without the overlap with those of a run with it: python compare.py OFF.log ON.log.

The exit status is 1 if they differ, or if nothing was overlapped.

The overlap adds the same numbers, partly in another order. In fp32, this changes a few roundings of 6e-8 in a step, which training
amplifies: after twenty steps, the losses of these examples differed by at most 4e-7, and the gradient norms by 3e-6. TOLERANCE is
about thirty times these differences. An error of a thousandth in v of every layer changes the loss by eight times the tolerance. In
bf16, a rounding is 4e-3, and two runs of stock with sums in different orders differ by 1e-2 in the loss and 1e-1 in the gradient
norm.
"""

import argparse
import itertools
import re
import sys
from pathlib import Path

TOLERANCE = {"fp32": (1e-5, 1e-4), "bf16": (3e-2, 3e-1)}  # relative: loss, gradient norm
NUMBER = r'"?:? +([-+.\deEnaif]+)'  # matches in 'loss 6.2', '"loss": 6.2' and 'lm loss: 6.2E+00'

parser = argparse.ArgumentParser()
parser.add_argument("off", type=Path)
parser.add_argument("on", type=Path)
parser.add_argument("--dtype", choices=TOLERANCE, default="fp32")
given = parser.parse_args()


def curves(log):
    """Return the losses and the gradient norms of all steps."""
    return [[float(x) for x in re.findall(rf"\b{name}{NUMBER}", log)] for name in ("loss", "grad.norm")]


off, on = given.off.read_text(), given.on.read_text()
overlapped = re.search(r"sp_overlap over sp size .*: [1-9]\d* of \d+ layers overlapped(\n  .*)*", on)
if not overlapped:
    sys.exit(f"nothing was overlapped: {given.on} has no line that says so")
print(overlapped.group(), "\n")
(loss, norm), (loss_on, norm_on) = curves(off), curves(on)
if not loss or len(loss) != len(loss_on) or len(norm) != len(norm_on):
    sys.exit(f"{given.off} has {len(loss)} losses and {len(norm)} norms, {given.on} {len(loss_on)} and {len(norm_on)}")

off_and_on = {"loss": (loss, loss_on), "gradient norm": (norm, norm_on)} if norm else {"loss": (loss, loss_on)}
print("step" + "".join(f"  {what + ' off':>18} {'on':>12}" for what in off_and_on))
for step, values in enumerate(zip(*itertools.chain(*off_and_on.values())), 1):
    print(f"{step:4}" + "".join(f"  {x:18.7g} {y:12.7g}" for x, y in zip(values[::2], values[1::2])))
agree = True
for (what, (off, on)), tolerance in zip(off_and_on.items(), TOLERANCE[given.dtype]):
    apart = max(abs(x - y) / abs(x) for x, y in zip(off, on))
    agree = agree and apart <= tolerance  # False for nan
    print(f"{what}: apart by {apart:.1e} at most, relative (tolerance {tolerance:.0e} in {given.dtype})")
print("they agree" if agree else "THEY DIFFER")
sys.exit(not agree)
