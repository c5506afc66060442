"""Reads the ``sp_overlap`` section of DeepSpeed's config, also if Accelerate passes it on."""
