"""What is tried out with somebody's modules is seen by no hook and no mode, and changes nothing; a second trial begins like the first."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sp_overlap.attention.runtime.linear import harmless
from ds_sp_overlap.attention.unobserved import unobserved

CPU = torch.device("cpu")


class Remembering(nn.Linear):
    """Keeps what it saw in every way that a module can."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls, self.shapes, self.by_rows, self.last, self.mean = 0, [], {}, None, torch.zeros(())
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("first", None)
        self.dropout = nn.Dropout(0.5)
        self.weight.main_grad = torch.zeros(4, 4)

    def forward(self, x):
        y = super().forward(self.dropout(x)) + torch.rand(())
        self.calls += 1
        self.shapes.append(x.shape)
        self.by_rows[len(x)] = self.calls
        self.mean += 1
        self.largest.fill_(y.detach().max())
        self.first = self.largest if self.first is None else self.first
        self.last, self.made = y, True
        self.weight.main_grad += 1
        return y * self.calls


def state_of(module):
    parts = [{name: x for name, x in vars(part).items()} for part in module.modules()]
    values = (module.mean, module.largest, module.weight, module.weight.main_grad)
    inside = list(module.shapes), dict(module.by_rows), [x.tolist() for x in values]
    return parts, inside, torch.get_rng_state().tolist(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled()


def tried(module, x, backward=True):
    with unobserved(module.modules(), CPU, backward):
        y = module(x)
        inputs = [p for p in module.parameters() if p.requires_grad]
        return [y.detach(), *(torch.autograd.grad(y.sum(), inputs) if y.requires_grad else [])]


@pytest.mark.parametrize("autocast", [False, True])
def test_two_trials_are_alike_and_leave_everything_as_it_was(autocast):
    module, x = Remembering(), torch.ones(3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = state_of(module)
        first, second = tried(module, x), tried(module, x)
        assert str(state_of(module)) == str(before)
        assert len(first) == 3 and all(map(torch.equal, first, second))
        # A cast that autocast keeps of a trial without gradients would cut the weight off.
        tried(module, x, backward=False)
        module(x).sum().backward()
    assert module.weight.grad is not None and module.calls == 1


def test_what_raises_leaves_everything_as_it_was():
    module = Remembering()
    before = state_of(module)
    with pytest.raises(RuntimeError, match="shapes"):
        tried(module, torch.ones(3, 5))
    assert str(state_of(module)) == str(before)


def note_in(seen, kind, result=None):
    return lambda *args: seen.append(kind) or result


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        SEEN.append(operation)
        return operation(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return function(*args, **(kwargs or {}))


SEEN: list = []


def saved(stack, module):
    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: SEEN.append(x) or x, lambda x: x))


def hooked(kind):
    def hook(stack, module):
        stack.callback(getattr(module, f"register_{kind}")(note_in(SEEN, kind)).remove)

    return hook


def hooked_everywhere(kind):
    def hook(stack, module):
        stack.callback(getattr(nn_module, f"register_module_{kind}")(note_in(SEEN, kind)).remove)

    return hook


KINDS = "forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"
OBSERVERS = {
    **{kind: hooked(kind) for kind in KINDS},
    **{f"{kind} of all modules": hooked_everywhere(kind) for kind in KINDS},
    "hook of a parameter": lambda stack, module: module.weight.register_hook(note_in(SEEN, "hook")),
    "hook behind accumulation": lambda stack, module: module.weight.register_post_accumulate_grad_hook(note_in(SEEN, "hook")),
    "hook of saved tensors": saved,
    "mode of dispatch": lambda stack, module: stack.enter_context(Dispatch()),
    "mode of functions": lambda stack, module: stack.enter_context(Function()),
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_no_observer_sees_a_trial(observer):
    module, x = Remembering(), torch.ones(3, 4, requires_grad=True)
    with contextlib.ExitStack() as stack:
        OBSERVERS[observer](stack, module)
        SEEN.clear()
        tried(module, x)
        count = len(SEEN)
        module(x).sum().backward()
        assert not count and SEEN


def test_hooks_by_which_a_framework_gathers_weights_run_and_then_nothing_is_differentiated():
    module, seen = Remembering(), []

    def gather(*args):
        seen.append("gathered")

    gather.__module__ = next(iter(harmless))
    module.register_forward_pre_hook(gather)
    module.register_forward_pre_hook(note_in(seen, "seen"))
    assert len(tried(module, torch.ones(3, 4))) == 1 and seen == ["gathered"]
    module(torch.ones(3, 4))
    assert seen == ["gathered", "gathered", "seen"]


def test_the_default_device_stays():
    with torch.device("meta"), unobserved((), CPU):
        assert torch.zeros(()).is_meta
