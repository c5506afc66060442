"""Pack and unpack, as operators: PyTorch's copies, and the compiled kernels of csrc/."""
