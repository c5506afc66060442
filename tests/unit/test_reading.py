"""Tests the reader, which runs the forward of an attention layer on labels: it must understand the forward, or refuse it."""

import contextlib
import copy
import functools
import inspect
import types

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: F401, used by the forwards below
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward  # noqa: F401
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils.deprecation import deprecate_kwarg

from ds_sp_overlap.integrations.inspect import attention
from ds_sp_overlap.integrations.inspect.accounting import Unknown
from ds_sp_overlap.integrations.inspect.attention import Reader, Source
from ds_sp_overlap.integrations.inspect.library import digest, replaced
from ds_sp_overlap.integrations.inspect.rotary_function import Table, rotary_of
from ds_sp_overlap.rotary import rotate
from tests.harness.cases import since_transformers
from tests.harness.guards import Watched, notices
from tests.harness.zoo import MADE_UP, compiled

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 24
FORWARD = """
def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    cos, sin = position_embeddings
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    o, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, window=self.config.window, **kwargs)
    o = o.reshape(*hidden_states.shape[:-1], -1)
    return self.o_proj(o), weights
"""
SCALE = """
def scale(self):
    return 0.5
"""
Q_NORM, K_NORM = (f"self.{kind}_norm(self.{kind}_proj(hidden_states).view(shape)).transpose(1, 2)" for kind in "qk")
V, ROTATE = "self.v_proj(hidden_states).view(shape).transpose(1, 2)", "apply_rotary_pos_emb(q, k, cos, sin)"
BARE = [(norm, V.replace("v_proj", f"{kind}_proj")) for kind, norm in (("q", Q_NORM), ("k", K_NORM))]  # pairs that remove the norms


class Layer(Qwen3Attention):
    """An attention layer whose forward is `FORWARD` with ``changes``; its weights are on the meta device."""

    def __init__(self, *changes):
        namespace = {**globals(), "__name__": MADE_UP}
        type(self).forward, type(self).scale = compiled(FORWARD + SCALE, changes, namespace), namespace["scale"]
        sizes = dict(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM)
        with torch.device("meta"):
            super().__init__(LlamaConfig(**sizes, attention_dropout=0.25, attention_bias=True), 0)
            self.qkv_proj = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
            self.tanh, self.in_norm = nn.Tanh(), nn.RMSNorm(HIDDEN)
            self.wide_norm, self.each_norm = nn.RMSNorm(HEADS * HEAD_DIM), nn.LayerNorm((HEADS, HEAD_DIM))
            self.sinks, self.of_tokens = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HIDDEN))
        self.config.window, self.scaling = 5, 0.5
        source = inspect.getsource(self.forward)
        for name in [*self._modules, *self._parameters]:
            if f"self.{name}" not in source:  # remove parameters that the forward does not use
                delattr(self, name)


def layer(*changes):
    """Make a layer of a new class, with a changed forward."""
    return type("Attention", (Layer,), {"__module__": MADE_UP})(*changes)


def reading(*changes):
    return Reader("layer", layer(*changes), []).reading


def test_a_layer_is_read():
    reader = Reader("layer", layer(), [])
    found = reader.reading
    rows = tuple(range(0, HEADS * HEAD_DIM, HEAD_DIM))
    assert found.sources == {
        "q": Source(("q_proj",), rows, "q_norm"),
        "k": Source(("k_proj",), rows[:KV_HEADS], "k_norm"),
        "v": Source(("v_proj",), rows[:KV_HEADS]),
    }
    assert (found.head_dim, found.output, found.passes_keywords, found.per_head) == (HEAD_DIM, "o_proj", True, {})
    assert reader.reading.options[True] == dict(dropout=0.25, scaling=0.5, window=5)
    assert found.rotary.neighbours is False and found.first_rows is None


OTHERWISE = {
    "heads in the middle": ("q = " + Q_NORM, "q = self.q_norm(self.q_proj(hidden_states).view(shape).transpose(1, 2))"),
    "with a name of its own": ("q, k = " + ROTATE, "a, b = q, k\n    q, k = apply_rotary_pos_emb(a, b, *position_embeddings)"),
    "by a condition": ("q, k = " + ROTATE, "if self.scaling:\n        q, k = " + ROTATE),
    "without keywords of its own": ("attention_mask, dropout", "attention_mask=attention_mask, dropout"),
}


@pytest.mark.parametrize("spelling", OTHERWISE)
def test_spelling_makes_no_difference(spelling):
    assert reading(OTHERWISE[spelling]) == reading()


@pytest.mark.parametrize("hidden", [HEAD_DIM, HIDDEN])
def test_heads_may_be_as_wide_as_the_hidden_states(hidden, monkeypatch):
    monkeypatch.setitem(globals(), "HIDDEN", hidden)
    assert reading(*BARE).heads == (HEADS, KV_HEADS)


def test_a_norm_over_all_heads_belongs_to_the_projection():
    found = reading((Q_NORM, "self.wide_norm(self.q_proj(hidden_states)).view(shape).transpose(1, 2)"))
    assert found.sources["q"].chain == ("q_proj", "wide_norm") and found.sources["q"].norm is None


def test_a_norm_behind_the_rotation_is_told_from_one_before_it():
    behind = ("q, k = " + ROTATE, "q, k = " + ROTATE + "\n    q, k = self.q_norm(q), self.k_norm(k)")
    found = reading(*BARE, behind)
    assert [found.sources[kind].last for kind in "qk"] == [True, True] and found.sources["q"].norm == "q_norm"


def test_dims_that_the_forward_leaves_out_of_the_rotation_pass_through():
    assert reading().rotary.partial is False
    parts = "a, b = apply_rotary_pos_emb(q[..., :4], k[..., :4], cos, sin)"
    found = reading(("q, k = " + ROTATE, parts + "\n    q, k = torch.cat((a, q[..., 4:]), -1), torch.cat((b, k[..., 4:]), -1)"))
    assert found.rotary.partial is True


def test_heads_of_a_fused_projection_are_found_where_they_lie():
    fused = "self.qkv_proj(hidden_states).view(*hidden_states.shape[:-1], KV_HEADS, 4, HEAD_DIM)"
    q = (Q_NORM, f"{fused}[..., :2, :].flatten(2, 3).transpose(1, 2)")
    k = (K_NORM, f"{fused}[..., 2, :].transpose(1, 2)")
    v = (V, f"{fused}[..., 3, :].transpose(1, 2)")
    with pytest.raises(Unknown, match="calls qkv_proj more than once"):
        reading(q, k, v)
    once = ("shape = (*hidden", f"fused = {fused}\n    shape = (*hidden")
    q, k, v = ((old, new.replace(fused, "fused")) for old, new in (q, k, v))
    found = reading(once, q, k, v)
    assert [found.sources[kind].rows for kind in "qkv"] == [(0, 8, 32, 40), (16, 48), (24, 56)]
    assert found.first_rows == {kind: source.rows for kind, source in found.sources.items()}


def test_what_is_kept_for_each_head_is_known_by_being_a_parameter_of_as_many():
    assert reading(("window=self.config.window", "s_aux=self.sinks")).per_head == {"s_aux": "sinks"}


Q = "q = " + Q_NORM
O = "o = o.reshape(*hidden_states.shape[:-1], -1)"  # noqa: E741
WRONG = {
    "one element of q off": (Q, Q + "\n    q = torch.cat((q[..., :-1], q[..., -1:] + 1e-9), -1)"),
    "a head across the ends of the projection": (Q_NORM, "torch.cat(self.q_proj(hidden_states).split((28, 4), -1)[::-1], -1).view(shape).transpose(1, 2)"),
    "rows of the batch moved": (Q, Q + ".flip(0)"),
    "dims backwards": (Q, Q + ".flip(3)"),
    "dims across heads": (Q, "q = self.q_norm(self.q_proj(hidden_states).view(*shape[:-2], self.head_dim, -1).mT).transpose(1, 2)"),
    "other hidden states": (Q_NORM, "self.q_norm(self.q_proj(hidden_states + 1).view(shape)).transpose(1, 2)"),
    "a weight of its own": (Q_NORM, "self.q_norm(self.q_proj(hidden_states * self.of_tokens).view(shape)).transpose(1, 2)"),
    "a norm for each head": (Q_NORM, "self.each_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)"),
    "a norm across heads and dims": (Q_NORM, "self.q_norm(self.q_proj(hidden_states).view(*shape[:-2], -1, 4).mT).transpose(1, 2)"),
    "no norm": (Q_NORM, "self.tanh(self.q_proj(hidden_states).view(shape)).transpose(1, 2)"),
    "a norm in front": ("shape = (*hidden", "hidden_states = self.in_norm(hidden_states)\n    shape = (*hidden"),
    "a norm of v": ("v = self.v_proj(hidden_states).view(shape)", "v = self.k_norm(self.v_proj(hidden_states).view(shape))"),
    "only q rotated": ("q, k = " + ROTATE, f"q, _ = {ROTATE}"),
    "v rotated": ("q, k = " + ROTATE, f"q, k = {ROTATE}\n    v, _ = apply_rotary_pos_emb(v, k, cos, sin)"),
    "rotated by other tables": ("q, k = " + ROTATE, "q, k = apply_rotary_pos_emb(q, k, cos, -sin)"),
    "rotated by the tables of other tokens": ("q, k = " + ROTATE, "q, k = apply_rotary_pos_emb(q.roll(1, 2), k, cos, sin)\n    q = q.roll(-1, 2)"),
    "last dims rotated": (
        "q, k = " + ROTATE,
        "a, b = apply_rotary_pos_emb(q[..., 4:], k[..., 4:], cos, sin)\n    q, k = torch.cat((q[..., :4], a), -1), torch.cat((k[..., :4], b), -1)",
    ),
    "another mask": ("v, attention_mask,", "v, None,"),
    "two calls": ("    o, weights = ", "    attend(self, q, k, v, attention_mask)\n    o, weights = "),
    "a gate": (O, O + " * torch.sigmoid(self.q_proj(hidden_states))"),
    "another projection in evaluation": ("self.v_proj(hidden", "(self.v_proj if self.training else self.k_proj)(hidden"),
    "a module on the side": (O, O + "\n    self.wide_norm(q)"),
    "an argument nobody knows": ("past_key_values=None", "past_key_values=None, shared=None"),
    "a tensor for attention": ("window=self.config.window", "bias=hidden_states"),
    "no attention": ("o, weights = attend(self, q, k, v, attention_mask", "o, weights = (lambda *_, **__: (q, None))(self, q, k, v, attention_mask"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_layer_that_computes_something_else_is_not_known(what):
    with pytest.raises(Unknown) as caught:
        reading(WRONG[what])
    assert "NameError" not in str(caught.value) and "SyntaxError" not in str(caught.value)


def renaming(old, new):
    """Read a layer whose forward is decorated to rename the argument ``old`` to ``new``, as in transformers."""
    module = layer(
        ("past_key_values=None", "cache=None"), ("if past_key_values is", "if cache is"), ("= past_key_values.", "= cache.")
    )
    type(module).forward = deprecate_kwarg(old, version="99.0", new_name=new)(type(module).forward)
    return Reader("layer", module, []).reading


def test_a_cache_may_have_a_new_name():
    assert renaming("past_key_values", "cache") == reading()


def test_no_other_argument_may():
    """The overlap would read the argument under the wrong name."""
    for old, new in (("mask", "attention_mask"), ("past_key_values", "window"), ("window", "cache"), ("window", None)):
        with pytest.raises(Unknown):
            renaming(old, new)


IF_GIVEN = "if position_embeddings is not None:\n        cos, sin = position_embeddings\n        q, k = apply_rotary_pos_emb(q, k, cos, sin)"
ELSE_BY_POSITIONS = f"{IF_GIVEN}\n    elif position_ids is not None:\n        q = q * position_ids[:, None, :, None]"


@pytest.mark.parametrize(("rotation", "optional"), [(IF_GIVEN, True), (ELSE_BY_POSITIONS, False)])
def test_tables_are_optional_where_nothing_else_tells_positions(rotation, optional):
    found = reading(
        ("attention_mask=None, past", "attention_mask=None, position_ids=None, past"),
        ("cos, sin = position_embeddings\n    q, k = apply_rotary_pos_emb(q, k, cos, sin)", rotation),
    )
    assert found.rotary.optional is optional


def test_another_default_device_makes_no_difference():
    found = reading()
    with torch.device("meta"):
        assert reading() == found


def test_the_numbers_by_which_zero_3_counts_modules_are_no_sizes():
    """If fifty numbers in a row counted as sizes, no prime would be left; a layer with adapters has about fifty modules."""
    module = layer()
    module.v_proj.adapters = nn.ModuleList(nn.Identity() for _ in range(50))
    for number, part in enumerate(module.modules(), 180):
        part.ds_id = number
    assert Reader("layer", module, []).reading == reading()


def test_what_a_forward_looked_at_is_looked_at_again():
    module = layer(("self.config.window", "self.config.window if self.scaling else self.k_proj"))
    reader = Reader("model.layer", module, [])
    module.config.window, module.attention_dropout = 7, 0.75
    assert reader.options(module) == dict(dropout=0.75, scaling=0.5, window=7)
    module.eval()
    assert reader.options(module) == dict(dropout=0.0, scaling=0.5, window=7)
    module.scaling = 0.0
    with pytest.raises(
        RuntimeError, match="model.layer: Attention computes something else since scaling changed .* call ds_sp_overlap.enable"
    ):
        reader.options(module)


def twin(module):
    """Return a copy of the layer, with the same config object and with its own parameters."""
    return copy.deepcopy(module, {id(module.config): module.config})


def test_a_layer_like_one_that_was_read_is_not_read_again(monkeypatch):
    known, one = [], layer()
    reader = Reader("layers.0", one, known)
    monkeypatch.setattr(attention, "_read", None)
    other = Reader("layers.1", two := twin(one), known)
    assert known == [reader] and other.reading == reader.reading and other.options(two) == reader.options(one)


UNLIKE = {
    "another scale": (lambda module: setattr(module, "scaling", 0.25), ()),
    "a parameter of its own": (lambda module: None, (("window=self.config.window", "s_aux=self.sinks"),)),
    "what the other has not": (
        lambda module: setattr(module, "cap", 3.0),
        (("window=self.config.window", "cap=getattr(self, 'cap', None)"),),
    ),
    "a method of its own": (
        lambda module: setattr(module, "scale", types.MethodType(lambda self: 0.75, module)),
        (("scaling=self.scaling", "scaling=self.scale()"),),
    ),
    "other heads": (lambda module: setattr(module, "k_proj", nn.Linear(HIDDEN, HEADS * HEAD_DIM, device="meta")), ()),
    "another norm": (lambda module: setattr(module, "q_norm", nn.Tanh()), ()),
    "a config of its own": (lambda module: setattr(module, "config", with_window(7)), ()),
}


def with_window(window):
    config = layer().config
    config.window = window
    return config


@pytest.mark.parametrize("what", UNLIKE)
def test_a_layer_unlike_one_that_was_read_is_read_by_itself(what):
    change, changes = UNLIKE[what]
    known, one = [], layer(*changes)
    reader = Reader("layers.0", one, known)
    change(other := twin(one))
    with contextlib.suppress(Unknown):  # the reader may refuse the other layer, once it reads it
        assert known == [reader, Reader("layers.1", other, known)]


# Rotary functions.


def halves(q, k, cos, sin):
    return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotate(k, cos.unsqueeze(1), sin.unsqueeze(1))


ROTARIES = {
    "llama": ("as_given", False, False, "promoted"),
    "phi3": ("as_given", True, False, "promoted"),
    "olmo2": ("as_given", False, False, "kept"),
    "cohere": ("as_given", False, True, "fp32"),
    "glm": ("first_half_each_twice", True, True, "promoted"),
    "ernie4_5": ("first_half_each_twice", False, True, "fp32"),
    "gpt_oss": ("half_twice", False, False, "promoted"),
}
# In older versions of transformers, modernbert_decoder has the function of llama, and nanochat doesn't exist.
NEWER_ROTARIES = {"modernbert_decoder": ("as_given", False, False, "fp32"), "nanochat": ("backwards", False, False, "promoted")}
HEADS_FIRST = ("batch", 3, "seq", 16), ("batch", 2, "seq", 16), Table.COS, Table.SIN


NEWER = [pytest.param(*rotary, marks=since_transformers("5.1")) for rotary in NEWER_ROTARIES.items()]


@pytest.mark.parametrize("family, expected", [*ROTARIES.items(), *NEWER])
def test_a_rotary_embedding_is_known_by_what_it_does(family, expected):
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["apply_rotary_pos_emb"])
    found = rotary_of(module.apply_rotary_pos_emb, HEADS_FIRST, ())
    assert (found.tables.__name__, found.partial, found.neighbours, found.rounding) == expected


def complex_in(exact):
    """Return a function that rotates neighbours as complex numbers, in the dtype to which ``exact`` casts."""

    def turned(x, table):
        pairs = torch.view_as_complex(exact(x).reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table[:, :, None, :]).flatten(3).type_as(x)

    return lambda q, k, table: (turned(q, table), turned(k, table))


@pytest.mark.parametrize(
    "rounding, exact", {"fp32": lambda x: x.float(), "kept": lambda x: x.float() if x.dtype.itemsize == 2 else x}.items()
)
@pytest.mark.parametrize("head_dim, heads", [(4, 8), (16, 4), (64, 3), (128, 2)])
def test_a_rotation_of_complex_numbers_is_known_however_the_cpu_rounds_their_products(rounding, exact, head_dim, heads):
    given = ("batch", "seq", heads, head_dim), ("batch", "seq", heads // 2, head_dim), Table.WHOLE
    found = rotary_of(complex_in(exact), given, ())
    assert (found.tables.__name__, found.neighbours, found.rounding) == ("of_complex", True, rounding)


def as_a_module(function):
    """Return the module with which the package ``kernels`` replaces a function."""

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    Func.__module__ = "kernels.layer.func"
    return Func()


def test_a_rotary_function_may_be_a_module_as_long_as_its_forward_stays(monkeypatch):
    expected, rotary = reading(), as_a_module(apply_rotary_pos_emb)
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", rotary)
    reader = Reader("layer", module := layer(), [])
    assert reader.reading == expected and reader.options(module)["window"] == 5
    rotary.forward = lambda q, k, cos, sin: (q, k)
    with pytest.raises(RuntimeError, match="computes something else since forward changed"):
        reader.options(module)


NO_ROTARIES = {
    "nothing": lambda q, k, cos, sin: (q, k),
    "k as it is": lambda q, k, cos, sin: (halves(q, k, cos, sin)[0], k),
    "added": lambda q, k, cos, sin: (q + cos.unsqueeze(1), k + cos.unsqueeze(1)),
    "heads unlike": lambda q, k, cos, sin: halves(q * torch.arange(q.shape[1]).view(-1, 1, 1), k, cos, sin),
    "off by little": lambda q, k, cos, sin: halves(q * 1.001, k, cos, sin),
    "other tokens": lambda q, k, cos, sin: halves(q, k, cos.roll(1, 1), sin),
    "swapped": lambda q, k, cos, sin: halves(k, q, cos, sin),
    "as it is in fp32": lambda q, k, cos, sin: (q, k) if q.dtype == torch.float32 else halves(q, k, cos, sin),
    "rounded on the way": lambda q, k, cos, sin: tuple(x.bfloat16().to(x.dtype) for x in halves(q, k, cos, sin)),
}


@pytest.mark.parametrize("what", NO_ROTARIES)
def test_a_function_that_does_something_else_is_no_rotary_embedding(what):
    with pytest.raises((LookupError, Unknown)):
        rotary_of(NO_ROTARIES[what], HEADS_FIRST, ())


class Plain:
    def expand_kv(self):
        return 1


class Decorated(Plain):
    expand_kv = functools.wraps(Plain.expand_kv)(lambda self: 2 * Plain.expand_kv(self))


class Cached(Plain):
    expand_kv = functools.cache(Plain.expand_kv)


def test_what_somebody_decorates_is_known_by_no_digest():
    assert digest(Plain, "expand_kv") != "" and digest(Decorated, "expand_kv") == "" and digest(Cached, "expand_kv") == ""


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-8.0, 8.0)


def helper(x):
    return x


OWN = {  # a user's own code, and the message about it
    "a scripted function": (lambda: layer((Q_NORM, f"scripted({Q_NORM})")), "uses scripted"),
    "a function": (lambda: layer((Q_NORM, f"helper({Q_NORM})")), "uses helper"),
    "a method": (lambda: changed("scale", lambda self: 0.5), "uses scale"),
    "a forward": (lambda: changed("forward", lambda self, x: x), "uses forward"),
    "a class": (lambda: changed("__module__", __name__), "Attention is no class of transformers"),
    "a wrapper": (
        lambda: changed("forward", functools.wraps(type(layer()).forward)(lambda self, *args, **kwargs: None)),
        "uses forward",
    ),
}


def changed(name, value):
    module = layer(("scaling=self.scaling", "scaling=self.scale()"))
    setattr(type(module), name, value)
    return module


@pytest.mark.parametrize("what", OWN)
def test_code_of_ones_own_is_not_read(what):
    made, message = OWN[what]
    with pytest.raises(Unknown, match=message):
        Reader("layer", made(), [])


DEFINITIONS = """
SHARED = {"scale": 0.5}
def of_default(shared=[0.5]): return shared[0]
def of_import(): from os import environ; return float(environ.get("SCALE", 0.5))
def of_count(): global COUNT; COUNT = 1; return COUNT / 2
def of_function(): return SCALE
def around(scale): return lambda: scale
of_closure, of_cache, SCALE = around(0.5), functools.cache(of_function), 0.5
class Shared:
    scale = 0.5
"""
HIDDEN_STATES = {  # hidden state from which a layer may take its scale; later calls could not notice a change of the state
    "a dict": ("SHARED['scale']", "uses SHARED"),
    "a module": ("contextlib.nullcontext(0.5).enter_result", "uses contextlib"),
    "ranks": ("2.0 if torch.distributed.is_initialized() else 0.5", "asks for distributed"),
    "torch": ("2.0 if torch.get_default_dtype() is torch.float64 else 0.5", "asks for get_default_dtype"),
    "torch's kernels": ("2.0 if not torch.backends.cuda.flash_sdp_enabled() else 0.5", "asks for backends"),
    "an import": ("of_import()", "imports or sets a global"),
    "what it has set": ("of_count()", "imports or sets a global"),
    "a default": ("of_default()", "uses of_default"),
    "a closure": ("of_closure()", "uses of_closure"),
    "a cache": ("of_cache()", "uses of_cache"),
    "a class": ("Shared.scale", "uses Shared"),
    "its class": ("self.__class__.of_class", "asks for __class__"),
    "its base": ("super(Layer, self).scale()", "asks for super"),
    "its names": ("globals()['SCALE']", "asks for globals"),
    "a function of its own": ("self.function()", "looks into function"),
    "a method that it names nowhere": ("getattr(self, self.called)()", "looks up scale by no name"),
}


def by_hidden_state(what):
    """Return a layer that computes its scale from a hidden state, and the message about this state."""
    expression, message = HIDDEN_STATES[what]
    module = layer(("scaling=self.scaling", f"scaling={expression}"), ("def forward", f"{DEFINITIONS}\ndef forward"))
    module.function, module.called = type(module).forward.__globals__["of_function"], "scale"
    type(module).of_class = 0.5
    return module, message


@pytest.mark.parametrize("what", HIDDEN_STATES)
def test_a_layer_that_goes_by_hidden_state_is_not_read(what):
    module, message = by_hidden_state(what)
    with pytest.raises(Unknown, match=message):
        Reader("layer", module, [])


def test_a_constant_of_another_file_is_looked_at_again(monkeypatch):
    names = {"__name__": "transformers.made_up_elsewhere", "SCALE": 0.5}
    exec("def of_file(): return SCALE", names)
    monkeypatch.setitem(globals(), "of_file", names["of_file"])
    reader = Reader("layer", module := layer(("scaling=self.scaling", "scaling=of_file()")), [])
    names["SCALE"] = 2.0
    assert reader.options(module)["scaling"] == 2.0


def test_a_registry_of_ones_own_is_not_taken_for_transformers(monkeypatch):
    monkeypatch.setitem(globals(), "ALL_ATTENTION_FUNCTIONS", copy.deepcopy(ALL_ATTENTION_FUNCTIONS))
    with pytest.raises(Unknown, match="uses ALL_ATTENTION_FUNCTIONS"):
        reading()


def test_a_parameter_that_is_one_is_no_constant_one():
    """A parameter that is 1 must count as a change: if its factor were left out, it would get no gradient."""
    assert attention.has_changed(types.SimpleNamespace(scale=nn.Parameter(torch.ones(()))), ("scale",), 1.0)
    assert not attention.has_changed(types.SimpleNamespace(scale=1.0), ("scale",), 1.0)


test_the_suite_notices_without_the_guard = notices(
    Watched("only a cache", "return True", test_no_other_argument_may),
    Watched("no code of one's own", "if False:", functools.partial(test_code_of_ones_own_is_not_read, "a class")),
    Watched("no function of one's own", "elif False:", functools.partial(test_code_of_ones_own_is_not_read, "a function")),
    Watched(
        "all globals are seen", "if False:", functools.partial(test_a_layer_that_goes_by_hidden_state_is_not_read, "an import")
    ),
)


def test_names_that_are_replaced_come_back():
    names = {"first": 1}
    with contextlib.suppress(ValueError), replaced(names, "first", "a stand-in"), replaced(names, "new", 2):
        assert names == {"first": "a stand-in", "new": 2}
        raise ValueError
    assert names == {"first": 1}
