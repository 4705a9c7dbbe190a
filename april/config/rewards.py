"""The keys of `[reward]` and `[reward.part.NAME]`, and what is refused among them."""

import re
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field

from april.config.section import Section
from april.util.errors import refuse
from april.util.registry import registry_of
from april.util.text import GROUP_REWARD, is_secret
from april.wire.limits import (
    MAX_FEEDBACK_CHARACTERS,
    MAX_REWARD,
    MAX_REWARD_DETAILS,
    OWN_REWARD,
    PENALTIES,
    is_reward,
)

PENALTY_KEYS = dict(zip(PENALTIES, ("overlong_buffer_tokens", "format_pattern"), strict=True))
"""Key that turns on each penalty, by the penalty's name among the details and parts of the reward."""
PART_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
UNFIT_NAMES = ("base", "over_limit")
"""Names of reward details that April itself adds; no part of the reward may have one of them."""


class RewardPartSection(Section):
    """A part of the reward, [reward.part.NAME]. With parts, the reward is the sum of their values, each times its
    weight; each value is a detail of the reward under the part's name."""

    verifier: str = Field(
        "",
        description="Verifier whose reward is the value of the part; it takes its time for every response. Empty: the "
        "value is found by the name of the part. Parts called overlong or format have that penalty, a part called "
        "reward has the reward of reward.name, and any other the detail of its name that reward.name gives.",
    )
    weight: float = Field(
        1.0,
        description="Factor on the part in the reward, and on its advantage where advantages are made apart. Below 0, "
        "a high value of the part lowers the reward.",
    )
    gate: str = Field(
        "",
        description="Name of another part: where its value is not above gate_above, this part counts as 0. Empty: "
        "the part always counts.",
    )
    gate_above: float = Field(
        0.0,
        description="Value that the part named by gate has to exceed. A high value lets the part count more rarely.",
    )


class RewardSection(Section):
    name: str = Field(
        "final_answer",
        description="Verifier for rows that name none: one that ships, or yours as package.module:function.",
    )
    where: Literal["worker", "scorer"] = Field(
        "worker",
        description="Where responses are scored: in the worker that generated them, or by scorer processes "
        "([scorer]), which takes one more lease for each response.",
    )
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Time after which a verifier's call is killed (seconds); the verifiers of all parts of a response "
        "share it. A high value waits long for one that hangs; a low one fails slow ones, whose samples are tried "
        "again.",
    )
    processes: int = Field(
        1,
        ge=1,
        description="Verifier processes of each worker, or of each scorer. More score more responses at a "
        "time; each takes its own memory.",
    )
    memory_mb: int = Field(
        4096,
        ge=256,
        description="Largest address space of a verifier process (MiB). A low value fails verifiers that need more.",
    )
    overlong_buffer_tokens: int = Field(
        0,
        ge=0,
        description="Soft overlong penalty of DAPO: tokens at the end of sampling.max_response_tokens over which the "
        "penalty rises from 0 to overlong_penalty. A large buffer penalises shorter responses too. 0: none.",
    )
    overlong_penalty: float = Field(
        1.0,
        ge=0,
        description="Reward subtracted from a response that uses its whole token budget; see overlong_buffer_tokens. "
        "A high value weighs length more than correctness.",
    )
    format_pattern: str = Field(
        "",
        description="Regular expression that a response should match somewhere; one that does not loses "
        "format_penalty. Empty: none.",
    )
    format_penalty: float = Field(
        1.0,
        ge=0,
        description="Reward subtracted from a response that does not match format_pattern. A high value weighs format "
        "more than correctness.",
    )
    url: str = Field(
        "",
        description="Address of the reward model that the verifier remote asks, as http://HOST:PORT/PATH. A request "
        "carries up to 32 responses. ${NAME} stands for an environment variable of workers or scorers.",
    )
    url_key_variable: str = Field(
        "",
        pattern=r"^([A-Za-z_]\w*)?$",
        description="Name of the environment variable of workers or scorers with the key of the server at reward.url, "
        "which is sent as a bearer token. Empty: none.",
    )
    code_test_s: float = Field(
        4.0,
        gt=0,
        description="Longest run of a program in one test of the verifier code (seconds). A program that hangs takes "
        "this long in each test.",
    )
    code_memory_mb: int = Field(
        1024,
        ge=64,
        description="Largest memory of a program that the verifier code runs, with all its child processes (MiB). A "
        "low value stops programs that need more.",
    )
    code_isolation: Literal["best", "strict"] = Field(
        "best",
        description="Isolation of programs that the verifier code runs: best uses all that this host permits, strict "
        "refuses a host that does not permit everything.",
    )
    over_limit: Literal["failed", "wrong"] = Field(
        "wrong",
        description="Handling of a response that no verifier can decide within its limits: wrong scores it as wrong, "
        "which blames the policy for a slow machine; failed tries it again, and may cost its group.",
    )
    without_special_tokens: list[str] = Field(
        [],
        description="Verifiers that get responses without special tokens. Other verifiers see the special tokens that "
        "the policy wrote, such as </think> in some vocabularies, except an end token at the end. List all of "
        "reward.name and the verifiers of its parts, or none of them. Empty: none.",
    )
    feedback_characters: int = Field(
        2000,
        ge=1,
        le=MAX_FEEDBACK_CHARACTERS,
        description="Longest text of a verifier that {feedback} of algorithm.hint shows (characters); of a longer one "
        "the beginning and the end are kept. A high value tells more of a long log, and makes the teacher's prompts "
        "longer.",
    )
    max_failed_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Largest share of prompts that may fail for good; above it `april run` ends with an exit status "
        "of failure. A high value hides failures; 1: no limit.",
    )
    allowed: list[str] = Field(
        [],
        description="Verifiers that rows of the data may name. Whoever writes the data chooses among these. Empty: "
        "those that ship.",
    )
    part: dict[str, RewardPartSection] = Field(
        {},
        description="Parts by name, as [reward.part.NAME]: the reward of rows that reward.name scores is then the sum "
        "of the parts, each times its weight. Rows that name another verifier keep that verifier's reward.",
    )

    def asked(self, verifier: str) -> list[str]:
        """The verifiers that score a response whose row names `verifier`: that one and, if it is reward.name, those of
        the parts of the reward."""
        parts = self.part.values() if verifier == self.name else ()
        return [verifier, *(part.verifier for part in parts if part.verifier)]


def check_reward(reward: RewardSection, budget: int) -> None:
    """Refuse keys of `[reward]` that do not fit together; `budget`: the longest response (tokens)."""
    check_parts(reward)
    if reward.overlong_buffer_tokens > budget:
        refuse(
            "reward.overlong_buffer_tokens",
            reward.overlong_buffer_tokens,
            f"is more than sampling.max_response_tokens = {budget}",
            "use a part of it",
        )
    if reward.code_memory_mb > reward.memory_mb:
        refuse(
            "reward.code_memory_mb",
            reward.code_memory_mb,
            f"is more than reward.memory_mb = {reward.memory_mb}, within which programs run",
            "raise that",
        )
    for key in ("allowed", "without_special_tokens"):
        for name in getattr(reward, key):
            registry_of("reward.name").check_name(name, f"reward.{key}")
    if reward.url and not re.match(r"https?://[^/\s]", reward.url):
        refuse("reward.url", reward.url, "is no address", "give it as http://HOST:PORT/PATH")
    query = parse_qsl(urlsplit(reward.url).query)
    secret = [
        name for name, value in query if is_secret(name) and name.lower() not in ("key", "keys") and "${" not in value
    ]
    if "@" in urlsplit(reward.url).netloc or secret:
        fix = "name the variable in reward.url_key_variable, or as ${NAME} in the address"
        refuse("reward.url", reward.url, "holds a secret, which belongs into an environment variable", fix)
    try:
        re.compile(reward.format_pattern)
    except re.error as error:
        refuse("reward.format_pattern", reward.format_pattern, f"is no regular expression ({error})", "mend it")


def check_parts(reward: RewardSection) -> None:
    """Refuse parts of the reward that no verifier or penalty gives, and gates that are no parts."""
    if len(reward.part) > MAX_REWARD_DETAILS:
        refuse("reward.part", sorted(reward.part), f"has more than {MAX_REWARD_DETAILS} parts", "use fewer")
    for name, part in reward.part.items():
        key = f"reward.part.{name}"
        if not PART_NAME.fullmatch(name) or name in UNFIT_NAMES:
            fix = f"use up to 40 letters, digits, full stops, - and _, and neither of {', '.join(UNFIT_NAMES)}"
            refuse("reward.part", name, "is no name of a part", fix)
        if part.verifier and (name == OWN_REWARD or name in PENALTY_KEYS):
            refuse(f"{key}.verifier", part.verifier, f"is given to {name!r}, a part of April's own", "rename the part")
        if part.verifier:
            registry_of("reward.name").check_name(part.verifier, f"{key}.verifier")
        plain = reward.without_special_tokens
        if part.verifier and (part.verifier in plain) != (reward.name in plain):
            why = (
                f"names one of reward.name = {reward.name!r} and {key}.verifier = {part.verifier!r}, which get one text"
            )
            refuse("reward.without_special_tokens", plain, why, "name both of them, or neither")
        if part.verifier.startswith(GROUP_REWARD):
            fix = "name it in reward.name, and its details as parts"
            refuse(f"{key}.verifier", part.verifier, "sees a whole group, and parts see a response", fix)
        if name in PENALTY_KEYS and not getattr(reward, PENALTY_KEYS[name]):
            refuse("reward.part", name, "is a penalty that is off", f"set reward.{PENALTY_KEYS[name]}")
        if not is_reward(part.weight):
            refuse(f"{key}.weight", part.weight, f"is not within {MAX_REWARD:g}, as a reward is", "scale the parts")
        if part.gate and (part.gate == name or part.gate not in reward.part):
            others = ", ".join(sorted(reward.part.keys() - {name})) or "none is"
            refuse(f"{key}.gate", part.gate, "is no other part", f"configured: {others}")


def check_apart(reward: RewardSection, advantage: str) -> None:
    """Refuse an advantage that normalises each part of the reward (`needs_parts`) if there are no parts, or if a
    penalty is turned on for which there is no part of its name, since the advantage would not see that penalty."""
    if not reward.part:
        refuse("algorithm.advantage", advantage, "is made of the parts of a reward", "add [reward.part.NAME] tables")
    for name, key in PENALTY_KEYS.items():
        if getattr(reward, key) and name not in reward.part:
            why = f"is a penalty that algorithm.advantage = {advantage!r} does not see"
            refuse(f"reward.{key}", getattr(reward, key), why, f"add [reward.part.{name}], or leave it out")
