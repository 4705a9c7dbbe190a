"""Packed attention keeps sequences apart, computes each variant exactly, and refuses what it cannot do."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from april.learner import attention_kernels
from april.learner.attention import PackedAttentionError, Reach, choose_kernel, packed_attention, reach_of_mask
from april.learner.attention_kernels import (
    Packing,
    Variant,
    WithSinks,
    by_flex,
    each_sequence,
    flash_attention_4,
    flash_kernels,
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


# --- variants ---------------------------------------------------------------------------------------------------------

LENGTHS = [7, 1, 20, 5]
STARTS = torch.tensor([0, 7, 8, 28, 33], dtype=torch.int32)


def whole_square(q, k, v, scale, window=None, chunk=None, softcap=None, sinks=None, bias=None):
    """Packed attention by one product of the whole row, in which a pair of tokens is masked one by one; with the
    logarithms of its sums of exponentials."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    places = [(sequence, place) for sequence, length in enumerate(LENGTHS) for place in range(length)]
    sees = torch.tensor(
        [
            [
                one == other and 0 <= a - b < (window or 99) and (chunk is None or a // chunk == b // chunk)
                for other, b in places
            ]
            for one, a in places
        ]
    )
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores if bias is None else scores + bias).masked_fill(~sees, -torch.inf)
    sums = scores.logsumexp(-1)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks[None, :, None])
    return ((scores - sums[..., None]).exp() @ v).transpose(1, 2), sums


def inputs(**more):
    torch.manual_seed(1)
    shapes = {"query": (1, 4, 33, 6), "key": (1, 2, 33, 6), "value": (1, 2, 33, 5)} | more
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


def same_gradients(ours, theirs, tensors):
    weights = torch.randn_like(theirs)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), list(tensors.values())),
        torch.autograd.grad((theirs * weights).sum(), list(tensors.values())),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("scores", [2**25, 4], ids=["", "in blocks"])
@pytest.mark.parametrize(
    ("options", "learnt"),
    [
        ({"window": 4}, {}),
        ({"chunk": 4}, {}),
        ({"softcap": 0.7}, {}),
        ({"window": 3, "softcap": 0.7}, {}),
        ({"window": 18}, {"sinks": (4,)}),
        ({"chunk": 6, "softcap": 2.0}, {"sinks": (4,), "bias": (1, 4, 33, 33)}),
        ({"window": 17}, {"bias": (1, 4, 1, 33)}),
    ],
    ids=str,
)
def test_each_variant_is_exact_with_its_gradients(options, learnt, scores, monkeypatch):
    monkeypatch.setattr(attention_kernels, "SCORES_PER_BLOCK", scores)
    tensors = inputs(**learnt)
    named = {"s_aux": tensors.get("sinks"), "position_bias": tensors.get("bias"), "softcap": options.get("softcap")}
    reach = Reach(options.get("window"), options.get("chunk"))
    row = [tensors[name] for name in ("query", "key", "value")]
    ours, _ = packed_attention(None, *row, reach, 0.3, seq_lens=LENGTHS, **named)
    theirs, _ = whole_square(*row, 0.3, **options, **{name: tensors[name] for name in learnt})
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    same_gradients(ours, theirs, tensors)


def written_flash(window):
    """Forward and backward pass of a flash kernel without sinks: the latter has the probabilities from the sums."""

    def forward(q, k, v, sums=False):
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        output, found = whole_square(*heads_first, 0.3, window)
        return (output[0], found[0]) if sums else output[0]

    def backward(gradient, q, k, v, output, sums):
        repeats = q.shape[1] // k.shape[1]
        q, gradient, output = (tensor.transpose(0, 1) for tensor in (q, gradient, output))
        k, v = (tensor.transpose(0, 1).repeat_interleave(repeats, 0) for tensor in (k, v))
        _, seen = whole_square(q[None], k[None], v[None], 0.3, window)
        masked, _ = whole_square(q[None], k[None], torch.eye(33, dtype=q.dtype).expand(1, 4, 33, 33), 0.3, window)
        chances = masked[0].transpose(0, 1) * (seen[0] - sums).exp()[..., None]
        by_scores = chances * (gradient @ v.mT - (gradient * output).sum(-1, keepdim=True)) * 0.3
        groups = ((each.mT @ other).unflatten(0, (-1, repeats)).sum(1)
                  for each, other in ((by_scores, q), (chances, gradient)))  # fmt: skip
        return tuple(tensor.transpose(0, 1) for tensor in (by_scores @ k, *groups))

    return forward, backward


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_of_a_kernel_without_them_are_exact_with_their_gradients(window):
    tensors = inputs(value=(1, 2, 33, 6), sinks=(4,))
    row, sinks = [tensors[name] for name in ("query", "key", "value")], tensors["sinks"]
    ours = WithSinks.apply(*(tensor[0].transpose(0, 1) for tensor in row), sinks, *written_flash(window))
    theirs, _ = whole_square(*row, 0.3, window, sinks=sinks)
    torch.testing.assert_close(ours[None], theirs, atol=1e-12, rtol=1e-10)
    same_gradients(ours[None], theirs, tensors)


def test_the_backward_kernel_takes_what_it_is_passed():
    query, key = (torch.randn(33, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    starts, sums = STARTS.to("meta"), torch.empty(4, 33, device="meta")
    _, backward = flash_kernels(starts, 20, 0.3, (3, 0))
    found = backward(query, query, key, key, query, sums)
    assert [tensor.shape for tensor in found] == [query.shape, key.shape, key.shape]


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"window": 4, "sinks": torch.arange(4.0)}, {"window": 150}], ids=str)
def test_flex_attention_equals_a_product_a_sequence(options, monkeypatch):
    monkeypatch.setattr(attention_kernels, "compiled_flex", lambda: flex_attention)  # without a C++ compiler
    lengths = [200, 1, 100, 90, 37]
    packing = Packing(lengths, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32))
    row = [torch.randn(1, heads, sum(lengths), 16) for heads in (4, 2, 2)]
    variant = Variant(softcap=0.7, **options)
    with torch.no_grad():
        found = by_flex(*row, packing, 0.3, variant)
        torch.testing.assert_close(found, each_sequence(*row, lengths, 0.3, variant), atol=1e-5, rtol=1e-5)


# --- kernels ----------------------------------------------------------------------------------------------------------


def without_a_word(query, key, value, starts, _, longest, __, *, scale, window_size):
    """`varlen_attn` of torch 2.11, which takes fewer key heads than query heads as they are, on the CPU."""
    assert query.shape[-1] == value.shape[-1] and longest == max(starts.diff())
    repeats, (back, ahead) = query.shape[1] // key.shape[1], window_size
    assert ahead == 0
    whole = (query, *(part.repeat_interleave(repeats, 1) for part in (key, value)))
    heads_first = (tensor.transpose(0, 1)[None].float() for tensor in whole)
    variant = Variant(None if back == -1 else back + 1)
    return each_sequence(*heads_first, starts.diff().tolist(), scale, variant)[0].to(query.dtype)


def by_an_option(query, key, *others, enable_gqa=False, **options):
    """`varlen_attn` of later torch versions, on the CPU."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return without_a_word(query, key, *others, **options)


@pytest.mark.parametrize("varlen_attn", [without_a_word, by_an_option])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 2])
def test_one_variable_length_call_equals_a_call_a_sequence(monkeypatch, varlen_attn, kv_heads, window):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    lengths, starts = [3, 1, 5], torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    query, key = (torch.randn(1, heads, 9, 8, dtype=torch.bfloat16) for heads in (4, kv_heads))
    value = torch.randn(1, kv_heads, 9, 6, dtype=torch.bfloat16)
    found = variable_length(query, key, value, starts, max(lengths), 0.3, window)
    expected = each_sequence(query.float(), key.float(), value.float(), lengths, 0.3, Variant(window))
    torch.testing.assert_close(found.float(), expected, atol=0.01, rtol=0.01)


def with_sums(query, key, value, *lengths, scale, window_size, return_aux, enable_gqa):
    """`varlen_attn` asked for the logarithms of its sums as well."""
    assert return_aux.lse and enable_gqa
    output, sums = whole_square(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)), scale, window_size[0] + 1
    )
    return output[0], sums[0]


def test_sinks_in_a_variable_length_call_equal_a_call_a_sequence(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", with_sums)
    query, key, value, sinks = (tensor.detach() for tensor in inputs(value=(1, 2, 33, 6), sinks=(4,)).values())
    found = variable_length(query, key, value, STARTS, max(LENGTHS), 0.3, 4, sinks)
    torch.testing.assert_close(found, each_sequence(query, key, value, LENGTHS, 0.3, Variant(4, sinks=sinks)))


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
    ("capability", "dtype", "head_size", "has", "variant", "name"),
    [
        ((9, 0), torch.bfloat16, 128, "varlen", {}, "variable_length"),
        ((8, 0), torch.float16, 128, "varlen flash-4", {}, "variable_length"),
        ((9, 0), torch.bfloat16, 128, "varlen flash-4", {}, "flash_attention_4"),
        ((9, 0), torch.bfloat16, 128, "varlen flash-4", {"is_plain": False}, "variable_length"),
        ((9, 0), torch.bfloat16, 128, "varlen flash-4", {"is_plain": False, "is_capped": True}, "flex"),
        ((9, 0), torch.bfloat16, 80, "varlen flash-4", {}, "variable_length"),
        ((9, 0), torch.bfloat16, 512, "varlen flash-4", {}, "each_sequence"),
        ((7, 5), torch.float16, 128, "varlen flash-4", {}, "each_sequence"),
        ((9, 0), torch.float32, 128, "varlen flash-4", {"is_capped": True}, "each_sequence"),
        ((9, 0), torch.bfloat16, 128, "", {}, "each_sequence"),
        (None, torch.bfloat16, 128, "varlen flash-4", {}, "each_sequence"),
    ],
)
def test_flash_attention_is_used_where_supported(capability, dtype, head_size, has, variant, name):
    assert choose_kernel(capability, dtype, head_size, "varlen" in has, "flash-4" in has, **variant) == name


# --- what is refused --------------------------------------------------------------------------------------------------


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
    ("feature", "said"),
    [
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"is_causal": False}, "see later ones"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "mask was passed"),
        ({"attention_mask": Reach(window=3), "sliding_window": 4}, "sliding_window is 4, and its mask's is 3"),
    ],
    ids=str,
)
def test_features_it_does_not_compute_are_refused(feature, said):
    q = torch.randn(1, 2, 5, 4)
    packed_attention(None, q, q, q, seq_lens=[2, 3], sliding_window=None)
    with pytest.raises(PackedAttentionError, match=said):
        packed_attention(None, q, q, q, seq_lens=[2, 3], **feature)


def test_masks_say_how_far_a_layer_sees_or_are_refused():
    config = SimpleNamespace(sliding_window=8, attention_chunk_size=4)
    lengths = {"q_length": 5, "kv_length": 5, "config": config}
    assert reach_of_mask(**lengths) is None
    assert reach_of_mask(**lengths, local_size=8) == Reach(window=8)
    assert reach_of_mask(**lengths, local_size=4) == Reach(chunk=4)
    with pytest.raises(PackedAttentionError, match="mask of its own"):
        reach_of_mask(**lengths, allow_is_bidirectional_skip=True)
    with pytest.raises(PackedAttentionError, match="mask of its own"):
        reach_of_mask(**lengths, use_vmap=True)
    config.sliding_window = 4
    with pytest.raises(PackedAttentionError, match="both 4 tokens"):
        reach_of_mask(**lengths, local_size=4)
