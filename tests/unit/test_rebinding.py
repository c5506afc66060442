"""Tests `rebind`, which replaces a module's forward, also if another library wraps the new forward."""

import copy
import functools

from torch import nn

from ds_sp_overlap.integrations.rebinding import is_ours, rebind


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_wrapper_around_our_forward_stays_when_ours_goes():
    """Accelerate's hooks are such wrappers; they copy all attributes of the wrapped forward."""
    module, calls = Doubling(), []
    undo = rebind(module, lambda own, x: 10 * x)
    assert is_ours(module) and is_ours(copy.deepcopy(module)) and module(1) == 10
    ours = module.forward

    @functools.wraps(ours)
    def counting(x):
        calls.append(x)
        return ours(x)

    module.forward = counting
    assert not is_ours(module) and module(1) == 10
    undo(module)
    assert module.forward is counting and module(1) == 2 and calls == [1, 1]


def test_our_forward_goes_and_gives_back_what_was_there():
    module = Doubling()
    module.forward = before = lambda x: 3 * x
    undo = rebind(module, lambda own, x: 10 * x)
    assert module(1) == 10
    undo(module)
    assert module.forward is before and module(1) == 3


def test_what_runs_without_our_forward_is_that_of_the_class_as_it_is_now(monkeypatch):
    module = Doubling()
    undo = rebind(module, lambda own, x: own(x) + 1)
    monkeypatch.setattr(Doubling, "forward", lambda self, x: 5 * x)
    assert module(1) == 6 and copy.deepcopy(module)(1) == 5
    undo(module)
    assert module(1) == 5
