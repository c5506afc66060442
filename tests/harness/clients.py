"""What users of transformers' Trainer and TRL's SFTTrainer write, trained for a few steps on each rank of a test."""

import contextlib
import gc
import types
from dataclasses import dataclass, field

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from peft import LoraConfig, get_peft_model
from transformers import ByT5Tokenizer, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_sp_overlap
from tests.harness.models import (
    SEQ,
    VOCABULARY,
    batches,
    cut,
    ds_config,
    engine_of,
    forget_sequence_parallel,
    overlapped_layers,
    tiny,
)

STEPS, BATCH = 4, 2
LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
EXPERTS = dict(
    family="mixtral", num_local_experts=4, output_router_logits=True, head_dim=8
)  # stock Ulysses takes no None for head_dim


@dataclass
class Log:
    """Of each step the loss and the grad norm, of each evaluation its loss; of the steps after a resume the same again."""

    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    evaluated: list = field(default_factory=list)
    resumed: list = field(default_factory=list)
    bound: int = 0  # attention layers that are overlapped

    def equals(self, other):
        """Bit for bit."""
        return self._numbers() == other._numbers()

    def distance(self, other):
        """Largest relative difference."""
        return max(
            abs(a - b) / abs(b)
            for mine, theirs in zip(self._numbers(), other._numbers())
            for a, b in zip(mine, theirs, strict=True)
        )

    def _numbers(self):
        return self.losses, self.norms, self.evaluated, self.resumed


@contextlib.contextmanager
def fresh():
    """Accelerate, transformers and DeepSpeed as if nothing had been trained, afterwards too."""

    def forget():
        forget_sequence_parallel()
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
        gc.collect()

    forget()
    try:
        yield
    finally:
        forget()


def rows(number, labels=True):
    """Examples of one length, as a data set."""
    for tokens in batches(number, 1):
        yield {"input_ids": tokens[0], **({"labels": tokens[0].clone(), "position_ids": torch.arange(SEQ)} if labels else {})}


def _trainer(client, section, folder, stage, lora, checkpointing, accumulation, evaluate, moe, more_config, model, more):
    """A Trainer or an SFTTrainer, sequence parallel over all ranks."""
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({} if section is None else {"sp_overlap": section}), **(more_config or {}),
    }  # fmt: skip
    model = model() if model else tiny(initializer_range=0.2, **(EXPERTS if moe else {}))
    arguments = dict(
        output_dir=folder, deepspeed=config, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True,
        gradient_accumulation_steps=accumulation, gradient_checkpointing=checkpointing is not None,
        gradient_checkpointing_kwargs={"use_reentrant": checkpointing} if checkpointing is not None else None,
        parallelism_config=ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        ),
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="steps", save_steps=2, eval_strategy="steps" if evaluate else "no", eval_steps=2,
        per_device_eval_batch_size=BATCH, seed=1,
        ignore_data_skip=True,  # of stock Ulysses' loader nothing can be skipped on a resume
    ) | (more or {})  # fmt: skip
    count = STEPS * accumulation * BATCH
    lora = LoraConfig(**LORA, init_lora_weights=False) if lora else None
    if client == "Trainer":
        torch.manual_seed(1)  # LoRA's weights
        return Trainer(
            model=get_peft_model(model, lora) if lora else model, args=TrainingArguments(**arguments),
            train_dataset=list(rows(count)), eval_dataset=list(rows(BATCH)),
        )  # fmt: skip
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model, args=SFTConfig(**arguments, pad_to_multiple_of=2, dataset_num_proc=None), peft_config=lora,
        train_dataset=Dataset.from_list([{key: x.tolist() for key, x in row.items()} for row in rows(count, False)]),
        eval_dataset=Dataset.from_list([{key: x.tolist() for key, x in row.items()} for row in rows(BATCH, False)]),
        processing_class=ByT5Tokenizer(),
    )  # fmt: skip


def train(
    rank, client, section, folder, *, stage=1, lora=False, checkpointing=None, accumulation=1, evaluate=False, resume=False,
    moe=False, more_config=None, model=None, more=None,
):  # fmt: skip
    """Train with a ``client``, "Trainer" or "SFTTrainer"; ``section`` None trains stock. Returns a `Log`.

    checkpointing   whether gradient checkpointing is reentrant; None for none
    resume          train the second half once more, from the checkpoint of the first
    model           makes another model than `tiny`
    more_config     keys of the DeepSpeed config
    more            arguments of the trainer
    """
    log = Log()
    with fresh():
        for start in [None, f"{folder}/checkpoint-2"] if resume else [None]:
            trainer = _trainer(
                client, section, folder, stage, lora, checkpointing, accumulation, evaluate, moe, more_config, model, more
            )
            trainer.train(resume_from_checkpoint=start)
            steps = [entry for entry in trainer.state.log_history if "loss" in entry]
            if start is None:
                log.losses, log.norms = [x["loss"] for x in steps], [float(x["grad_norm"]) for x in steps]
                log.evaluated = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
            else:
                log.resumed = [number for x in steps[2:] for number in (x["loss"], float(x["grad_norm"]))]
            log.bound = len(overlapped_layers(trainer.model))
            ds_sp_overlap.disable(trainer.model)
            trainer.deepspeed.destroy()
            forget_sequence_parallel()
    return log


# DeepSpeed's tiled computations, in a loop of one's own.


def _tiled_mlp(mlp, x):
    def compute(mlp, x):
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    return TiledMLP.apply(compute, mlp, x, 4, [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight])


def _tiled_loss(model, input_ids, position_ids, labels):
    """The sum of the losses of this rank's tokens."""

    def compute(head, x, y):
        return torch.nn.functional.cross_entropy(head(x).view(-1, VOCABULARY), y.view(-1), ignore_index=-100, reduction="sum")

    x = model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    return TiledFusedLogitsLoss.apply(compute, model.lm_head, x, labels, None, 2, [model.lm_head.weight], "sum")


def train_tiled(rank, section, stage, offload):
    """Train with TiledMLP and TiledFusedLogitsLoss, checkpointed; ``offload``: what is saved for backward goes to the host."""
    log, model = Log(), tiny(initializer_range=0.2)
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(_tiled_mlp, layer.mlp)
    model.forward = types.MethodType(_tiled_loss, model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    config = ds_config(stage, optimizer="SGD", **({} if section is None else {"sp_overlap": section}))
    with engine_of(model.train(), config) as (engine, group):
        for tokens in batches(STEPS):
            inputs = cut(tokens, rank, 2)
            count = (inputs["labels"] != -100).sum()
            torch.distributed.all_reduce(count, group=group)
            with torch.autograd.graph.save_on_cpu() if offload else contextlib.nullcontext():
                loss = engine(**inputs) / count
                engine.backward(loss)
            engine.step()
            torch.distributed.all_reduce(loss := loss.detach(), group=group)
            log.losses.append(loss.item())
            log.norms.append(float(engine.get_global_grad_norm()))
        log.bound = len(overlapped_layers(engine.module))
    return log
