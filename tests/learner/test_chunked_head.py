"""The chunked head gives the log-probabilities, entropies and gradients of unchunked logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from april.data.support import Support
from april.learner import head
from april.learner.batch import TrainSample
from april.learner.loading import LogitMap, ModelError, logit_map
from april.learner.packing import pack
from april.wire.message import Version

TEMPERATURE = 0.7


def written_out(hidden, weight, targets, drawable, cap):
    logits = hidden @ weight.T / TEMPERATURE
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    distribution = torch.log_softmax(logits.masked_fill(~drawable, -torch.inf), -1)
    surprise = -distribution.masked_fill(~drawable, 0)
    return distribution[torch.arange(len(targets)), targets], (distribution.exp() * surprise).sum(-1)


def supports(targets):
    """Supports of 1 to 9 ids for each target, and of all ids for one of them."""
    chance = np.random.default_rng(0)
    others = [np.delete(np.arange(50), target) for target in targets]
    rows = [
        chance.permutation(np.append(chance.permutation(rest)[: i % 9], t))
        for i, (t, rest) in enumerate(zip(targets.tolist(), others, strict=True))
    ]
    rows[11] = chance.permutation(50)
    sample = TrainSample(
        tokens=np.append(0, targets).astype(np.int32), prompt_tokens=1, logprobs=np.zeros(len(targets), np.float32),
        reward=0.0, segments=((0, len(targets), Version(0, 0)),),
        support=Support.of([row.astype(np.int32) for row in rows]),
    )  # fmt: skip
    drawable = torch.tensor([[place in row for place in range(50)] for row in rows])
    return pack([sample], torch.device("cpu")).support, drawable


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("used", [("logprob",), ("entropy",), ("logprob", "entropy")], ids="+".join)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows_per_chunk", [7, 23], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "to compile"])
@pytest.mark.parametrize("cap", [None, 6.0], ids=["", "capped"])
def test_chunks_equal_whole_logits(used, dtype, tolerance, rows_per_chunk, cut, compiled, cap, monkeypatch):
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", rows_per_chunk * 50)
    monkeypatch.setattr(head, "fused", lambda function: function)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16).to(dtype), torch.randn(50, 16).to(dtype)
    targets, factors = torch.randint(0, 50, (23,)), {"logprob": torch.randn(23), "entropy": torch.randn(23)}

    support, drawable = supports(targets) if cut else (None, torch.ones(23, 50, dtype=torch.bool))

    def gradients(score, *inputs):
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        scores = dict(zip(("logprob", "entropy"), score(*inputs), strict=True))
        sum((factors[name] * scores[name]).sum() for name in used).backward()
        return [score.detach() for score in scores.values()], [tensor.grad.float() for tensor in inputs]

    ours, our_gradients = gradients(
        lambda *inputs: head.score_tokens(*inputs, targets, TEMPERATURE, support, compiled, cap=cap), hidden, weight
    )
    theirs, their_gradients = gradients(
        lambda *inputs: written_out(*inputs, targets, drawable, cap), hidden.float(), weight.float()
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


class HeadOfItsOwn(Qwen3ForCausalLM):
    """A model that changes what goes into its head by `before`, and its logits by `after`."""

    before = after = staticmethod(lambda tensor: tensor)

    def forward(self, *arguments, **options):
        hidden = self.model(*arguments, **options)[0]
        return type("Output", (), {"logits": self.after(self.lm_head(self.before(hidden)))})


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (None, None, LogitMap()),
        (None, lambda z: z * 0.0625, LogitMap(0.0625)),
        (lambda hidden: hidden / 4, lambda z: z / 2, LogitMap(0.125)),
        (None, lambda z: 30 * torch.tanh(z / 30), LogitMap(1.0, 30.0)),
        (lambda hidden: hidden / 2, lambda z: 3 * torch.tanh(z / 5), LogitMap(0.3, 3.0)),
        (None, lambda z: z.clamp(-30, 30), None),
        (None, lambda z: z + 1, None),
        (None, lambda z: torch.cat([z[..., :-1], torch.full_like(z[..., :1], -1e9)], -1), None),
        (None, lambda z: z[..., :-1], None),
        (lambda hidden: hidden / hidden.square().mean(-1, keepdim=True).sqrt(), None, None),
    ],
)
def test_scales_and_soft_caps_are_found_in_what_a_model_computes(before, after, found):
    config = Qwen3Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=11)
    lm = HeadOfItsOwn(config)
    lm.before, lm.after = before or lm.before, after or lm.after
    if found is None:
        with pytest.raises(ModelError, match="changes its logits"):
            logit_map(lm, Path("policy"))
        return
    measured = logit_map(lm, Path("policy"))
    assert measured.scale == pytest.approx(found.scale, rel=1e-6) and measured.cap == pytest.approx(found.cap, rel=1e-6)
    assert found != LogitMap() or measured == found


def test_a_head_s_bias_is_a_column_of_its_weight():
    hidden, weight, bias = torch.randn(5, 8), torch.randn(11, 8), torch.randn(11)
    rows, columns = head.with_bias(hidden, weight, bias)
    torch.testing.assert_close(rows @ columns.T, torch.nn.functional.linear(hidden, weight, bias))
    assert rows.shape[1] * 4 % head.GROUPED_BYTES == 0
