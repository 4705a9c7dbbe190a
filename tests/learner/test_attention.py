"""Packed attention keeps sequences apart, equals one sequence at a time, and refuses what it cannot do."""

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from april.learner.attention import (
    PackedAttentionError,
    choose_kernel,
    each_sequence,
    flash_attention_4,
    packed_attention,
    variable_length,
)
from april.learner.model import load
from april.learner.packing import pack
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.small_learner import VOCAB, make_config, make_sample, settings

TEMPERATURE = 0.7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(policy_folder):
    return load(policy_folder, TEMPERATURE)


@pytest.fixture
def samples():
    rng = np.random.default_rng(4)
    return [make_sample(rng, *shape, 1.0) for shape in [(3, 1), (1, 40), (7, 12), (1, 1)]]


def test_packed_scores_equal_one_sequence_at_a_time(policy, policy_folder, samples):
    reference = ReferenceLearner(policy_folder, settings(make_config(policy_folder, policy_folder, TEMPERATURE)))
    with torch.no_grad():
        logprobs, entropies = policy(pack(samples, CPU))
        expected = reference.score(reference.lm, samples)
    torch.testing.assert_close(logprobs, torch.cat([scored.logprobs for scored in expected]))
    torch.testing.assert_close(entropies, torch.cat([scored.entropies for scored in expected]))


def test_no_sequence_sees_another(policy, samples):
    micro = pack(samples, CPU)
    others = micro.target_rows >= micro.seq_lens[0]
    changed = micro.ids.clone()
    changed[0, : micro.seq_lens[0]] = (changed[0, : micro.seq_lens[0]] + 1) % VOCAB
    with torch.no_grad():
        before, after = (policy(m)[0] for m in (micro, replace(micro, ids=changed)))
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def without_a_word(query, key, value, starts, _, longest, __, *, scale, window_size):
    """`varlen_attn` of torch 2.11, which takes fewer key heads than query heads as they are, on the CPU."""
    assert (window_size, longest) == ((-1, 0), max(starts.diff()))
    repeats = query.shape[1] // key.shape[1]
    whole = (query, *(part.repeat_interleave(repeats, 1) for part in (key, value)))
    heads_first = (tensor.transpose(0, 1)[None].float() for tensor in whole)
    return each_sequence(*heads_first, starts.diff().tolist(), scale)[0].to(query.dtype)


def by_an_option(query, key, *others, enable_gqa=False, **options):
    """`varlen_attn` of later torch versions, on the CPU."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return without_a_word(query, key, *others, **options)


@pytest.mark.parametrize("varlen_attn", [without_a_word, by_an_option])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_variable_length_call_equals_a_call_a_sequence(monkeypatch, varlen_attn, kv_heads):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    lengths, starts = [3, 1, 5], torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 9, 8, dtype=torch.bfloat16) for heads in (4, kv_heads, kv_heads))
    found = variable_length(query, key, value, starts, max(lengths), 0.3)
    torch.testing.assert_close(
        found.float(), each_sequence(query.float(), key.float(), value.float(), lengths, 0.3), atol=0.01, rtol=0.01
    )


def by_flash_attention_4(
    query, key, value, *, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, deterministic, **same
):
    """`flash_attn_varlen_func` of flash-attn-4, which returns the sums as well, on the CPU."""
    assert causal and not deterministic
    assert same["cu_seqlens_k"] is cu_seqlens_q and same["max_seqlen_k"] == max_seqlen_q
    return without_a_word(
        query, key, value, cu_seqlens_q, None, max_seqlen_q, None, scale=softmax_scale, window_size=(-1, 0)
    ), None


def test_flash_attention_4_equals_a_call_a_sequence(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute := ModuleType("flash_attn.cute"))
    cute.flash_attn_varlen_func = by_flash_attention_4
    lengths, starts = [3, 1, 5], torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    found = flash_attention_4(query, key, value, starts, max(lengths), 0.3)
    torch.testing.assert_close(found, each_sequence(query, key, value, lengths, 0.3))


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "has_varlen", "has_flash_4", "name"),
    [
        ((9, 0), torch.bfloat16, 128, True, False, "variable_length"),
        ((8, 0), torch.float16, 128, True, True, "variable_length"),
        ((9, 0), torch.bfloat16, 128, True, True, "flash_attention_4"),
        ((9, 0), torch.bfloat16, 80, True, True, "variable_length"),
        ((7, 5), torch.float16, 128, True, True, "each_sequence"),
        ((9, 0), torch.float32, 128, True, True, "each_sequence"),
        ((9, 0), torch.bfloat16, 128, False, False, "each_sequence"),
        (None, torch.bfloat16, 128, True, True, "each_sequence"),
    ],
)
def test_flash_attention_is_used_where_supported(capability, dtype, head_size, has_varlen, has_flash_4, name):
    assert choose_kernel(capability, dtype, head_size, has_varlen, has_flash_4) == name


def test_padding_rows_and_caches_are_refused(policy):
    ids = torch.ones(1, 6, dtype=torch.long)
    body = policy.lm.base_model
    with pytest.raises(PackedAttentionError, match="attention mask"):
        body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, seq_lens=[6])
    with pytest.raises(PackedAttentionError, match="2 rows"):
        body(input_ids=ids.repeat(2, 1), use_cache=False, seq_lens=[6])
    with pytest.raises(PackedAttentionError, match="seq_lens is missing"):
        body(input_ids=ids, use_cache=False)
    with pytest.raises(PackedAttentionError, match="add up to 5"):
        body(input_ids=ids, use_cache=False, seq_lens=[5])
    with torch.no_grad():
        cache = body(input_ids=ids, use_cache=True, seq_lens=[6]).past_key_values
        with pytest.raises(PackedAttentionError, match="cache"):
            body(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, seq_lens=[1])


@pytest.mark.parametrize(
    "feature", [{"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.ones(2)}, {"dropout": 0.1}]
)
def test_features_it_does_not_compute_are_refused(feature):
    q = torch.randn(1, 2, 5, 4)
    packed_attention(None, q, q, q, seq_lens=[2, 3], sliding_window=None)
    with pytest.raises(PackedAttentionError):
        packed_attention(None, q, q, q, seq_lens=[2, 3], **feature)
