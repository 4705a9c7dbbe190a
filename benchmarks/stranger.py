"""What somebody brings whom April has never seen: a small Llama with a tokeniser of its own, rows, and a reward."""

from pathlib import Path

import orjson

CONFIG = """\
[run]
name = "mine"

[model]
path = "model"

[data]
path = "train.jsonl"
prompt_key = "question"
label_key = "answer"

[schedule]
rollout_batch_size = 4
over_sampling_batch_size = 6
n_samples_per_prompt = 4
max_steps = 3

[sampling]
max_response_tokens = 16

[worker]
device = "cpu"
slots = 16

[learner]
device = "cpu"

[reward]
name = "my_rewards:grade"
"""
REWARDS = '''\
"""Whether a response has the letter that was asked for."""


def grade(response, label):
    return float(label in response), {"brief": -len(response)}


def brief(label, response):
    return -len(response) / 100


def fails(response, label):
    return {"a": 1.0, "e": 0.5, "i": 0.0}[label] - len(response) / 100


def wrong_parameter(response, answer):
    return 0.0
'''


def make_model(folder: Path) -> Path:
    """A Llama of two layers with random weights, and a byte-level tokeniser without a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["what colour has the letter? "] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_data(path: Path, rows: int) -> None:
    lines = [{"question": f"what colour has letter {row}?", "answer": "aeiou"[row % 5]} for row in range(rows)]
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
