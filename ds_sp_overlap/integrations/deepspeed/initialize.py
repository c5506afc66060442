"""Makes DeepSpeed honour the ``sp_overlap`` section of its config.

DeepSpeed ignores sections that it doesn't know. Importing this file wraps the constructor of
DeepSpeed's engine. An engine whose config has the section then overlaps its model, whether
``deepspeed.initialize`` or a framework makes the engine. The package imports this file once
DeepSpeed is imported. A misspelt name of the section raises an error.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.comm
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from packaging.version import Version

from ...attention.runtime import linear
from ...config import SpOverlapConfig
from ...exchange import transport
from ...warn import inform, warn_once
from ..distributed_attention import has_drop_in
from ..megatron import bridge as megatron_bridge
from ..registry import NO_LAYERS, Report, disable, enable, find_group, is_overlapped
from ..transformers import registration
from . import accelerate

OLDEST = "0.19.7"
# Environment variable for scripts whose config can't be edited: a section as JSON, 1 to switch the
# overlap on, or 0 to switch it off. The keys of this section take precedence over those of the
# config. The section switches the overlap on, unless it sets ``enabled`` itself.
VARIABLE = "DS_SP_OVERLAP"
# Keys from ``python -m ds_sp_overlap run``, which take precedence over the config and the variable.
from_command_line: dict[str, Any] = {}


def install() -> None:
    """Make DeepSpeed's engine honour the ``sp_overlap`` section.

    Nothing changes for a config without the section.

    Raises:
        ImportError: for a DeepSpeed older than `OLDEST`, whose gradients are wrong.
    """
    if Version(Version(deepspeed.__version__).base_version) < Version(OLDEST):
        raise ImportError(
            f"ds_sp_overlap needs DeepSpeed >= {OLDEST}, found {deepspeed.__version__}: before it "
            "the gradients of query and key under sequence-parallel overlap are wrong (DeepSpeed "
            f"PR 5691 as merged); pip install 'deepspeed>={OLDEST}'"
        )
    original = DeepSpeedEngine.__init__
    # Overlap also modules that have hooks of DeepSpeed: ZeRO-3 gathers weights in such hooks.
    linear.harmless.add("deepspeed.")
    transport.log = transport.Log(comms_logger, _all_to_all)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        """Make an engine as DeepSpeed does, then overlap its model. Collective."""
        given = signature.bind(engine, *args, **kwargs).arguments
        # Read the section first, so that its errors are raised before the engine is made.
        config = _asked_for(given["config_class"]._param_dict, given["args"])
        original(engine, *args, **kwargs)
        _honour(config, engine)

    DeepSpeedEngine.__init__ = __init__
    registration.install()


def _all_to_all(recv, send, recv_sizes, send_sizes, group, name):
    """Exchange through ``deepspeed.comm``, so that DeepSpeed's comms logger sees the exchange.

    `transport.C10d` calls this for each exchange while the logger is enabled. See `transport.Log`
    for the arguments and the returned handle.
    """
    return deepspeed.comm.all_to_all_single(
        recv, send, recv_sizes, send_sizes, group=group, async_op=True, log_name=name
    )


def _asked_for(ds_config: dict, args: Any = None) -> SpOverlapConfig | None:
    """Merge the section, the environment variable and the options of ``ds_sp_overlap run``.

    Of these three, a later one overrides the keys of an earlier one.

    Args:
        ds_config: The DeepSpeed config.
        args: The script's arguments, if ``deepspeed.initialize`` was given any. A flag of
            Megatron-DeepSpeed in them stands for a section.

    Returns:
        The merged section, in which ``enabled`` may be false; None if there is neither a section
        nor the variable.

    Raises:
        ValueError: on this rank only: if the section, the variable or their combination is not
            valid; if ``ds_sp_overlap run`` has options, but there is neither section nor variable;
            or if the config also switches on DeepSpeed's AutoSP.
    """
    section, variable = _section(ds_config, args), _variable()
    if section is None and variable is None:
        if from_command_line:
            raise ValueError(
                f"run --{', --'.join(from_command_line)}: the DeepSpeed config has no sp_overlap "
                f"section; add one, or set {VARIABLE}=1"
            )
        return None
    if section is not None and variable is not None:
        warn_once(
            f"sp_overlap: {VARIABLE}={os.environ[VARIABLE]} goes before the section of the "
            "DeepSpeed config, key by key"
        )
    keys = SpOverlapConfig.parse({} if section is None else section).model_dump(exclude_unset=True)
    config = SpOverlapConfig.parse({**keys, **(variable or {}), **from_command_line})
    compile_section = ds_config.get("compile") or {}
    if config.enabled and "autosp" in (compile_section.get("passes") or []):
        raise ValueError(
            'sp_overlap: compile.passes has "autosp", which exchanges by itself; '
            "take it or sp_overlap out"
        )
    return config


def _variable() -> dict[str, Any] | None:
    """Return the keys in the environment variable; None if it is unset or blank.

    "0" gives ``{"enabled": False}``, which switches a section of the config off.

    Raises:
        ValueError: if the variable is neither 1, 0 nor a valid section.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0", "1"):
        return {"enabled": text == "1"} if text else None
    try:
        section = json.loads(text)
    except ValueError:
        section = text
    if not isinstance(section, dict):
        raise ValueError(
            f"environment variable {VARIABLE} must be 1, 0 or a section such as "
            f'{{"head_groups": 2}}, got {text!r}'
        )
    try:
        SpOverlapConfig.parse(section)
    except ValueError as error:
        raise ValueError(f"environment variable {VARIABLE}: {error}") from None
    return {"enabled": True, **section}


def _section(ds_config: dict, args: Any) -> Any:
    """Return the ``sp_overlap`` section, not validated yet; None if there is no section.

    Raises:
        ValueError: if the section would be ignored, since it is misplaced or its name misspelt.
    """
    if lost := next(_misplaced(accelerate.in_yaml(), "deepspeed_config."), None):
        raise ValueError(
            f'Accelerate YAML: "{lost}" goes no further than the launcher, which passes on keys of '
            f"its own alone; take it out and set {VARIABLE} in the environment to the section (or "
            "to 1), or put the section into the file of deepspeed_config_file"
        )
    if misplaced := next(_misplaced(ds_config), None):
        raise ValueError(
            f'DeepSpeed config: nobody reads "{misplaced}"; the section is called "sp_overlap" and '
            "belongs at the top level of the config (to switch it off give it "
            '"enabled": false)'
        )
    # Without a section, take the section that a flag of Megatron-DeepSpeed stands for.
    return ds_config.get("sp_overlap", megatron_bridge.section(args))


def _misplaced(config: dict[str, Any], within: str = "") -> Iterator[str]:
    """Yield the keys that obviously mean ``sp_overlap``, but are misspelt or not at the top level.

    Args:
        config: The config, or a section inside the config.
        within: The path of this section, such as "zero_optimization."; empty for the top level.
    """
    for key, value in config.items():
        letters = re.sub("[^a-z]", "", str(key).lower())
        similarity = difflib.SequenceMatcher(None, letters, "spoverlap").ratio()
        # A ratio above 0.85 allows about one wrong letter of nine, or two missing ones.
        typo = letters.startswith("sp") and similarity > 0.85
        synonym = re.match("(ds|deepspeed)?(sp|sequenceparallel|ulysses)overlap", letters)
        if not synonym and not typo:
            if isinstance(value, dict):
                yield from _misplaced(value, f"{within}{key}.")
        # Skip keys that begin with another character than a letter, such as "_sp_overlap": such
        # keys are taken for commented out.
        elif str(key)[0].isalpha() and (within or key != "sp_overlap"):
            yield within + key


def _agree(config: SpOverlapConfig | None, group: Any) -> None:
    """Raise ValueError, on all ranks of ``group``, if the ranks' sections differ. Collective."""
    sections = transport.gather("nothing" if config is None else repr(config), group)
    for rank, section in enumerate(sections):
        if section == sections[0]:
            continue
        first, other = dist.get_global_rank(group, 0), dist.get_global_rank(group, rank)
        raise ValueError(
            f"sp_overlap: the ranks ask for different things (rank {first}: {sections[0]}; "
            f"rank {other}: {section}); give all nodes the same config, and the same {VARIABLE}, "
            "which the deepspeed launcher passes on to other nodes only out of a file "
            ".deepspeed_env"
        )


def _warn_of_losses_and_gradients(engine: DeepSpeedEngine) -> None:
    """Warn of wrong losses and gradients of DeepSpeed's sequence parallelism, also without overlap.

    ZeRO-3's reduce-scatter divides gradients by the sp size once too often; only transformers'
    Trainer compensates for this division. The Trainer's loss ignores gradient accumulation. With
    the mesh of the DeepSpeed config, gradients are not summed over the sp group.
    """
    size, steps = getattr(engine, "sequence_parallel_size", 1), engine.gradient_accumulation_steps()
    if size == 1:
        return
    stage, by_trainer = engine.zero_optimization_stage(), _trainer() is not None
    if stage == 3 and engine.zero_reduce_scatter() and not by_trainer:
        warn_once(
            "sp_overlap: ZeRO-3 with reduce_scatter (the default) divides gradients by the sp size "
            f"({size}) once too often if each rank's loss is its share of the mean, without the "
            'overlap as well; set "reduce_scatter": false in zero_optimization. Losses that are '
            "gathered and averaged need it as it is (docs/loss_and_gradients.md)"
        )
    if steps > 1 and by_trainer:
        warn_once(
            f"sp_overlap: with sequence parallelism (sp size {size}) the Trainer weighs each of "
            f"{steps} accumulated batches alike, whatever its labels, and sums them where it "
            "should take the mean, without the overlap as well (docs/loss_and_gradients.md)"
        )
    if groups.mesh_device is not None and stage < 3:
        warn_once(
            "sp_overlap: with sequence_parallel_size and data_parallel_size in its config, "
            f"DeepSpeed does not sum gradients over the sp group (size {size}), without the "
            "overlap as well; sum them before each optimizer step, or give deepspeed.initialize "
            "the mpu of register_with_transformers (docs/configuration.md)"
        )


def _trainer() -> Any:
    """Return the ``Trainer`` that is on the call stack; None if there is none.

    Looks for a call of a method in transformers' ``trainer`` modules, and returns its ``self``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("transformers.trainer"):
            if "self" in frame.f_locals:
                return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _refuse_trainer() -> None:
    """Raise ValueError for a trainer of TRL that doesn't support a split sequence."""
    trl = [kind.__name__ for kind in type(_trainer()).__mro__ if kind.__module__.startswith("trl.")]
    if trl and "SFTTrainer" not in trl:
        raise ValueError(
            f"sp_overlap: TRL's {trl[0]} computes its loss from whole rows, which no rank has with "
            "sequence parallelism, without the overlap as well; take a loop of your own "
            "(docs/recipes.md has its loss)"
        )


def _honour(config: SpOverlapConfig | None, engine: DeepSpeedEngine) -> None:
    """Overlap the model of a new engine as its section asks; rank 0 logs the report.

    Collective over ``engine.seq_data_parallel_group``, or over all ranks with pipeline parallelism.

    Args:
        config: The section. None changes no model, but still logs warnings, and compares the ranks'
            sections, since another rank may have a section.
        engine: The engine.

    Raises:
        ValueError: on all ranks, if the ranks' sections differ, or if `enable` raises.
    """
    size = getattr(engine, "sequence_parallel_size", 1)
    # Layers may have an sp group that DeepSpeed doesn't know.
    if size == 1 and (group := find_group(engine.module)) is not None:
        size = dist.get_world_size(group)
    # With a pipeline, all ranks compare, since all stages take part in `_enable_stages`.
    if engine.pipeline_parallelism:
        _agree(config, dist.group.WORLD)
    elif size > 1:
        _agree(config, engine.seq_data_parallel_group)
    _warn_of_losses_and_gradients(engine)
    if config is None:
        if size > 1 and not has_drop_in(engine.module) and not is_overlapped(engine.module):
            warn_once(
                f"sp_overlap: sequence parallelism is on (sp size {size}) and ds_sp_overlap "
                'imported, but the DeepSpeed config has no "sp_overlap" section: nothing is '
                f'overlapped. Add "sp_overlap": {{}} at its top level, set {VARIABLE}=1, or call '
                "ds_sp_overlap.enable(engine.module)"
            )
        return
    if config.enabled:
        _refuse_moe_of_mpu(engine)
        if size > 1:
            _refuse_trainer()
    enable_all = _enable_stages if engine.pipeline_parallelism else _enable
    report = enable_all(config, engine)
    if not config.enabled and (_variable() or {}).get("enabled") is False:
        report.note = f"off ({VARIABLE}={os.environ[VARIABLE]})"
    inform(str(report))


def _refuse_moe_of_mpu(engine: DeepSpeedEngine) -> None:
    """Raise ValueError if DeepSpeed's MoE treats the mpu's sp ranks as tensor-parallel ranks."""
    mpu = groups.mpu
    if not hasattr(mpu, "get_sequence_parallel_group") or engine.sequence_parallel_size == 1:
        return
    if bwc_tensor_model_parallel_world_size(mpu) == 1:
        return
    # An mpu with sp ranks but no tensor-parallel ranks also reports the sp ranks as model-parallel
    # ranks. The MoE then keeps 1/P of the tokens on each sp rank, as if all sp ranks had the same
    # tokens.
    sp_ranks = dist.get_process_group_ranks(mpu.get_sequence_parallel_group())
    tp_ranks = dist.get_process_group_ranks(bwc_tensor_model_parallel_group(mpu))
    for name, module in engine.module.named_modules():
        if isinstance(module, MoE) and sp_ranks == tp_ranks:  # guard: no MoE drops sp ranks' tokens
            raise ValueError(
                f"sp_overlap: {name} (deepspeed.moe.layer.MoE) takes the sp group of the mpu, ranks "
                f"{sp_ranks}, for tensor-parallel ranks, and drops tokens that only one of them "
                "has, with and without sp_overlap; give deepspeed.initialize no mpu, and set "
                "sequence_parallel_size and data_parallel_size in the DeepSpeed config"
            )


def _enable(config: SpOverlapConfig, engine: DeepSpeedEngine) -> Report:
    """Overlap the model of ``engine``. Collective over its sp group."""
    return enable(engine.module, config, gradient_process_group=engine.seq_data_parallel_group)


def _enable_stages(config: SpOverlapConfig, engine: DeepSpeedEngine) -> Report:
    """Overlap the stages of a pipeline that have attention layers. Collective over all ranks.

    Returns:
        The report of this rank's stage; for a stage without attention layers, a report with a note.

    Raises:
        ValueError: on all ranks, if a stage can't be overlapped, or if no stage has attention
            layers.
    """
    report, error = Report(note="no attention layer in this stage of the pipeline"), ""
    # Assume attention layers in a stage that has an sp group: the group of a
    # `DistributedAttention` in the stage, or the group that DeepSpeed itself has.
    has_layers = find_group(engine.module) is not None
    some_stage_has = any(transport.gather(has_layers))
    # If no stage seems to have layers, each stage calls `enable`, to get its error message.
    if has_layers or not some_stage_has:
        try:
            report = _enable(config, engine)
        except ValueError as refusal:
            error = str(refusal)
    outcomes = transport.gather((error, bool(report.layers)))
    is_somewhere = any(overlapped for _, overlapped in outcomes)
    for rank, (text, _) in enumerate(outcomes):
        # If another stage has attention layers, ignore the error of a stage that has none.
        if text and not (is_somewhere and NO_LAYERS in text):
            # All ranks restore their stages, including the stages that had no error.
            disable(engine.module)
            raise ValueError(f"{text} (in the pipeline stage of rank {rank})")
    return report


# Call `install` here, and not in the hook that runs after the import of DeepSpeed: if this file is
# the first to import DeepSpeed, the hook runs before the rest of this file.
install()
