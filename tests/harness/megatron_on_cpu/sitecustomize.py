"""Installs the parts that Megatron-DeepSpeed's own ``pretrain_gpt.py`` lacks on a machine without GPUs.

Put this folder on PYTHONPATH: Python runs a module of this name when it starts. This one acts only in the ranks of a run with
MEGATRON_ON_CPU set. It changes functions in memory, and no file of Megatron-DeepSpeed.
"""

import os

if "MEGATRON_ON_CPU" in os.environ and "RANK" in os.environ:
    import stand_ins

    stand_ins.install()
    import recorder

    recorder.install()
