"""Installs the parts that Megatron-DeepSpeed's own ``pretrain_gpt.py`` lacks on a machine without GPUs.

Put this folder on PYTHONPATH: Python runs a module named sitecustomize when it starts. The module acts only in ranks (RANK is set)
of a run with MEGATRON_ON_CPU set. It changes functions in memory, and leaves the files of Megatron-DeepSpeed as they are.
"""

import os

if "MEGATRON_ON_CPU" in os.environ and "RANK" in os.environ:
    import stand_ins

    stand_ins.install()
    import recorder

    recorder.install()
