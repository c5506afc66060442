"""Packs tensors before a transfer, and unpacks tensors after it.

``ops`` chooses between PyTorch's copies and the compiled operators of csrc/; ``kernels`` loads
the compiled operators, and ``build`` compiles them.
"""
