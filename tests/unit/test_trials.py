"""Tests that a user's modes don't see trials; `frameworks/test_unobserved.py` tests hooks and random numbers."""

import weakref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sp_overlap.attention.unobserved import unobserved

CPU = torch.device("cpu")
SEEN: list = []


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        SEEN.append(operation)
        return operation(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Dispatch, Function])
def test_no_mode_sees_a_trial(mode):
    module, x = nn.Linear(4, 4), torch.ones(3, 4, requires_grad=True)

    def run():
        module(x).sin().sum().backward()

    with mode():
        SEEN.clear()
        with pytest.raises(ZeroDivisionError), unobserved(CPU, backward=True):
            run()
            raise ZeroDivisionError
        assert not SEEN
        run()
        assert SEEN


def test_the_default_device_and_the_mode_of_gradients_stay():
    with torch.device("meta"), torch.no_grad():
        modes = _get_current_function_mode_stack()
        with unobserved(CPU, backward=True):
            assert torch.zeros(()).is_meta and torch.is_grad_enabled()
        assert not torch.is_grad_enabled() and _get_current_function_mode_stack() == modes


def test_a_trial_keeps_nothing_alive():
    """A backward to some inputs does not run all nodes. A node that saved its own output must not keep itself alive."""
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    with unobserved(CPU, backward=True):
        torch.autograd.grad((weight.exp() * x).sum(), [x])
    alive = weakref.ref(weight)
    del weight
    assert alive() is None
