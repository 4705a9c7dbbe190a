"""A batch crosses ranks unchanged, and a sample whose parts disagree is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from april.data.support import Support
from april.learner.batch import TrainingBatch, TrainSample, decode, encode, share_batch
from april.wire.message import Version
from april.wire.training import SampleSpan
from tests.support.learner.small_learner import make_sample


def assert_equal(ours: TrainingBatch, theirs: TrainingBatch):
    assert ours.step == theirs.step
    assert [len(group) for group in ours.groups] == [len(group) for group in theirs.groups]
    for one, other in zip(ours.samples, theirs.samples, strict=True):
        assert one.tokens.dtype == np.int32 and np.array_equal(one.tokens, other.tokens)
        assert one.logprobs.dtype == np.float32 and np.array_equal(one.logprobs, other.logprobs)
        assert (one.prompt_tokens, one.reward, one.segments) == (other.prompt_tokens, other.reward, other.segments)
        told = "group", "index", "finish_reason", "details", "spans", "opened_at", "delivered_at", "source"
        assert [getattr(one, name) for name in told] == [getattr(other, name) for name in told]
        assert (one.images, one.image_starts) == (other.images, other.image_starts)
        assert {name: column.tolist() for name, column in one.token_scores.items()} == {
            name: column.tolist() for name, column in other.token_scores.items()
        }
        assert (one.support is None) == (other.support is None)
        if one.support:
            assert one.support.counts.tolist() == other.support.counts.tolist()
            assert one.support.ids.tolist() == other.support.ids.tolist()


def test_a_batch_survives_encoding_with_segments_and_groups_of_any_size():
    rng = np.random.default_rng(0)
    resumed = TrainSample(
        np.arange(7, dtype=np.int32), 3, np.zeros(4, np.float32), 1 / 3,
        ((0, 1, Version(0, 4)), (1, 4, Version(1, 6))), details={"correct": 1.0},
        spans=(SampleSpan("generate", "w0", 1.5, 2.5, 0, 4, "stop"),), opened_at=1.0, delivered_at=3.0, source=2,
    )  # fmt: skip
    batch = TrainingBatch(7, [[make_sample(rng, 2, 3, 1.0), resumed], [], [make_sample(rng, 1, 1, -0.5)]])
    assert_equal(decode(encode(batch)), batch)
    assert b"support" not in encode(batch), "what has no supports has no column for them"


def test_token_scores_survive_encoding_where_only_some_samples_have_them_and_cost_nothing_where_none_has():
    rng = np.random.default_rng(0)
    plain, scored = make_sample(rng, 2, 3, 1.0), make_sample(rng, 1, 2, 0.0)
    columns = {"teacher": np.array([-1.5, 0.0], np.float32), "of_turn": np.array([2.0, 2.0], np.float32)}
    columns["teacher/top_k"] = np.array([[7.0, -0.5, 3.0, -1.5], [2.0, -0.1, 4.0, -2.5]], np.float32)
    batch = TrainingBatch(0, [[plain, replace(scored, token_scores=columns), make_sample(rng, 2, 0, 1.0)]])
    assert_equal(decode(encode(batch)), batch)
    fewer = replace(plain, token_scores={"teacher/top_k": np.ones((3, 2), np.float32)})
    first, _ = decode(encode(TrainingBatch(0, [[fewer, batch.samples[1]]]))).samples
    assert np.isnan(first.token_scores["teacher/top_k"][:, 2:]).all(), "a teacher that was asked for fewer ids before"
    assert (first.token_scores["teacher/top_k"][:, :2] == 1).all()
    assert b"token_scores" not in encode(TrainingBatch(0, [[plain, scored]]))
    with pytest.raises(ValueError, match=r"token score .*2 response tokens"):
        replace(scored, token_scores={"teacher": np.zeros(3, np.float32)})


def test_supports_survive_encoding_with_tokens_that_have_none():
    rng = np.random.default_rng(0)
    supports = [Support(np.array([2, 0, 1], "i4"), np.array([3, 4, 5], "i4")), Support.none(0), Support.none(2)]
    samples = [replace(make_sample(rng, 2, len(one.counts), 1.0), support=one) for one in supports]
    batch = TrainingBatch(7, [samples[:2], samples[2:]])
    assert_equal(decode(encode(batch)), batch)
    with pytest.raises(ValueError, match=r"1 of 2 .*support"):
        encode(TrainingBatch(7, [[samples[0], make_sample(rng, 2, 3, 1.0)]]))


def test_an_image_that_several_samples_have_crosses_once():
    rng = np.random.default_rng(0)
    picture, other = b"a picture" * 100, b"another"
    shown = [(picture,), (), (other, picture), (picture,)]
    starts = [(), (), (0, 3), (2,)]
    samples = [
        replace(make_sample(rng, 2, 3, 1.0), images=images, image_starts=of_images)
        for images, of_images in zip(shown, starts, strict=True)
    ]
    batch = TrainingBatch(7, [samples[:2], samples[2:]])
    assert_equal(decode(encode(batch)), batch)
    assert encode(batch).count(picture) == 1


def test_sharing_gives_the_batch_or_none(one_rank):
    batch = TrainingBatch(3, [[make_sample(np.random.default_rng(0), 2, 3, 1.0)]])
    assert_equal(share_batch(batch), batch)
    assert_equal(share_batch(TrainingBatch(4, []), dist.group.WORLD), TrainingBatch(4, []))
    assert share_batch(None) is None


def test_a_sample_whose_parts_disagree_is_refused():
    tokens = np.arange(5, dtype=np.int32)
    with pytest.raises(ValueError, match="2 log-probabilities for 5"):
        TrainSample(tokens, 2, np.zeros(2, np.float32), 0.0, ())
    with pytest.raises(ValueError, match="prompt_tokens = 0"):
        TrainSample(tokens, 0, np.zeros(5, np.float32), 0.0, ())
    for counts, ids in (([1, 1], [2, 2]), ([1, 1, 2], [2, 2, 2]), ([2, -1, 2], [2, 2, 2])):
        support = Support(np.array(counts, np.int32), np.array(ids, np.int32))
        with pytest.raises(ValueError, match=f"{len(counts)} counts .*{len(ids)} ids"):
            TrainSample(tokens, 2, np.zeros(3, np.float32), 0.0, (), support)
