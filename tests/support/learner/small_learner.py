"""Tiny policies, batches and configurations for the learner's tests, and how its ranks are launched."""

from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from april.config import Config
from april.config.training import AlgorithmSection
from april.data.support import Support
from april.learner import checkpoint
from april.learner.batch import TrainingBatch, TrainSample, encode
from april.weights.base import AdapterWeights, BaseWeights
from april.weights.snapshot import pack, unpack
from april.wire.message import Version
from tests.support.learner.reference import ReferenceLearner, Settings

VOCAB = 23
BY_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
"""Advantage estimators that need no critic."""
PLAIN_CLIP = {"proximal": "behaviour", "corrections": [], "behaviour_coef": 0.0}
"""Default algorithm of the tests: PPO's clip around the behaviour policy."""
SHIPPED = AlgorithmSection().model_dump(include=set(PLAIN_CLIP))
"""Default corrections of a run for stale tokens."""


def make_policy(
    folder: Path, tied: bool = True, kind=Qwen3Config, intermediate_size: int = 33, layers: int = 2, **more
) -> Path:
    """A random Qwen3, or another `kind`, with weights large enough for significant gradients; `more` are keys of
    its configuration."""
    torch.manual_seed(3)
    config = kind(
        vocab_size=VOCAB, hidden_size=20, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=intermediate_size, tie_word_embeddings=tied, initializer_range=0.3,
        max_position_embeddings=256, **more,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_config(
    policy: Path, run_folder: Path, temperature: float = 0.7, algorithm=(), lora=(), critic=(), teacher=None, top_k=0,
    **learner,
) -> Config:  # fmt: skip
    """`teacher`: folder of a teacher that the learner holds, or that scorers ask for its `top_k` ids."""
    return Config.model_validate(
        {
            "algorithm": PLAIN_CLIP | dict(algorithm),
            "critic": dict(critic),
            "teacher": {"held": {"path": teacher, "where": "scorer" if top_k else "learner", "top_k": top_k}}
            if teacher
            else {},
            "lora": dict(lora),
            "model": {"path": policy},
            "data": {"path": "unused.jsonl"},
            "run": {"dir": run_folder.parent, "name": run_folder.name},
            "sampling": {"temperature": temperature},
            "learner": {"lr": 1e-3, "device": "cpu", "collective_timeout_s": 60, **learner},
        }
    )


def make_sample(rng, prompt_tokens: int, response_tokens: int, reward: float) -> TrainSample:
    tokens = rng.integers(0, VOCAB, prompt_tokens + response_tokens).astype(np.int32)
    logprobs = rng.normal(-3, 0.5, response_tokens).astype(np.float32)
    return TrainSample(tokens, prompt_tokens, logprobs, reward, ((0, response_tokens, Version(0, 0)),))


def near_policy(batch: TrainingBatch, policy: Path, rng, temperature: float = 0.7) -> TrainingBatch:
    """The same batch with behaviour log-probabilities slightly off the policy's, so that some ratios are clipped."""
    scorer = ReferenceLearner(policy, settings(make_config(policy, Path("unused"), temperature)))

    def rescored(sample):
        with torch.no_grad():
            exact = scorer.sample_logprobs(sample).numpy()
        noisy = np.zeros(sample.response_tokens, np.float32)
        noisy[sample.sampled_positions] = exact + rng.normal(0, 0.3, len(exact))
        return replace(sample, logprobs=noisy)

    return TrainingBatch(batch.step, [[rescored(sample) for sample in group] for group in batch.groups])


@cache
def uneven_batch(step: int, policy: Path) -> TrainingBatch:
    """The same batch each time: groups of 4, 3, 3 and 2 samples, the third without reward spread; responses of 1 to 90
    tokens, prompts of 1 to 9."""
    rng = np.random.default_rng(step)
    shapes = [
        [(3, 1, 1.0), (3, 12, 0.0), (3, 30, 0.5), (3, 7, 0.0)],
        [(9, 90, 1.0), (9, 2, 0.0), (9, 5, 0.25)],
        [(1, 6, 0.5), (1, 40, 0.5), (1, 3, 0.5)],
        [(5, 17, 0.0), (5, 1, 1.0)],
    ]
    groups = [[make_sample(rng, *shape) for shape in group] for group in shapes]
    return near_policy(TrainingBatch(step, groups), policy, rng)


def flat_batch(step: int) -> TrainingBatch:
    """A batch in which no group has reward spread."""
    rng = np.random.default_rng(step)
    return TrainingBatch(step, [[make_sample(rng, 2, 5, reward) for _ in range(3)] for reward in (0.0, 1.0)])


def stale_batch(policy: Path) -> TrainingBatch:
    """`uneven_batch` as the batch of step 6, with responses sampled by versions 1 to 6, up to three versions in a
    response."""
    rng = np.random.default_rng(7)

    def aged(sample):
        cuts = sorted({0, *rng.integers(0, sample.response_tokens, 2).tolist(), sample.response_tokens})
        versions = sorted(rng.integers(1, 7, len(cuts) - 1).tolist())
        segments = [(*span, Version(0, step)) for span, step in zip(pairwise(cuts), versions, strict=True)]
        return TrainSample(sample.tokens, sample.prompt_tokens, sample.logprobs, sample.reward, tuple(segments))

    return TrainingBatch(6, [[aged(sample) for sample in group] for group in uneven_batch(0, policy).groups])


def batch_in_turns(policy: Path) -> TrainingBatch:
    """`stale_batch` with observations of an environment: at least one token in seven of each longer response, and the
    last token of every other response. The behaviour log-probabilities of observations are meaningless."""
    rng = np.random.default_rng(11)

    def interrupted(place, sample):
        observed = np.zeros(sample.response_tokens, bool)
        for start in range(2, sample.response_tokens - 1, 7):
            observed[start : start + rng.integers(1, 4)] = True
        observed[-1] = place % 2 and sample.response_tokens > 1
        segments = []
        for start, end, version in sample.segments:
            edges = np.flatnonzero(np.diff(np.concatenate([[True], observed[start:end], [True]])))
            spans = (edges + start).reshape(-1, 2).tolist()
            segments += [(first, last, version) for first, last in spans]
        logprobs = np.where(observed, np.float32(0), sample.logprobs)
        return TrainSample(sample.tokens, sample.prompt_tokens, logprobs, sample.reward, tuple(segments))

    groups = stale_batch(policy).groups
    return TrainingBatch(6, [[interrupted(place, sample) for place, sample in enumerate(group)] for group in groups])


def told_batch(batch: TrainingBatch, top_k: int) -> TrainingBatch:
    """A batch whose samples a teacher has told its `top_k` ids of, but for the last one."""
    rng = np.random.default_rng(17)

    def told(sample):
        rows = [rng.permutation(VOCAB)[:top_k] for _ in range(sample.response_tokens)]
        logprobs = np.log(rng.dirichlet(np.ones(top_k + 1), len(rows))[:, :top_k])
        pairs = np.stack([np.array(rows), logprobs], -1).reshape(len(rows), 2 * top_k)
        return replace(sample, token_scores={"held/top_k": pairs.astype(np.float32)})

    groups = [[told(sample) for sample in group] for group in batch.groups]
    groups[-1][-1] = replace(groups[-1][-1], token_scores={})
    return TrainingBatch(batch.step, groups)


def cut_batch(policy: Path) -> TrainingBatch:
    """`batch_in_turns` as if sampling had been truncated: each sampled token has a support of 1 to 12 ids."""
    rng, turns = np.random.default_rng(13), batch_in_turns(policy)

    def cut(sample):
        rows, drawn = [np.zeros(0, np.int32)] * sample.response_tokens, sample.tokens[sample.prompt_tokens :]
        for place in sample.sampled_positions:
            others = rng.permutation(np.delete(np.arange(VOCAB, dtype=np.int32), drawn[place]))
            rows[place] = rng.permutation(np.append(others[: rng.integers(0, 12)], drawn[place]))
        return replace(sample, support=Support.of(rows))

    return near_policy(TrainingBatch(6, [[cut(sample) for sample in group] for group in turns.groups]), policy, rng)


def far_batch(policy: Path) -> TrainingBatch:
    """`stale_batch` with a distant behaviour policy: of every four responses, one has token ratios of e^2, one of e^-2,
    and one a ratio of e^30 at its first token."""
    by = ((0.0, slice(0)), (-2.0, slice(None)), (2.0, slice(None)), (-30.0, slice(1)))

    def moved(place, sample):
        logprobs, (distance, tokens) = sample.logprobs.copy(), by[place % len(by)]
        logprobs[tokens] += distance
        return replace(sample, logprobs=logprobs)

    groups = stale_batch(policy).groups
    return TrainingBatch(6, [[moved(place, sample) for place, sample in enumerate(group)] for group in groups])


def poisoned(batch: TrainingBatch) -> TrainingBatch:
    """The batch with NaN as behaviour log-probabilities of its first sample, so that its loss is not finite."""
    (first, *rest), *others = batch.groups
    return TrainingBatch(batch.step, [[replace(first, logprobs=np.full_like(first.logprobs, np.nan)), *rest], *others])


class Diary:
    """Batch source and weight publisher for a learner that records all calls in order; batch k is always the same."""

    def __init__(self, policy, last_step, incarnation=0, frontier=0):
        self.policy, self.last_step, self.incarnation, self.frontier = policy, last_step, incarnation, frontier
        self.events, self.metrics, self.weights, self.canaries, self.leftover = [], [], {}, {}, []

    def start(self, checkpoint_step):
        self.events.append(("start", checkpoint_step))
        return self.incarnation, self.frontier

    def fetch(self, step):
        if step == self.last_step:
            return None
        return flat_batch(step) if step == 1 else uneven_batch(step, self.policy)

    def alive(self):
        pass

    def consumed(self, step, metrics, discarded=""):
        self.events.append(("consumed", step, *([discarded] if discarded else [])))
        self.metrics.append(metrics)

    def durable(self, step, oldest):
        self.events.append(("durable", step, oldest))

    @property
    def in_order(self):
        """All events but `durable`, whose time depends on the writing thread."""
        return [event for event in self.events if event[0] != "durable"]

    @property
    def durables(self):
        return [event for event in self.events if event[0] == "durable"]

    def publish(self, version, tensors, canary):
        self.canaries[version] = canary
        self.events.append(("publish", version))
        self.weights[version] = tensors
        return {"peers": 3.0}


def settings(config: Config) -> Settings:
    keys = {
        "temperature": config.sampling.temperature,
        "max_response_tokens": config.sampling.max_response_tokens,
        **config.learner.model_dump(),
        **config.algorithm.model_dump(),
    }
    return Settings(**{field.name: keys[field.name] for field in fields(Settings)})


def full_moments(part) -> list[dict[str, torch.Tensor]]:
    """Unsharded moments of each trained parameter of `part` (a trainer, or its critic's part). Collective."""
    return [
        {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in moments.items()}
        for moments in map(part.optimizer.moments, part.optimizer.parameters)
        if moments
    ]


def whole_critic(trainer) -> dict[str, torch.Tensor]:
    """Unsharded weights of the trainer's critic, if it has one. Collective."""
    trained = trainer.critic.part.model.trained if trainer.critic else []
    return {name: parameter.detach().full_tensor().clone() for name, parameter in trained}


def random_adapter(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Deterministic nonzero values for the trained parameters of an adapter."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(parameter.shape, generator=generator) / 4 for name, parameter in parameters.items()}


def set_adapter(trainer) -> None:
    """Set the adapter to `random_adapter`. Collective."""
    parameters = dict(trainer.policy.trained)
    with torch.no_grad():
        for name, value in random_adapter(parameters).items():
            parameter = parameters[name]
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))


def at_a_worker(published) -> dict[str, torch.Tensor]:
    """The full weights that a worker reconstructs from published weights or a published adapter."""
    if not isinstance(published, AdapterWeights):
        return dict(published)
    snapshot = pack(Version(0, 0), published.tensors, adapter=published.adapter)
    trained = unpack(snapshot.heads, snapshot.data)
    return dict(BaseWeights(published.base.folder).with_adapter(snapshot.adapter, trained))


def set_head(trainer) -> None:
    """Set a critic's head to fixed nonzero values. Collective."""
    head = trainer.critic.part.model.head
    value = random_adapter({"head": head})["head"]
    with torch.no_grad():
        head.copy_(distribute_tensor(value, head.device_mesh, head.placements))


def on_disk(config: Config, disk: int) -> Config:
    """The same run, with its run folder in a subfolder that stands for the disk of the given number."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": config.run.dir / f"disk_{disk}"})})


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def job(config: Config, batches: list[TrainingBatch], **actions) -> dict:
    """Job for `rank_jobs`: train on `batches` in order. Actions: `save_after` (steps); `restore` (bool); `live`
    (arguments of a `Diary` to train from instead; reports of checkpoints and the export come `late_s` later); `compare`
    (configurations, each applied to the first batch under the same weights); `random_adapter` (bool: start from random
    adapter values instead of zero effect); `set_head` (bool: set the critic's head); `disks` (by rank: number of its
    own disk, see `on_disk`); `parts` (bool: only gather the weights in parts), in
    buckets of `bucket_bytes`; `export` (a rank, of which the first
    writes fail, and the number of these: only export the model); `without` (files or folders of the run that are
    deleted before); `flip_in` (files in which a bit is flipped before)."""
    return {"config": config.model_dump(mode="json"), "batches": [encode(b).hex() for b in batches], **actions}


class Judge(Diary):
    """A `Diary` that decides on the best step from the checkpoints reported to it."""

    def __init__(self, *arguments, best, **options):
        super().__init__(*arguments, **options)
        self.best_step, self.last, self.kept = best, 0, []

    def durable(self, step, oldest):
        super().durable(step, oldest)
        self.last = step
        self.kept.append(checkpoint.steps(self.directory))

    def best(self):
        return self.best_step(self.last)


def best_step(last):
    """(best step so far or -1, undecided steps) after checkpoint `last`: step 2 is the best until, from step 6 on, step
    4 turns out to be better."""
    if last >= 6:
        return 4, []
    return (2 if last >= 2 else -1), [step for step in (4,) if step <= last]


def run_of(config):
    """Create the run folder of a configuration, with its config.toml; returns the folder."""
    short = config.sampling.model_copy(update={"max_response_tokens": 100})
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(config.model_copy(update={"sampling": short}).to_toml())
    return config.run_dir
