"""Samples stored for reading: one Parquet file per step in `samples/` of the run folder, with one row per sample.

Held-out samples are in the file of the step whose weights they evaluate, from step 0 on, the weights before training.
Files are written in a thread while training goes on. A step that is trained again replaces its file. `schema` has the
columns.
"""

import importlib.util
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from april.config import Config
from april.data.groups import chosen_groups
from april.data.images import name_of
from april.data.tokenizer import Tokenizer
from april.learner.batch import ReceivedGroup, TrainingBatch, TrainSample
from april.util.files import replace_file
from april.util.lifetime import in_background

log = logging.getLogger(__name__)

ROW_GROUP_TOKENS = 1 << 16
"""Approximate tokens per Parquet row group: small groups make reading one sample fast, few groups make listing all
samples fast."""
PICTURES = "images"
"""Folder in `samples/` with the images of the samples; the column of the same name has the names of their files."""
SPAN_COLUMNS = ("what", "where", "began", "ended", "start", "end", "how")
"""Field names in the Parquet column `spans`, whose entries are time spans of a sample; one name for each field of
`wire.SampleSpan`, in order."""
Scores = Mapping[int, np.ndarray]
"""Log-probabilities and entropies, float32 [2, K], of the K sampled tokens of rows of a batch, by index of the row."""


OPTIONAL = ("token_scores", "source", "feedback")
"""Columns that a step's file lacks if no sample of the step has a value for them; in the order of the parameters of
`schema`."""


def schema(token_scores: bool = False, sources: bool = False, feedback: bool = False):
    """Columns of a file of samples; `token_scores`, `sources`, `feedback`: whether any sample has token scores, the
    number of its source, or its verifier's text, a column each."""
    import pyarrow as arrow

    ids, figures = arrow.list_(arrow.int32()), arrow.list_(arrow.float32())
    stretch = [("start", arrow.int32()), ("end", arrow.int32())]
    segment = [*stretch, ("incarnation", arrow.int32()), ("step", arrow.int32())]
    turn = [("who", arrow.string()), *stretch]
    detail = [("name", arrow.string()), ("value", arrow.float64())]
    span = [("what", arrow.string()), ("where", arrow.string()), ("began", arrow.float64()), ("ended", arrow.float64())]
    span += [*stretch, ("how", arrow.string())]
    chunk = [("end", arrow.int32()), ("at", arrow.float64())]
    column = [("name", arrow.string()), ("values", figures)]
    optional = {"token_scores": arrow.list_(arrow.struct(column))} if token_scores else {}
    optional |= {"source": arrow.int32()} if sources else {}
    optional |= {"feedback": arrow.string()} if feedback else {}
    return arrow.schema(
        {
            "step": arrow.int32(),
            "group": arrow.int64(),
            "index": arrow.int32(),
            "fork": arrow.int32(),
            "parent": arrow.int32(),
            "shared": arrow.int32(),
            "prompt": arrow.string(),
            "response": arrow.string(),
            "label": arrow.string(),
            "prompt_ids": ids,
            "response_ids": ids,
            "images": arrow.list_(arrow.string()),
            "segments": arrow.list_(arrow.struct(segment)),
            "turns": arrow.list_(arrow.struct(turn)),
            "behaviour_logprobs": figures,
            "learner_logprobs": figures,
            "entropies": figures,
            "reward": arrow.float64(),
            "reward_details": arrow.list_(arrow.struct(detail)),
            "advantage": arrow.float64(),
            "trained": arrow.bool_(),
            "finish_reason": arrow.string(),
            "held_out": arrow.string(),
            "discarded": arrow.string(),
            "discarded_from": arrow.int32(),
            "attempts": arrow.int32(),
            "error": arrow.string(),
            "opened_at": arrow.float64(),
            "generated_at": arrow.float64(),
            "scored_at": arrow.float64(),
            "delivered_at": arrow.float64(),
            "discarded_at": arrow.float64(),
            "chunks": arrow.list_(arrow.struct(chunk)),
            "spans": arrow.list_(arrow.struct(span)),
        }
        | optional
    )


class SampleWriter:
    """Writes samples on rank 0. An exception is logged and never ends the run: an OSError loses the samples of its
    step, any other ends the writing of samples."""

    def __init__(self, config: Config):
        self.section, self.seed, self.model = config.samples, config.seed, config.model.path
        self.folder = config.run_dir / "samples"
        self.several_sources = len(config.data.prompt_sources) > 1
        self.tokenizer: Tokenizer | None = None
        self.works = importlib.util.find_spec("pyarrow") is not None
        self._writing: Future[None] | None = None
        if self.section.every and not self.works:
            log.warning("samples are not kept, since pyarrow is not installed; `pip install 'april-rl[data]'`")

    def keep(
        self, batch: TrainingBatch, advantages: np.ndarray, scores: Scores | None, nonfinite: bool = False
    ) -> None:
        """Start writing the samples of a consumed batch that the section `[samples]` chooses.

        `advantages`: [B], one per row of the batch. `scores`: of the rows with a gradient; None for a trainer that does
        not report them, where a row has a gradient if its advantage is not 0. `nonfinite`: the batch was skipped, as
        its loss or gradient was not finite; its samples are written as discarded.
        """
        self.finish()
        if self.works:
            self._writing = in_background(self._write, batch, advantages, scores, nonfinite)

    def keep_untrained(self, step: int, groups: list[ReceivedGroup]) -> None:
        """Start writing `groups` that were discarded or held out, without trained samples beside them: because the
        samples of batch `step`, with which the groups came, are not kept, or because they came after the last batch."""
        self.finish()
        if self.works and groups:
            self._writing = in_background(self._put, step, [], groups)

    def finish(self) -> None:
        """Wait until what `keep` or `keep_untrained` has started to write is on disk, or has failed."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except OSError as error:
            log.warning("the samples of a step are not kept: %s", error)
        except Exception as error:
            self.works = False
            log.warning("samples are not kept from here on: %s: %s; mend that", type(error).__name__, error)
        self._writing = None

    def _write(self, batch: TrainingBatch, advantages: np.ndarray, scores: Scores | None, nonfinite: bool) -> None:
        tokenizer = self._tokenizer()
        rewards = [[sample.reward for sample in group] for group in batch.groups]
        kept = set(chosen_groups(rewards, self.section.groups, f"{self.seed} {batch.step}"))
        rows, row_index = [], 0
        for number, group in enumerate(batch.groups):
            for index, sample in enumerate(group):
                if number in kept:
                    advantage = float(advantages[row_index])
                    row = describe(sample, (scores or {}).get(row_index), tokenizer) | {
                        "group": sample.group if sample.group >= 0 else number,
                        **({"source": sample.source} if self.several_sources else {}),
                        "index": sample.index if sample.index >= 0 else index,
                        "advantage": advantage,
                        "trained": row_index in scores if scores is not None else advantage != 0 and not nonfinite,
                        "discarded": "nonfinite" if nonfinite else "",
                    }
                    rows.append(row)
                row_index += 1
        self._put(batch.step, rows, batch.untrained)

    def _tokenizer(self) -> Tokenizer:
        self.tokenizer = self.tokenizer or Tokenizer(self.model)
        return self.tokenizer

    def _put(self, step: int, rows: list[dict[str, Any]], untrained: list[ReceivedGroup]) -> None:
        """Write the Parquet file of weights `step` + 1, which batch `step` gives, with the batch's `rows` and the
        discarded groups of `untrained`; add the held-out samples of `untrained` to the files of the weights that they
        evaluate."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        rows_by_step = {step + 1: rows} if rows else {}
        for row in describe_untrained(untrained, self._tokenizer(), self.several_sources):
            rows_by_step.setdefault(row["segments"][-1]["step"] if row["held_out"] else step + 1, []).append(row)
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, of_step in rows_by_step.items():
            for row in of_step:
                row["images"] = [keep_picture(self.folder / PICTURES, png) for png in row["images"]]
            path = self.folder / f"step_{number:06d}.parquet"
            columns = schema(*(any(name in row for row in of_step) for name in OPTIONAL))
            table = arrow.Table.from_pylist([row | {"step": number} for row in of_step], schema=columns)
            if number <= step and path.exists():
                table = arrow.concat_tables([without_held_out(path), table], promote_options="default")
            tokens = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in of_step)
            size = row_group_size(len(of_step), tokens)
            temporary = path.with_suffix(".tmp")
            parquet.write_table(table, temporary, row_group_size=size, compression="zstd")
            temporary.replace(path)
        thin_out(self.folder, self.section.max_mb << 20)


def keep_picture(folder: Path, png: bytes) -> str:
    """Write an image to a file in `folder` unless the file exists; returns the file's name without `.png`."""
    name = name_of(png)
    path = folder / f"{name}.png"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        replace_file(path, png)
    return name


def without_held_out(path: Path) -> Any:
    """The rows of the Parquet file `path` that are not of held-out samples. A restarted broker sends the held-out
    samples of a step again, which then replace the earlier ones."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    if "held_out" not in table.column_names:
        return table
    return table.filter(compute.equal(compute.fill_null(table["held_out"], ""), ""))


def row_group_size(samples: int, tokens: int) -> int:
    """Samples in each row group of a file with this many samples and tokens."""
    return max(1, ROW_GROUP_TOKENS * samples // max(1, tokens))


def describe_untrained(
    groups: list[ReceivedGroup], tokenizer: Tokenizer, with_source: bool
) -> Iterator[dict[str, Any]]:
    """Parquet columns of the samples of groups that were discarded or held out; `with_source`: of discarded ones also
    the number of their source."""
    for head, group in groups:
        for sample_head, sample in zip(head.samples, group, strict=True):
            first = sample.prompt_tokens - head.prompt_tokens
            yield describe(sample, None, tokenizer) | {
                "group": head.group,
                "index": sample_head.index,
                "reward": None if math.isnan(sample_head.reward) else sample_head.reward,
                "held_out": head.held_out,
                "discarded": head.discarded,
                "discarded_from": max(0, sample_head.discarded_from - first),
                "attempts": sample_head.attempts,
                "error": sample_head.error,
                "delivered_at": None,
                "discarded_at": head.delivered_at if head.discarded else None,
                **({"source": head.source} if with_source and not head.held_out else {}),
            }


def describe(sample: TrainSample, scores: np.ndarray | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Parquet columns of one sample, but with the images themselves (PNG) where a file has their names. Per-token
    columns are null at tokens that the policy did not sample; `scores`, float32 [2, K] (log-probabilities, entropies
    under the learner), is None for a sample without a gradient."""
    prompt, response = sample.tokens[: sample.prompt_tokens], sample.tokens[sample.prompt_tokens :]

    def at_sampled(values: np.ndarray) -> list[float | None]:
        column: list[float | None] = [None] * len(response)
        for position, value in zip(sample.sampled_positions.tolist(), values.tolist(), strict=True):
            column[position] = value
        return column

    scores_by_name = [
        {"name": name, "values": at_sampled(values[sample.sampled_positions])}
        for name, values in sorted(sample.token_scores.items())
        if values.ndim == 1
    ]
    optional = {"token_scores": scores_by_name, "feedback": sample.feedback}
    return {name: value for name, value in optional.items() if value} | {
        "prompt": tokenizer.decode(prompt),
        "response": tokenizer.decode(response),
        "label": sample.label,
        "prompt_ids": prompt.tolist(),
        "response_ids": response.tolist(),
        "images": sample.images,
        "segments": [
            {"start": start, "end": end, "incarnation": version.incarnation, "step": version.step}
            for start, end, version in sample.segments
        ],
        "turns": turns(sample),
        "behaviour_logprobs": at_sampled(sample.logprobs[sample.sampled_positions]),
        "learner_logprobs": None if scores is None else at_sampled(scores[0]),
        "entropies": None if scores is None else at_sampled(scores[1]),
        "fork": sample.fork,
        "parent": sample.parent if sample.fork else None,
        "shared": sample.shared_tokens if sample.fork else None,
        "reward": float(sample.reward),
        "reward_details": [{"name": name, "value": value} for name, value in sorted(sample.details.items())],
        "trained": scores is not None,
        "finish_reason": sample.finish_reason,
        "held_out": "",
        **times(sample),
    }


def turns(sample: TrainSample) -> list[dict[str, Any]]:
    """Contiguous token ranges of the response, in order: `who` wrote them ("policy" for sampled tokens, "other" for
    those of an environment or agent), `start` and `end` (exclusive)."""
    found: list[dict[str, Any]] = []
    for start, end, _ in sample.segments:
        covered = found[-1]["end"] if found else 0
        if start > covered:
            found.append({"who": "other", "start": covered, "end": start})
        if found and found[-1]["who"] == "policy":
            found[-1]["end"] = end
        else:
            found.append({"who": "policy", "start": start, "end": end})
    if (covered := found[-1]["end"] if found else 0) < sample.response_tokens:
        found.append({"who": "other", "start": covered, "end": sample.response_tokens})
    return found


def times(sample: TrainSample) -> dict[str, Any]:
    """Values of a sample's columns with times (Unix seconds; None if unknown): `opened_at`, `generated_at` (end of the
    last generation span), `scored_at`, `delivered_at`, and the lists `chunks` and `spans`."""

    def last(*kinds: str) -> float | None:
        return max((span.ended for span in sample.spans if span.activity in kinds), default=None)

    return {
        "opened_at": sample.opened_at or None,
        "generated_at": last("generate"),
        "scored_at": last("score") or last("act"),
        "delivered_at": sample.delivered_at or None,
        "chunks": [{"end": end, "at": at or None} for end, at in sample.chunks],
        "spans": [dict(zip(SPAN_COLUMNS, msgspec.structs.astuple(span), strict=True)) for span in sample.spans],
    }


def thin_out(folder: Path, limit_bytes: int) -> None:
    """Delete sample files in `folder` until the rest, with its images, fits in `limit_bytes`. Each time the step with
    the smallest gap between its neighbours goes, so that the remaining steps are spread evenly; the first and the
    newest step stay."""
    sizes = {path: path.stat().st_size for path in sorted(folder.glob("step_*.parquet"))}
    pictures = {path: path.stat().st_size for path in (folder / PICTURES).glob("*.png")}
    while sum(sizes.values()) + sum(pictures.values()) > limit_bytes and len(sizes) > 2:
        paths = list(sizes)
        steps = [int(path.stem.removeprefix("step_")) for path in paths]
        gaps = [steps[i + 1] - steps[i - 1] for i in range(1, len(steps) - 1)]
        dropped = paths[1 + gaps.index(min(gaps))]
        dropped.unlink()
        del sizes[dropped]
        named = names_of_pictures(sizes) if pictures else set()
        for path in [path for path in pictures if path.stem not in named]:
            path.unlink()
            del pictures[path]


def names_of_pictures(files: Iterable[Path]) -> set[str]:
    """Names of the images of all samples in these files."""
    import pyarrow.parquet as parquet

    columns = (parquet.read_table(file, columns=["images"])["images"].to_pylist() for file in files)
    return {name for column in columns for names in column for name in names or ()}
