"""Weight gradients of experts in chunks of tokens: those of all tokens at once, made once, whatever the forward does with weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_sp_overlap.attention.runtime.deferred import Shadows, Wgrads
from ds_sp_overlap.attention.runtime.linear import PLAIN
from ds_sp_overlap.attention.runtime.stacks import Stack
from tests.harness.launches import Made

EXPERTS, WIDTH, INSIDE = 4, 16, 24


class Experts(nn.Module):
    """Two stacks; as sorted tokens go to experts in turn, behind the last expert come ``spare`` tokens of none."""

    def __init__(self, multiply, is_transposed=False, spare=0):
        super().__init__()
        self.multiply, self.is_transposed, self.spare = multiply, is_transposed, spare
        shapes = ((WIDTH, INSIDE), (INSIDE, WIDTH)) if is_transposed else ((INSIDE, WIDTH), (WIDTH, INSIDE))
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape)) for shape in shapes)

    def forward(self, x):
        here = len(x) - self.spare * bool(len(x))
        ends = torch.tensor([here // 2, here // 2, here * 3 // 4, here], dtype=torch.int32)  # the second has none
        y = self.multiply(torch.tanh(self.multiply(x, self.up, ends, self.is_transposed)), self.down, ends, self.is_transposed)
        return torch.cat([y[:here], x[here:]])


def grouped(x, stack, ends, is_transposed):
    return F.grouped_mm(x, stack if is_transposed else stack.transpose(-2, -1), offs=ends)


def one_by_one(x, stack, ends, is_transposed):
    """As transformers' eager experts: an index that is a tensor, and no product for an expert without tokens."""
    ys, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            weight = stack[torch.tensor(expert)]
            ys.append(x[start:end] @ weight if is_transposed else F.linear(x[start:end], weight))
        start = end
    ys.append(x.new_zeros(len(x) - start, ys[0].shape[1] if ys else stack.shape[1 if not is_transposed else 2]))
    return torch.cat(ys)


def unknown(x, stack, ends, is_transposed):
    """Gather each token's weight, which is left to autograd."""
    weights = stack[torch.searchsorted(ends, torch.arange(len(x), dtype=torch.int32), right=True)]
    return torch.einsum("ti,tio->to" if is_transposed else "ti,toi->to", x, weights)


def swapped_with_itself(x, stack, ends, is_transposed):
    """A transposition that moves nothing."""
    starts = [0, *ends.tolist()]
    products = [F.linear(x[a:b], stack[at].transpose(1, -1)) for at, (a, b) in enumerate(zip(starts, ends.tolist()))]
    return torch.cat(products)


def both(x, stack, ends, is_transposed):
    return grouped(x, stack, ends, is_transposed) + 0.5 * unknown(x, stack, ends, is_transposed)


def gradients(module, chunks, together=False, backwards=1):
    """Gradients of all parameters and chunks, the number of tensors as large as a stack in backward, and calls of hooks."""
    chunks = [x.clone().requires_grad_() for x in chunks]
    module.zero_grad()
    called = []
    hooks = [p.register_hook(lambda g, name=name: called.append(name)) for name, p in module.named_parameters()]
    for _ in range(backwards):
        if together:
            ys = [module(x) for x in chunks]
        else:
            shadows = Shadows(Wgrads([module], "layers.0", PLAIN))
            ys = [shadows.of(module)(x) for x in chunks]
            shadows.end()
        with Made(module.up, module.down) as made:
            torch.cat(ys).float().square().sum().backward()
    for hook in hooks:
        hook.remove()
    found = {name: p.grad for name, p in module.named_parameters()} | {str(at): x.grad for at, x in enumerate(chunks)}
    return found, made.count, sorted(called)


def off(mine, plain):
    return max(((mine[name] - plain[name]).norm() / (plain[name].norm() + 1e-30)).item() for name in plain)


CHUNKS = [torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(length)) for length in (8, 12, 4, 0)]
FP32 = 1e-6  # roundings of sums in another order are 2e-7; a token that goes to another expert gives more than 0.1


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("multiply", [grouped, one_by_one])
def test_gradients_of_all_chunks_are_made_once(multiply, is_transposed):
    torch.manual_seed(0)
    module = Experts(multiply, is_transposed)
    plain, each, _ = gradients(module, CHUNKS, together=True)
    mine, once, called = gradients(module, CHUNKS)
    assert off(mine, plain) < FP32
    assert once == 2 < each // 3  # one of each stack
    assert called == ["down", "up"]


@pytest.mark.parametrize("multiply", [unknown, both, swapped_with_itself])
def test_what_is_not_known_is_left_to_autograd(multiply):
    torch.manual_seed(0)
    module = Experts(multiply)
    chunks = CHUNKS[:3]
    plain, *_ = gradients(module, chunks, together=True)
    mine, _, called = gradients(module, chunks)
    assert off(mine, plain) < FP32 and called == ["down", "up"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_loses_no_gradient(use_reentrant):
    """A reentrant one runs a backward of its own, between two products of the backward around it."""

    def multiply(x, stack, ends, is_transposed):
        y = checkpoint(lambda x: one_by_one(x, stack, ends, is_transposed), x, use_reentrant=use_reentrant)
        return y + one_by_one(x, stack, ends, is_transposed)

    torch.manual_seed(0)
    module = Experts(multiply)
    plain, *_ = gradients(module, CHUNKS[:3], together=True)
    mine, *_ = gradients(module, CHUNKS[:3])
    assert off(mine, plain) < FP32


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("multiply", [grouped, one_by_one])
def test_weights_may_be_let_go_until_backward(multiply, is_transposed):
    """As ZeRO-3 does, which gathers them elsewhere for backward: a view would be of the old memory, and keep it."""
    torch.manual_seed(0)
    module = Experts(multiply, is_transposed)
    plain, *_ = gradients(module, CHUNKS, together=True)
    module.zero_grad()
    xs = [x.clone().requires_grad_() for x in CHUNKS]
    shadows = Shadows(Wgrads([module], "layers.0", PLAIN))
    ys = [shadows.of(module)(x) for x in xs]
    shadows.end()
    for parameter in module.parameters():
        gathered, parameter.data = parameter.data, parameter.data.clone()
        gathered.fill_(float("nan"))
    torch.cat(ys).float().square().sum().backward()
    mine = {name: p.grad for name, p in module.named_parameters()} | {str(at): x.grad for at, x in enumerate(xs)}
    assert off(mine, plain) < FP32


def test_a_product_with_a_bias_is_rounded_as_torchs_own():
    torch.manual_seed(0)
    module, bias = Experts(one_by_one), torch.randn(INSIDE)
    shadow = Shadows(Wgrads([module], "layers.0", PLAIN)).of(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for args, kwargs in (((bias,), {}), ((), {"bias": bias})):
            mine, plain = (F.linear(CHUNKS[0], of.up[0], *args, **kwargs) for of in (shadow, module))
            assert mine.dtype == plain.dtype == torch.bfloat16 and torch.equal(mine, plain)


def test_tokens_of_no_expert_give_no_gradient():
    torch.manual_seed(0)
    module = Experts(one_by_one, spare=2)
    plain, *_ = gradients(module, CHUNKS, together=True)
    module.multiply = grouped
    mine, *_ = gradients(module, CHUNKS)
    assert off({name: mine[name] for name in ("up", "down")}, {name: plain[name] for name in ("up", "down")}) < FP32


@pytest.mark.parametrize("length", [8, 80])  # operands of one chunk: a fifth of a stack, two stacks
def test_no_more_is_held_than_a_stack(length, monkeypatch):
    torch.manual_seed(0)
    module, held, add = Experts(grouped), [], Stack.add

    def recording(stack, operands):
        add(stack, operands)
        held.append(sum(x.left.nbytes + x.right.nbytes for x in stack.chunks))

    monkeypatch.setattr(Stack, "add", recording)
    chunks = [torch.randn(length, WIDTH) for _ in range(4)]
    plain, *_ = gradients(module, chunks, together=True)
    mine, made, _ = gradients(module, chunks)
    assert off(mine, plain) < FP32
    assert max(held) <= module.up.nbytes and (max(held) > 0) == (length == 8)
    assert made == 2 * (1 if length == 8 else len(chunks))  # products, added in place


def test_gradients_accumulate_over_backwards():
    torch.manual_seed(0)
    module = Experts(one_by_one)
    once, *_ = gradients(module, CHUNKS)
    once = {name: 2 * gradient for name, gradient in once.items()}
    twice, *_ = gradients(module, CHUNKS, backwards=2)
    assert off(twice, once) < FP32


@pytest.mark.parametrize("multiply", [grouped, one_by_one])
def test_half_precision_is_summed_in_one_product(multiply):
    """Sums over chunks are rounded by autograd; here they aren't, so that the error is that of one product."""
    torch.manual_seed(0)
    module = Experts(multiply)
    exact, *_ = gradients(module, CHUNKS[:3], together=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=multiply is one_by_one):
        dtype = torch.float32 if multiply is one_by_one else torch.bfloat16
        module = module.to(dtype)
        mine, *_ = gradients(module, [x.to(dtype) for x in CHUNKS[:3]])
        plain, *_ = gradients(module, [x.to(dtype) for x in CHUNKS[:3]], together=True)
    names = "up", "down"
    of_mine, of_plain = (off({n: x[n].float() for n in names}, {n: exact[n] for n in names}) for x in (mine, plain))
    assert all(mine[name].dtype == dtype for name in names)
    assert of_mine < 1.2 * of_plain < 0.1


def test_a_grouped_product_of_two_dtypes_fails_as_torchs_own():
    module = Experts(grouped).to(torch.bfloat16)
    shadow = Shadows(Wgrads([module], "layers.0", PLAIN)).of(module)
    for run in (module, shadow):
        with pytest.raises(RuntimeError, match="dtype"):
            run(torch.zeros(8, WIDTH))


def test_weights_that_are_not_reached_get_no_gradient():
    module = Experts(one_by_one)
    x = torch.zeros(0, WIDTH, requires_grad=True)
    shadows = Shadows(Wgrads([module], "layers.0", PLAIN))
    called = []
    module.up.register_hook(called.append)
    shadows.of(module)(x).sum().backward()
    assert module.up.grad is None and not called


def test_frozen_weights_and_evaluation_wait_for_nothing():
    module = Experts(grouped)
    with torch.no_grad():
        assert not Wgrads([module], "", PLAIN).stacks
    module.requires_grad_(False)
    assert not Wgrads([module], "", PLAIN).stacks
