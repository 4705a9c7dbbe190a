"""The keys of `[learner]`, `[samples]` and `[sft]`: how the policy is trained and checkpointed, which samples are kept,
and which conversations `april sft` trains."""

from typing import Annotated, Literal

from pydantic import Field

from april.config.section import CONTEXT_TOKENS, Section


class LearnerSection(Section):
    backend: str = Field(
        "fsdp",
        description="Training back end: fsdp (FSDP2; nearly any model of transformers), "
        "megatron (adds tensor, pipeline and expert parallelism, for fewer architectures), or yours as "
        "package.module:Class.",
    )
    ranks: int = Field(
        2,
        ge=1,
        description="Training processes (ranks), each on an accelerator of its own where there are some. More divide "
        "memory and work, and communicate more.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Tensor-parallel size: ranks that share each layer's matrices, with the megatron back end. Above "
        "1: less memory a rank, and two all-reduces a layer in each pass.",
    )
    pipeline_parallel: int = Field(
        1,
        ge=1,
        description="Pipeline-parallel size P: stages that the layers are divided into, with the megatron back end. "
        "Of n micro-batches in a step, (P - 1) / (n + P - 1) of the time is idle.",
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Expert-parallel size: ranks over which a layer's experts are spread, each whole on one rank; 1 "
        "shards each expert's tensors instead. Above 1, tokens travel to their experts' ranks and back once a "
        "layer.",
    )
    context_parallel: int = Field(
        1,
        ge=1,
        description="Context-parallel size C: ranks that share each packed row, with the fsdp back end. Above 1 each "
        "holds 1 / C of a sequence's activations, for two exchanges among these ranks in each layer.",
    )
    optimizer: str = Field(
        "adamw",
        description="Optimizer of the policy and the critic: adamw (8 bytes a trained parameter for its moments), "
        "adamw_8bit (2 bytes, by bitsandbytes), muon (4 bytes; whole matrices are gathered in each step), or yours as "
        "package.module:Class.",
    )
    optimizer_on_host: bool = Field(
        False,
        description="Keep the optimizer's state in the host's memory and step there. This frees the accelerator of "
        "it; each step is slower, and copies gradients and weights over the bus.",
    )
    master_weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Dtype of the trained weights and their gradients: fp32 (8 bytes a parameter), or bf16 (4 bytes; "
        "a step is computed in fp32 and rounded stochastically, so that small steps are not lost on average).",
    )
    lr: float = Field(1e-6, gt=0, description="Learning rate of the policy. Too high a rate ends in collapse.")
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="Learning rate after the warm-up: constant; linear or cosine down to lr_floor at "
        "schedule.max_steps; wsd (warm-up, stable, decay), constant until the last lr_decay_share of the steps.",
    )
    lr_floor: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of lr that a falling learning rate ends at. A higher one learns more in the last steps.",
    )
    lr_decay_share: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Share of the steps over which lr_schedule = wsd falls. A larger one falls earlier.",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95),
        description="AdamW's two betas: decay of the running mean of gradients, and of their squares. "
        "Higher ones average over more steps, with less noise and more lag.",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay. A larger one pulls the weights harder towards 0."
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Optimizer steps over which the learning rate rises linearly from 0. More of them start more "
        "gently and learn later.",
    )
    minibatches: int = Field(
        1,
        ge=1,
        description="Optimizer steps on a batch; each group is in one of them, at random. More than one adds a forward "
        "pass of the whole batch.",
    )
    epochs: int = Field(
        1,
        ge=1,
        description="Passes over each batch. Training time grows with it. More than one adds a forward pass of the "
        "whole batch.",
    )
    grad_clip: float = Field(
        1.0,
        gt=0,
        description="Largest gradient norm; larger gradients are scaled down to it. A low value slows steps with large "
        "gradients.",
    )
    microbatch_tokens: int = Field(
        8192,
        ge=1,
        description="Largest number of tokens in a rank's forward and backward pass; a packed row has "
        "context_parallel times as many. Activation memory grows with it; if it is below twice the longest sequence, "
        "ranks wait for each other.",
    )
    compute: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="Dtype of the forward and backward pass; master weights stay fp32. fp32 takes twice the memory "
        "and more time, bf16 is less exact. auto: bf16 on accelerators, fp32 on CPUs.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory for one more forward pass."
    )
    activations_on_host: bool = Field(
        False,
        description="With activation_checkpointing: keep the inputs of layers in the host's memory between forward and "
        "backward pass. The accelerator holds the activations of one layer, and each input crosses the bus twice.",
    )
    compile: bool = Field(
        False,
        description="Compile the policy's layers and the scoring of its head with torch.compile, with the fsdp back "
        "end: faster on accelerators, with less memory for activations, after a minute of compiling at the start. "
        "Needs a C compiler.",
    )
    freeze_vision: bool = Field(
        True,
        description="Leave the vision tower of a vision-language model as it is, and train its language model. false: "
        "train both, with the tower's activations in memory; not with an adapter.",
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak speed of one device, by which MFU is computed (TFLOP/s). Unset: the dense 16-bit peak of "
        "known accelerators.",
    )
    max_nonfinite: int = Field(
        3,
        ge=1,
        description="Batches in a row without a finite loss or gradient after which the run fails. A high value "
        "loses that many batches first.",
    )
    checkpoint_every: int = Field(
        10,
        ge=1,
        description="Policy steps between checkpoints; the last step has one too. Rare ones let the journal grow and "
        "repeat more steps after a crash, frequent ones take time and disk.",
    )
    keep_checkpoints: int = Field(
        2,
        ge=1,
        description="Newest checkpoints kept. Each takes 12 bytes a parameter on disk, and the journal keeps its "
        "tokens since the oldest.",
    )
    checkpoint_store: str = Field(
        "",
        description="fsspec URL of an object store for checkpoints, such as s3://bucket/folder; each run's are below "
        "its name. Each checkpoint is uploaded during the next steps. Empty: on the learner's disks alone.",
    )
    checkpoint_store_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Longest time without progress of a call to the checkpoint store, which is then retried up to "
        "three times (seconds). A high value notices a dead store late.",
    )
    threads: int = Field(
        1,
        ge=1,
        description="CPU threads of each learner rank. More speed up its work on a CPU; "
        "other parts do not have these cores.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the learner's ranks. auto: accelerators where there are any, otherwise CPUs."
    )
    collective_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest wait of a rank in a collective (seconds). A high value detects a dead rank late; a low "
        "one ends ranks that wait for a slow one.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Restarts of the learner in a row without a new policy step, after which the run fails. A low "
        "value ends the run at a fault that would have passed, a high one spends long on one that will not.",
    )
    pace_token_s: float = Field(
        0.0,
        ge=0,
        description="Least time of a step for each response token, to imitate slower hardware in a paced run "
        "(seconds). 0: as fast as it can.",
    )
    hung_s: float = Field(
        60.0,
        gt=0,
        description="Time without a sign of progress after which the learner is killed and restarted (seconds). A "
        "high value detects a hang late; it must exceed the longest micro-batch.",
    )
    load_s: float = Field(
        3600.0,
        gt=0,
        description="Time without a sign of progress after which the learner is killed and restarted while it loads, "
        "saves, exports, or does something for the first time (seconds). A high value detects a hang there late.",
    )

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel shares of a batch: each is trained by one rank, or by one context group of ranks."""
        return self.ranks // self.context_parallel


class SamplesSection(Section):
    """Trained samples that the learner writes to `samples/` in the run folder, for people to read."""

    every: int = Field(
        1,
        ge=0,
        description="Interval at which a step's samples are kept (policy steps); 0: none are kept. A low value takes "
        "disk and a little of the learner's time.",
    )
    groups: int | None = Field(
        8,
        ge=1,
        description="Groups kept of each step whose samples are kept: those with the best and the worst sample, and "
        "random others; about 20 bytes a token before compression. Unset: all.",
    )
    max_mb: int = Field(
        1024,
        ge=1,
        description="Largest size of all kept samples; beyond it, files of steps are deleted so that the "
        "rest is spread evenly over the run (MiB).",
    )


class SftSection(Section):
    """Supervised fine-tuning with `april sft`. In `april run`, all keys but `batch_size` hold for sources of kind
    sft."""

    batch_size: int = Field(
        32,
        ge=1,
        description="Rows in a batch of `april sft`. A larger batch has a less noisy gradient and fewer steps.",
    )
    max_tokens: int = Field(
        4096,
        ge=2,
        le=CONTEXT_TOKENS,
        description="Longest row of conversations (tokens); longer ones are left out and counted. Memory for "
        "activations grows with it.",
    )
    train_on: Literal["assistant", "all"] = Field(
        "assistant",
        description="Tokens of conversations that are trained: assistant (what the assistant says, with the token that "
        "ends its turn), or all (the whole row).",
    )
    tools_key: str = Field(
        "tools",
        description="Row field of the tools that the chat template prints: a list of JSON schemas, or such a list as "
        "text. Rows may lack it.",
    )
