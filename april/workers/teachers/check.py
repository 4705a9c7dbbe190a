"""Checks of a teacher before a run: it can be asked, and its tokens are the policy's."""

import re
from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from april.config import Config
from april.config.workers import TeacherSection
from april.data.tokenizer import Tokenizer
from april.util.errors import refuse
from april.util.text import first_line
from april.workers.rewards.remote import RemoteError
from april.workers.teachers import TEACHERS
from april.workers.teachers.messages import TeacherError
from april.workers.teachers.pool import rules_of
from april.workers.teachers.process import checked
from april.workers.teachers.servers import ServerTeacher

PROBED_TOKENS = 256
"""Maximum number of tokens in the text that a server scores before a run."""
PROBE_S = 60.0
"""Time limit for scoring the probe text (s), unless the teacher's own limit is shorter."""
SAME = "take a teacher with the policy's tokeniser"


def check_teacher(config: Config, name: str, section: TeacherSection) -> None:
    """Raise ConfigError for a teacher of an unknown kind or with another tokeniser than the policy's, or whose server
    does not answer. `section`: the keys of `[teacher.NAME]`."""
    key, kind = f"teacher.{name}", TEACHERS.find(section.kind, f"teacher.{name}.kind")
    if section.kind in TEACHERS.shipped and bool(section.url) != getattr(kind, "is_server", False):
        fix = "leave it out" if section.url else "set it to http://HOST:PORT"
        refuse(f"{key}.url", section.url, f"does not fit {key}.kind = {section.kind!r}", fix)
    if config.vocabulary and section.top_k > config.vocabulary:
        refuse(f"{key}.top_k", section.top_k, f"is more than the policy's {config.vocabulary} ids", "lower it")
    if not section.path.is_dir():
        refuse(f"{key}.path", section.path, "is no folder", "give the Hugging Face folder of the teacher's tokeniser")
    policy = Tokenizer(config.model.path)
    compare(f"{key}.path", section, policy, Tokenizer(section.path))
    if isinstance(kind, type) and issubclass(kind, ServerTeacher):
        rules = rules_of(config, name)
        probe(key, kind(replace(rules, timeout_s=min(PROBE_S, rules.timeout_s))), policy)
    held = config.model_copy(update={"model": config.model.model_copy(update={"path": section.path})})
    ours, theirs = config.vocabulary or 0, held.vocabulary or 0
    if section.where == "learner" and theirs < ours:
        why = f"has a head of {theirs} ids, and the policy one of {ours}, of which some would have no teacher"
        refuse(f"{key}.path", section.path, why, "take a teacher with at least as many")


def compare(key: str, section: TeacherSection, policy: Tokenizer, teacher: Tokenizer) -> None:
    """Raise ConfigError for a teacher whose tokeniser has other tokens than the policy's; the error names the first id
    that differs. `key`: the configuration key named in the error."""
    ours, theirs = ({number: token for token, number in each.inner.get_vocab().items()} for each in (policy, teacher))
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            why = f"has token {number} as {theirs.get(number)!r}, and the policy as {ours.get(number)!r}"
            refuse(key, section.path, why, SAME)


def probe(key: str, teacher: ServerTeacher, policy: Tokenizer) -> None:
    """Have a server score a text of plain words, and compare the ids and texts that it reports with the policy's
    tokeniser. Raises ConfigError. `key`: the configuration key named in the error, without `.url`."""
    ids = list(islice(plain_ids(policy), PROBED_TOKENS))
    try:
        scored = teacher.scored(ids, with_texts=True)
        checked(teacher.told(ids, scored), 1, len(ids) - 1, teacher.rules)
    except (RemoteError, TeacherError, LookupError, TypeError, ValueError) as error:
        fix = "start the server, or name its kind"
        if teacher.rules.top_k:
            fix += f"; if it tells fewer ids, lower {key}.top_k, or raise its limit (vLLM's --max-logprobs)"
        refuse(f"{key}.url", teacher.rules.url, f"gives no log-probabilities ({first_line(error)})", fix)
    for asked, token in zip(ids, scored, strict=True):
        text = policy.inner.decode([asked])
        if token.id not in (None, asked) or (token.text is not None and token.text.strip("▁Ġ ") != text.strip()):
            why = f"has token {asked} as {token.text!r} (id {token.id}), and the policy as {text!r}"
            refuse(f"{key}.url", teacher.rules.url, why, SAME)


def plain_ids(tokenizer: Tokenizer) -> Iterator[int]:
    """Ids of tokens that are plain words or numbers, spread over the vocabulary: any tokeniser decodes them alike."""
    count = len(tokenizer.inner)
    for number in range(0, count, max(1, count // (4 * PROBED_TOKENS))):
        if re.fullmatch(r" ?[A-Za-z0-9]+", tokenizer.inner.decode([number])):
            yield number
