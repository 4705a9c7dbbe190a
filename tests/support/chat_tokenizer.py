"""A small tokeniser of bytes with a few merges, and chat templates of several families, written for the tests."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|tool|>", "<pad>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ċ", "Ċ")]
"""Merges of byte-level characters; Ċ is a line break."""

CHATML = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<|tool|>{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<|tool|>{{ call.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last and '<think>' not in message.content %}<think>

</think>

{% endif %}
{%- if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Drops thoughts from earlier turns, and prints empty ones in the last, as reasoning models do."""
COUNTING = "{{ messages | length }} messages{% for message in messages %}[{{ message.content }}]{% endfor %}"
"""Prints the beginning of a conversation otherwise than that of a longer one."""


def save_chat_tokenizer(folder, template=CHATML, special=()):
    """Write the tokeniser with a template and further special tokens into a folder; returns the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIAL, *special)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    wrapped.chat_template = template
    folder.mkdir(exist_ok=True)
    wrapped.save_pretrained(folder)
    return folder


VOCABULARY = 256 + len(MERGES) + len(SPECIAL)
