"""The keys of `[sft]`: which conversations `april sft` trains, and which of their tokens."""

from typing import Literal

from pydantic import Field

from april.config.section import CONTEXT_TOKENS, Section


class SftSection(Section):
    """Supervised fine-tuning with `april sft`; in `april run` for sources of kind sft, but for `batch_size`."""

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
