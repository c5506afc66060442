"""Packs and unpacks tensors on either side of a transfer.

``ops`` chooses between PyTorch's copies and the compiled operators of csrc/. ``kernels`` loads
these operators, and ``build`` compiles them.
"""
