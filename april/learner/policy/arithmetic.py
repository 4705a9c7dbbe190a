"""The quickstart policy before its warm start (`april/launch/sft/warm_start.py`): a small Qwen3 of random weights, with
one token for each character of its task (`april/data/arithmetic.py`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from april.data.arithmetic import ALPHABET

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = {token: i for i, token in enumerate((PAD, EOS, *ALPHABET))}
CONTENTS_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that concatenates message contents without role tokens: the prompt then has the form of the
eight-character steps of which the response consists."""


def build_tokenizer(
    vocabulary: Mapping[str, int] = VOCABULARY, template: str = CONTENTS_ONLY, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokeniser of single characters. `vocabulary`: id of each character; `template`: chat template; `special`:
    special tokens of several letters."""
    characters = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=list(special),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def build_model(hidden_size: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random fp32 weights drawn from the seed; head dimension 32, half as many key-value heads."""
    heads = hidden_size // 32
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_policy(model: Qwen3ForCausalLM, out_dir: Path) -> None:
    """Write model and tokeniser as an ordinary Hugging Face folder."""
    model.save_pretrained(out_dir)
    build_tokenizer().save_pretrained(out_dir)
