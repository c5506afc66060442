"""Makes small transformers models, and trains them for a few steps through DeepSpeed on each rank of a test."""

import contextlib
import gc
import math
from dataclasses import dataclass, field
from unittest import mock

import deepspeed
import deepspeed.comm
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_sp_overlap
import ds_sp_overlap.integrations.registry
from ds_sp_overlap.integrations.transformers import attention_function
from tests.harness.ranks import leaves, on_ranks
from tests.harness.reference import relative_error

VOCABULARY, SEQ, BATCH = 64, 32, 2


def tiny(family="llama", heads=4, kv_heads=2, layers=2, dtype=torch.float32, implementation="sdpa", seed=0, **more):
    """Make a model with random weights, equal on all ranks; ``seed`` None leaves the random generator unseeded."""
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    if family == "qwen3":
        sizes["head_dim"] = 16
    config = AutoConfig.for_model(family, **{**sizes, **more})
    config._attn_implementation = implementation
    if seed is not None:
        torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_sinks(model, implementation):
    """Set the attention implementation of a model, and large attention sinks if the model has sinks; return the model."""
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data = 3 * torch.randn_like(parameter)
    model.config._attn_implementation, model.config._experts_implementation = implementation, "eager"  # default: no fp64
    return model


def with_images(kind):
    """Make a tiny vision-language model, in which a text token has a position on each of three axes."""
    text = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2], partial_rotary_factor=1.0),
    )  # fmt: skip
    config = AutoConfig.for_model(kind, text_config=text)
    for name, size in dict(depth=1, hidden_size=32, embed_dim=32, num_heads=2, intermediate_size=32, out_hidden_size=32).items():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, size)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def batches(steps, batch=BATCH, seq=SEQ, seed=5):
    """Draw token ids [steps, b, s]."""
    return torch.randint(1, VOCABULARY, (steps, batch, seq), generator=torch.Generator().manual_seed(seed))


def cut(tokens, rank, size, positions=None):
    """Return this rank's slices of input_ids, labels and position_ids; labels are shifted before the sequence is cut."""
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
    return {
        key: value.chunk(size, dim=1)[rank].contiguous()
        for key, value in (("input_ids", tokens), ("labels", labels), ("position_ids", positions))
    }


def mean_loss(model, inputs, group):
    """Return the mean loss over the sp group.

    The sum of the ranks' gradients is the gradient of the whole sequence.
    """
    logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    labels = inputs["labels"]
    share = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
    total, count = share.detach().clone(), (labels != -100).sum()
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
        torch.distributed.all_reduce(count, group=group)
    return (share + (total - share).detach()) / count


def sequence_parallel(model, size, implementation="sdpa", **more):
    """Register stock Ulysses; return its mpu."""
    return UlyssesSPAttentionHF.register_with_transformers(model, implementation, size, BATCH, **more)


def forget_sequence_parallel():
    """Remove all state of sequence parallelism from the process."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    # As in `_release_sequence_parallel_groups` of DeepSpeed 0.19.8.
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    deepspeed.utils.groups.mpu = None
    deepspeed.utils.groups.mesh_device = None
    gc.collect()


@contextlib.contextmanager
def forgetting():
    """Remove all state of sequence parallelism from the process after the body."""
    try:
        yield
    finally:
        forget_sequence_parallel()


@contextlib.contextmanager
def sequence_parallel_model(size, *args, stock=None, **options):
    """Yield a tiny model under stock Ulysses, and its sp group; ``stock`` holds options of `sequence_parallel`."""
    model = tiny(*args, **options)
    with forgetting():
        mpu = sequence_parallel(model, size, model.config._attn_implementation, **(stock or {}))
        yield model, mpu.get_sequence_parallel_group()
        ds_sp_overlap.disable(model)


@contextlib.contextmanager
def engine_of(model, config, size=2):
    """Yield DeepSpeed's engine of a model under stock Ulysses, and the sp group (None at size 1); clean up afterwards."""
    with forgetting():
        mpu = sequence_parallel(model, size)
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        yield engine, mpu and mpu.get_sequence_parallel_group()
        ds_sp_overlap.disable(engine.module)
        engine.destroy()


@contextlib.contextmanager
def scaled_values(factor):
    """Plant a fault while the body runs: multiply the v of overlapped attention by ``factor``."""
    right = attention_function.local_attention

    def scaled(module, q, k, v, **options):
        return right(module, q, k, v * factor, **options)

    with mock.patch.object(attention_function, "local_attention", scaled):
        yield


def overlapped_layers(model):
    """Return the names of the attention layers that the package overlaps."""
    bound = ds_sp_overlap.integrations.registry._undo
    return [name for name, module in model.named_modules() if module in bound and "ttention" in type(module).__name__]


def ds_config(stage=0, accumulation=1, dtype=torch.float32, optimizer="AdamW", **more):
    parameters = {"lr": 1e-2, "torch_adam": True} if optimizer == "AdamW" else {"lr": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": optimizer, "params": parameters},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "stage3_param_persistence_threshold": 0,
                              "reduce_scatter": stage != 3},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    return {**config, **more}


@dataclass
class Run:
    """Holds the results of a training run.

    losses, norms   the loss of the last microbatch, and the gradient norm, of each step
    evaluated       the loss of each evaluation
    resumed         the losses and norms of the steps after a resume
    gradients       the gradients of the first step
    parameters      the parameters after the last step
    """

    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    evaluated: list = field(default_factory=list)
    resumed: list = field(default_factory=list)
    gradients: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)

    def equals(self, other):
        """Return whether all results are equal bit for bit."""
        pairs = zip(leaves(vars(self)), leaves(vars(other)), strict=True)
        return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)

    def distance(self, other):
        """Return {"gradients" or the name of a list of numbers: largest relative difference}."""
        far = {"gradients": max((relative_error(self.gradients[name], x) for name, x in other.gradients.items()), default=0.0)}
        for name in ("losses", "norms", "evaluated", "resumed"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            far[name] = max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)
        return far

    def gradient_error(self, other):
        """Return the norm of the difference of all gradients, relative to the norm of all gradients of ``other``."""
        off = sum((self.gradients[name] - x).double().square().sum() for name, x in other.gradients.items())
        return (off / sum(x.double().square().sum() for x in other.gradients.values())).sqrt().item()


def step(engine, tokens, rank, size, group, at_gradients=None):
    """Run one optimizer step over the microbatches in ``tokens``; return the loss of the last microbatch."""
    for microbatch in tokens:
        loss = mean_loss(engine, cut(microbatch, rank, size), group)
        engine.backward(loss)
        if at_gradients is not None and engine.is_gradient_accumulation_boundary():
            at_gradients(engine)
        engine.step()
    return loss.item()


def train_run(
    rank, size, section, family="llama", steps=5, accumulation=1, stage=0, dtype=torch.float32, prepare=None,
    optimizer="SGD", more_config=None, **model_options,
):  # fmt: skip
    """Train for a few steps, with stock Ulysses if ``section`` is None; return a `Run`.

    The default is SGD, since AdamW's first steps amplify rounding. Every ``size`` ranks are a replica. The replicas' batches have
    different lengths.
    """
    replica, rank = divmod(rank, size)
    model = tiny(family, **model_options)
    if prepare is not None:
        model = prepare(model)
    config = ds_config(stage, accumulation, dtype, optimizer, **(more_config or {}))
    if section is not None:
        config["sp_overlap"] = section
    run = Run()

    def note_gradients(engine):
        if not run.gradients:
            named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
            run.gradients = {name: deepspeed.utils.safe_get_full_grad(p).clone().float() for name, p in named}

    with engine_of(model, config, size) as (engine, group):
        tokens = batches(steps * accumulation, seq=SEQ * (1 + replica), seed=5 + replica)
        for tokens in tokens.unflatten(0, (steps, accumulation)):
            run.losses.append(step(engine, tokens, rank, size, group, note_gradients))
            norm = engine.get_global_grad_norm()  # None in fp32 at stage 0, where no ZeRO optimizer computes the norm
            run.norms += [] if norm is None else [float(norm)]
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            run.parameters = {name: p.detach().clone().float() for name, p in engine.module.named_parameters()}
    return run


# Comparisons with the whole sequence.

FP64 = 1e-10
EXACT = dict(dtype=torch.float64, initializer_range=0.2)


def outcome(model, tokens, rank, size, group, positions=None, mask=None):
    """Return the logits of the whole sequence, and every gradient summed over the sp group.

    With ``mask`` [b, s], tokens where the mask is 0 add nothing to the loss, and their logits are 0.
    """
    inputs = cut(tokens, rank, size, positions)
    labels = inputs.pop("labels")
    if mask is not None:
        inputs["attention_mask"] = mask = mask.chunk(size, 1)[rank]
        labels = labels.masked_fill(mask == 0, -100)
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return of_all_ranks({"logits": logits.detach() if mask is None else logits.detach() * mask[..., None]}, found, size, group)


def of_all_ranks(local, gradients, size, group):
    """Gather tensors [b, s/P, ..] and sum gradients over an sp group; without a group, return both as they are."""
    if group is not None:
        for name, x in local.items():
            parts = [torch.empty_like(x) for _ in range(size)]
            torch.distributed.all_gather(parts, x.contiguous(), group=group)
            local[name] = torch.cat(parts, 1)
        for gradient in gradients.values():
            torch.distributed.all_reduce(gradient, group=group)
    return {**local, **gradients}


def worst(found, expected):
    assert found.keys() == expected.keys()
    return max(relative_error(found[name], x) for name, x in expected.items())


def packed(lengths_of_rows):
    """Return position_ids [b, s] that restart with each document."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in lengths_of_rows])


def document_by_document(model, tokens, lengths_of_rows):
    """Return logits and gradients as `outcome` does, but run every document alone.

    As in a packed batch, the label of a document's last token is the first token of the next document.
    """
    labels = cut(tokens, 0, 1)["labels"]
    model.zero_grad()
    rows = []
    for row, lengths in enumerate(lengths_of_rows):
        pieces = tokens[row].split(lengths)
        rows.append(torch.cat([model(input_ids=piece[None], use_cache=False).logits[0] for piece in pieces]))
    logits = torch.stack(rows)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return {"logits": logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


BOTH = [{"head_groups": 1, "on_unsupported": "error"}, {"head_groups": 2, "on_unsupported": "error"}]


def errors_of(
    rank, options, sections=BOTH, size=2, lengths=None, positions=None, mask=None, prepare=lambda model: model, reports=None
):
    """Return the errors of a model against the whole sequence: with stock Ulysses, then with each section.

    If stock Ulysses raises, its error is infinite.

    lengths   lengths of the documents of each row, which are compared with documents run alone; None for whole rows
    reports   a list to which the reports of `enable` are added
    """
    tokens, options = batches(1)[0], {**EXACT, **options}
    if lengths is None:
        whole = outcome(prepare(tiny(**options)), tokens, 0, 1, None, positions, mask)
    else:
        positions, whole = packed(lengths), document_by_document(tiny(**options), tokens, lengths)
    with sequence_parallel_model(size, **options) as (model, group):
        model, errors = prepare(model), []
        for section in (None, *sections):
            if section is not None:
                report = ds_sp_overlap.enable(model, section, group)
                reports is None or reports.append(report)
            try:
                errors.append(worst(outcome(model, tokens, rank, size, group, positions, mask), whole))
            except Exception:
                if section is not None:
                    raise
                errors.append(math.inf)
        ds_sp_overlap.disable(model)
    return errors


def _errors_beyond_stock(rank, cases):
    return [errors_of(rank, options, lengths=lengths) for options, lengths in cases]


def assert_right_where_stock_is_wrong(cases, lengths=None, limits=None):
    """Assert that, for each of ``cases``, the overlapped model is right, and stock Ulysses is wrong.

    cases     options of `tiny`
    lengths   lengths of the documents of each row; None for whole rows
    limits    limits of the error by family; `FP64` for other families
    """
    cases = [(options, lengths) for options in cases]
    for figures in on_ranks(2, _errors_beyond_stock, cases):
        for (options, _), (stock, *errors) in zip(cases, figures, strict=True):
            assert stock > 1e-3, f"{options}: stock is right as well: this is no longer beyond it"
            assert max(errors) < (limits or {}).get(options.get("family"), FP64), (
                f"{options}: one and two head groups are off by {errors}"
            )
