"""Checks of a finished run's journal: each observation follows its turn, and log-probabilities are those of the weights
that sampled the tokens."""

import numpy as np
import torch

from april.broker.ledger.events import GroupOpened, Leased, RowsAccepted
from april.wire.rows import OBSERVATION
from tests.support.exported_checkpoints import model_of_checkpoint
from tests.support.journal_events import events_and_arrays, with_payloads


def assert_every_answer_fits_its_turn(run_dir, tokenizer):
    """Check that the k-th observation (from 0) of each sample is the text k % 10, whichever workers sampled the turns,
    and that tokens are contiguous. Returns (workers, number of observations)."""
    holders, lengths, answered, observed, workers = {}, {}, {}, 0, set()
    for event, arrays in events_and_arrays(run_dir):
        match event:
            case GroupOpened():
                lengths |= {(event.group, index): 0 for index in range(event.size)}
            case Leased():
                holders[event.lease_id] = (event.group, event.index)
                workers.add(event.worker)
            case RowsAccepted():
                for row, own in with_payloads(event, arrays):
                    sample = holders[row.lease_id]
                    assert row.start == lengths[sample]
                    lengths[sample] += row.tokens
                    if row.kind == OBSERVATION:
                        times = answered[sample] = answered.get(sample, 0) + 1
                        assert tokenizer.decode(own[: 4 * row.tokens].cast("i")) == str((times - 1) % 10)
                        observed += 1
    return workers, observed


def versions_with_true_logprobs(run_dir, policy_folder, models):
    """Check all log-probabilities in the journal; returns the policy steps that tokens were sampled under. `models`:
    models by step, to which models of the run's checkpoints are added."""
    prompts, holders, responses, checked = {}, {}, {}, set()
    for event, arrays in events_and_arrays(run_dir):
        if isinstance(event, GroupOpened):
            prompts[event.group] = np.frombuffer(arrays[0][1], "<i4")
        elif isinstance(event, Leased):
            holders[event.lease_id] = (event.group, event.index)
        elif isinstance(event, RowsAccepted):
            for row, own in with_payloads(event, arrays):
                sample, step = holders[row.lease_id], row.step
                before = responses.get(sample, np.empty(0, "i4"))
                assert len(before) == row.start
                new = np.frombuffer(own, "<i4", row.tokens)
                responses[sample] = np.concatenate([before, new])
                if step not in models:
                    models[step] = model_of_checkpoint(run_dir, step, policy_folder)
                whole = np.concatenate([prompts[sample[0]], responses[sample]])
                logprobs = np.frombuffer(own, "<f4", offset=4 * row.tokens)
                assert np.abs(forward_logprobs(models[step], whole, len(new)) - logprobs).max() < 1e-4
                checked.add(step)
    return checked


@torch.no_grad()
def forward_logprobs(model, tokens, count):
    ids = torch.tensor(np.asarray(tokens), dtype=torch.long)[None]
    logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[-count:, 0].numpy()
