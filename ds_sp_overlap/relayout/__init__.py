"""Packs and unpacks tensors on either side of a transfer.

``ops`` has the operators as PyTorch's copies. ``kernels`` loads the compiled operators of csrc/,
which ``build`` compiles, and which refuse arguments that don't fit.
"""
