"""What users of transformers' Trainer and TRL's SFTTrainer write, trained for a few steps on each rank of a test."""

import contextlib
import gc
from dataclasses import dataclass, field

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from peft import LoraConfig, get_peft_model
from transformers import ByT5Tokenizer, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_sp_overlap
from tests.harness.models import SEQ, batches, forget_sequence_parallel, overlapped_layers, tiny
from tests.harness.ranks import leaves

STEPS, BATCH = 4, 2
LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
# Stock Ulysses takes no None for head_dim.
EXPERTS = dict(family="mixtral", num_local_experts=4, output_router_logits=True, head_dim=8)


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
        pairs = zip(leaves(self._numbers()), leaves(other._numbers()), strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

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


def _trainer(
    client, section, folder, stage=1, lora=False, checkpointing=None, accumulation=1, evaluate=False, moe=False, model=None,
):  # fmt: skip
    """A Trainer or an SFTTrainer, sequence parallel over all ranks.

    checkpointing   whether gradient checkpointing is reentrant; None for none
    model           makes another model than `tiny`
    """
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({} if section is None else {"sp_overlap": section}),
    }  # fmt: skip
    model = model() if model else tiny(initializer_range=0.2, **(EXPERTS if moe else {}))
    arguments = dict(
        output_dir=folder, deepspeed=config, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, bf16=False,
        gradient_accumulation_steps=accumulation, gradient_checkpointing=checkpointing is not None,
        gradient_checkpointing_kwargs={"use_reentrant": checkpointing} if checkpointing is not None else None,
        parallelism_config=ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        ),
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="steps", save_steps=2, eval_strategy="steps" if evaluate else "no", eval_steps=2,
        per_device_eval_batch_size=BATCH, seed=1,
        ignore_data_skip=True,  # of stock Ulysses' loader nothing can be skipped on a resume
    )  # fmt: skip
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


def train(rank, client, section, folder, resume=False, **options):
    """Train with a ``client``, "Trainer" or "SFTTrainer"; ``section`` None trains stock. Returns a `Log`.

    resume    train the second half once more, from the checkpoint of the first
    options   of `_trainer`
    """
    log = Log()
    with fresh():
        for start in [None, f"{folder}/checkpoint-2"] if resume else [None]:
            trainer = _trainer(client, section, folder, **options)
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
