"""What Megatron-DeepSpeed's own ``pretrain_gpt.py`` lacks on a machine without GPUs. Put this folder on PYTHONPATH.

Python runs a module of this name at its start; here only in a rank of a run with MEGATRON_ON_CPU set. Everything is
replaced from outside, no file of Megatron-DeepSpeed is touched.
"""

import os

if "MEGATRON_ON_CPU" in os.environ and "RANK" in os.environ:
    import stand_ins

    stand_ins.install()
    import recorder

    recorder.install()
