"""Checks of `[teacher.NAME]`, and which teacher scores which samples."""

import re

from april.config.algorithms import algorithm_of, named, naming, used_algorithms
from april.config.sections import Config
from april.config.training import AlgorithmSection
from april.config.workers import TeacherSection
from april.util.errors import refuse
from april.util.registry import registry_of

TEACHER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
HINT_FIELDS = ("prompt", "label", "hint", "feedback")
"""Fields that `algorithm.hint` may have in braces."""


def check_teachers(config: Config) -> None:
    """Refuse teachers that cannot be asked, sources that name none of them, and distillation without a teacher."""
    for name, teacher in config.teacher.items():
        if not TEACHER_NAME.fullmatch(name):
            refuse("teacher", name, "is no name", "use up to 64 letters, digits, full stops, - and _")
        if teacher.url and not re.match(r"https?://[^/\s@]+$", teacher.url.rstrip("/")):
            refuse(f"teacher.{name}.url", teacher.url, "is no address of a server", "give it as http://HOST:PORT")
    asked = [name for name, teacher in config.teacher.items() if teacher.where == "scorer"]
    if asked and config.reward.where != "scorer":
        refuse("reward.where", config.reward.where, "has nobody to ask [teacher]", "set it to 'scorer'")
    for number, source in enumerate(config.data.prompt_sources):
        key, asks = f"data.sources.{number}", asks_teacher(config, number)
        if source.teacher and source.teacher not in config.teacher:
            known = ", ".join(sorted(config.teacher)) or "none is"
            refuse(f"{key}.teacher", source.teacher, "is no [teacher.NAME]", f"configured: {known}")
        if source.teacher and not asks:
            why = "is never asked, since the algorithm of this source does not distil"
            refuse(f"{key}.teacher", source.teacher, why, f"leave it out, or set {key}.algorithm.distillation")
        if asks and not source.teacher and len(config.teacher) > 1:
            fix = f"name one of {sorted(config.teacher)}"
            refuse(f"{key}.teacher", "", "leaves the teacher open", fix)
    if len(config.teacher) > 1 and not config.data.sources:
        refuse("teacher", sorted(config.teacher), "has several for one source", "name one for each of data.sources")
    check_held_teacher(config)
    check_hint(config)
    sources = range(max(1, len(config.data.prompt_sources)))
    if idle := sorted({*asked} - {teacher_of(config, source) for source in sources}):
        why = "is a teacher that is never asked: no source that distils has it"
        refuse("teacher", idle[0], why, "leave it out, or name it as teacher of a source whose algorithm distils")
    key, name = naming(config, "distillation")
    if name and not asked:
        refuse(key, name, "has no teacher", "add a [teacher.NAME] that scorers ask")
    for key, name in (naming(config, "distillation"), naming(config, "divergence")):
        if name and config.sampling.is_cut:
            why = "compares whole distributions, and sampling.top_k, top_p or min_p cuts the policy's"
            refuse(key, name, why, "leave those out")


def check_held_teacher(config: Config) -> None:
    """Refuse a teacher held by the learner if it is a server, if no divergence uses it, or if there are others; a
    divergence without a teacher; and a `top_k` that no divergence uses."""
    divergence_key, divergence = naming(config, "divergence")
    for name, teacher in config.teacher.items():
        key = f"teacher.{name}"
        if teacher.where == "scorer":
            continue
        if teacher.top_k:
            why = "is what scorers ask for, and the learner, which holds this teacher, has its whole distribution"
            refuse(f"{key}.top_k", teacher.top_k, why, "leave it out")
        if teacher.url:
            fix = "leave its url out, or have scorers ask it"
            refuse(f"{key}.where", teacher.where, "is for a model folder, and this is a server", fix)
        if len(config.teacher) > 1:
            fix = "leave out the other teachers"
            refuse(f"{key}.where", teacher.where, "has one teacher for all samples", fix)
        if not divergence:
            refuse(f"{key}.where", teacher.where, "teaches nothing", "set algorithm.divergence")
    asked = {name: teacher.top_k for name, teacher in config.teacher.items() if teacher.where == "scorer"}
    compared = {
        teacher_of(config, source)
        for source in range(max(1, len(config.data.prompt_sources)))
        if compares_top_k(config, algorithm_of(config, source))
    }
    if lacking := sorted(name for name in compared if not asked.get(name)):
        fix = f"set teacher.{lacking[0] or 'NAME'}.top_k, a [teacher.NAME] with where = 'learner', or algorithm.hint"
        refuse(divergence_key, divergence, "has no teacher that the learner holds, or whose top k scorers ask", fix)
    if unused := [name for name, top_k in asked.items() if top_k and name not in compared]:
        why = "is asked for, and no algorithm.divergence compares the policy with it"
        refuse(f"teacher.{unused[0]}.top_k", asked[unused[0]], why, "leave it out, or set algorithm.divergence")
    for table, algorithm in used_algorithms(config).items():
        if compares_top_k(config, algorithm):
            check_over_top_k(f"{table}.divergence", algorithm.divergence)


def check_over_top_k(key: str, name: str, imported: bool = False) -> None:
    """Refuse a divergence that cannot be taken over a teacher's top k ids alone. The reverse KL is one: it is smallest
    where the policy gives most of its mass to other ids. `key`, `name`: the configuration key and the divergence that
    it names; a user's own one is checked only if `imported`."""
    registry = registry_of("algorithm.divergence")
    if (imported or name in registry.shipped) and not getattr(registry.find(name), "over_top_k", False):
        fits = registry.names_where(lambda part: getattr(part, "over_top_k", False))
        why = "takes whole distributions, and scorers ask a teacher for the top k ids alone"
        refuse(key, name, why, f"use {fits}, or one of yours with the attribute over_top_k = True")


def check_hint(config: Config) -> None:
    """Refuse a hint without {prompt}, with unknown or missing fields, without a divergence, or in a run that cannot use
    it (agents' programs or a trainer write the prompts, or `learner.context_parallel` is above 1); and data.hint_key
    without {hint}."""
    key, hint, data = "algorithm.hint", config.algorithm.hint, config.data
    fields = [source.hint_key for source in data.train_sources if source.hint_key]
    if fields and "{hint}" not in hint:
        why = "is a field that every row must have then, and algorithm.hint has no {hint} that stands for it"
        refuse("data.hint_key", fields[0], why, "leave it out, or write {hint} there")
    if not hint:
        return
    if hint.count("{prompt}") != 1:
        refuse(key, hint, "has to say once where the prompt goes", "write {prompt} there")
    if hint.strip() == "{prompt}":
        refuse(
            key, hint, "is the prompt alone, after which the policy teaches itself nothing", "write a hint beside it"
        )
    unknown = sorted({*re.findall(r"(?<![\w}])\{[a-z_]+\}", hint)} - {f"{{{name}}}" for name in HINT_FIELDS})
    if unknown:
        fix = f"write {{{'}, {'.join(HINT_FIELDS)}}}"
        refuse(key, hint, f"names {unknown[0]}, which no row has", fix)
    taught = [source for number, source in enumerate(data.train_sources) if algorithm_of(config, number).divergence]
    lacking = [str(source.path) for source in taught if not source.hint_key]
    if "{hint}" in hint and lacking:
        refuse(key, hint, f"has a {{hint}}, and nothing says which field of {lacking[0]} it is", "set data.hint_key")
    if not named(config, "divergence"):
        refuse(key, hint, "teaches nothing", "set algorithm.divergence")
    if held_teacher(config):
        refuse(key, hint, "makes the policy the teacher, and [teacher.NAME] is another", "leave one of them out")
    if data.source == "submitted" or config.agent.is_set:
        whose = "an agent's program" if config.agent.is_set else "the trainer"
        refuse(key, hint, f"changes the prompts of rows, and {whose} writes the prompts here", "leave it out")
    if config.learner.context_parallel > 1:
        why = "makes the teacher's rows longer, so that ranks that share rows would hold different targets of them"
        refuse(key, hint, why, "set learner.context_parallel = 1, or leave it out")


def shows_feedback(algorithm: AlgorithmSection) -> bool:
    """Whether the policy as its own teacher sees what verifiers say of the response."""
    return "{feedback}" in algorithm.hint


def held_teacher(config: Config) -> TeacherSection | None:
    """The section [teacher.NAME] of the teacher that is loaded in the learner itself (`where = "learner"`), instead of
    being asked by scorers; None without one."""
    return next((teacher for teacher in config.teacher.values() if teacher.where == "learner"), None)


def asks_teacher(config: Config, source: int) -> bool:
    """Whether scorers ask a teacher for the samples of a training source, given by its number. If any source has an
    algorithm of its own, scorers ask only for sources whose algorithm distils from a teacher."""
    has_own, algorithm = any(each.algorithm for each in config.data.sources), algorithm_of(config, source)
    return not has_own or bool(algorithm.distillation) or compares_top_k(config, algorithm)


def compares_top_k(config: Config, algorithm: AlgorithmSection) -> bool:
    """Whether the divergence of an algorithm is over the top k ids of a teacher that scorers ask, and not from a
    teacher that the learner holds, or from the policy with a hint."""
    return bool(algorithm.divergence) and not config.algorithm.hint and held_teacher(config) is None


def top_k_score(teacher: str) -> str:
    """Name of the token score with a teacher's most likely ids: for each token `top_k` pairs (id, log-probability)."""
    return f"{teacher}/top_k"


def teacher_of(config: Config, source: int) -> str:
    """Name of the teacher that scorers ask for the samples of a training source, by its number; "" without one."""
    if held_teacher(config) or not asks_teacher(config, source):
        return ""
    sources = config.data.sources
    return (sources[source].teacher if sources else "") or next(iter(config.teacher), "")
