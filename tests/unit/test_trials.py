"""What is tried out is seen by no hook of all modules and of saved tensors, and by no mode; it takes no random numbers."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
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


class HookOfModules:
    def __init__(self, kind):
        self.kind = kind

    def __enter__(self):
        register = getattr(nn_module, f"register_module_{self.kind}")
        self.handle = register(lambda *_: SEEN.append(self.kind))

    def __exit__(self, *_):
        self.handle.remove()


KINDS = "forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"
OBSERVERS = {
    **{f"{kind} of all modules": lambda kind=kind: HookOfModules(kind) for kind in KINDS},
    "hook of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: SEEN.append(x) or x, lambda x: x),
    "mode of dispatch": Dispatch,
    "mode of functions": Function,
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_no_observer_sees_a_trial(observer):
    module, x = nn.Linear(4, 4), torch.ones(3, 4, requires_grad=True)

    def run():
        module(x).sin().sum().backward()

    with OBSERVERS[observer]():
        SEEN.clear()
        with pytest.raises(ZeroDivisionError), unobserved(CPU, backward=True):
            run()
            raise ZeroDivisionError
        assert not SEEN
        run()
        assert SEEN


def test_the_default_device_and_the_mode_of_gradients_stay():
    with torch.device("meta"), torch.no_grad():
        with unobserved(CPU, backward=True):
            assert torch.zeros(()).is_meta and torch.is_grad_enabled()
        assert not torch.is_grad_enabled()
