"""Packs and unpacks tensors on either side of a transfer.

``ops`` has the operators as PyTorch's copies; ``arguments`` refuses arguments that don't fit.
``kernels`` loads the compiled operators of csrc/, which ``build`` compiles.
"""
