"""Properties of the plan for any lengths, and the contents of a packed micro-batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from april.data.support import Support
from april.learner.packing import input_tokens, pack, plan
from tests.support.learner.small_learner import make_sample

lengths_of_samples = st.lists(st.integers(1, 300), max_size=60)


@example([3, 3, 2], 1, 4)
@given(lengths_of_samples, st.integers(1, 5), st.integers(1, 400))
def test_a_plan_has_every_sample_once_and_equal_counts_per_rank_within_the_budget(lengths, ranks, budget):
    planned = plan(lengths, ranks, budget)
    assert planned == plan(list(lengths), ranks, budget), "the same on every rank"
    assert all(len(side_by_side) == ranks and any(side_by_side) for side_by_side in planned)
    bins = [indices for side_by_side in planned for indices in side_by_side]
    assert sorted(i for indices in bins for i in indices) == list(range(len(lengths)))
    for indices in bins:
        assert sum(lengths[i] for i in indices) <= budget or len(indices) == 1


def test_long_tailed_lengths_need_the_fewest_micro_batches_with_balanced_ranks():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(128), 1, 1024), 1, 2048).astype(int).tolist()
    costs = [length + length**2 / 3000 for length in lengths]
    planned = plan(lengths, 8, 4096, costs)
    assert len(planned) == -(-sum(lengths) // (8 * 4096))
    for side_by_side in planned:
        of_ranks = [sum(costs[i] for i in indices) for indices in side_by_side]
        assert max(of_ranks) / np.mean(of_ranks) < 1.02


def test_micro_batches_of_equal_cost_and_similar_mix_run_at_the_same_time():
    lengths, costs = [100, 100, 50, 50, 50, 50], [100.0, 99.0, 50.0, 50.0, 49.4, 49.4]
    assert plan(lengths, 2, 100, costs) == [[[0], [1]], [[2, 4], [3, 5]]]


def test_a_micro_batch_points_each_response_token_at_the_input_it_follows():
    rng = np.random.default_rng(1)
    samples = [make_sample(rng, 3, 2, 1.0), make_sample(rng, 1, 1, 0.0)]
    micro = pack(samples, torch.device("cpu"))
    assert micro.seq_lens == [input_tokens(sample) for sample in samples] == [4, 1]
    assert micro.ids[0].tolist() == [*samples[0].tokens[:4], samples[1].tokens[0]]
    assert micro.positions[0].tolist() == [0, 1, 2, 3, 0]
    assert micro.cu_seq_lens.tolist() == [0, 4, 5]
    assert micro.target_rows.tolist() == [2, 3, 4]
    assert micro.targets.tolist() == [*samples[0].tokens[3:], samples[1].tokens[1]]


def test_a_rank_without_samples_runs_a_dummy_with_zero_loss():
    micro = pack([], torch.device("cpu"))
    assert micro.is_dummy
    assert len(micro.targets) == 1
    assert micro.ids.shape == (1, 2)


def test_packed_supports_belong_to_the_sampled_tokens_and_contain_them():
    rng, cpu = np.random.default_rng(3), torch.device("cpu")
    one, other = make_sample(rng, 2, 1, 1.0), make_sample(rng, 3, 2, 1.0)
    first, (second, third) = one.tokens[2], other.tokens[3:]
    one = replace(one, support=Support(np.array([2], "i4"), np.array([99, first], "i4")))
    other = replace(other, support=Support(np.array([1, 3], "i4"), np.array([second, third, 98, 99], "i4")))
    support = pack([one, other], cpu).support
    assert support.ids.tolist() == [99, first, second, third, 98, 99]
    assert (support.counts.tolist(), support.ends.tolist()) == ([2, 1, 3], [0, 2, 3, 6])
    assert support.positions.tolist() == [1, 0, 0] and pack([], cpu).support is None
    for amiss in (None, Support.none(2), Support(np.array([1, 1], "i4"), np.array([second, 98], "i4"))):
        with pytest.raises(ValueError, match=r"sampled tokens .*support"):
            pack([one, replace(other, support=amiss)], cpu)
