"""Checks of `[teacher.NAME]`, and which teacher scores which samples."""

import re

from april.config.sections import Config
from april.util.errors import refuse

TEACHER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_teachers(config: Config) -> None:
    """Refuse teachers that cannot be asked, sources that name none of them, and distillation without any."""
    for name, teacher in config.teacher.items():
        if not TEACHER_NAME.fullmatch(name):
            refuse("teacher", name, "is no name", "use up to 64 letters, digits, full stops, - and _")
        if teacher.url and not re.match(r"https?://[^/\s@]+$", teacher.url.rstrip("/")):
            refuse(f"teacher.{name}.url", teacher.url, "is no address of a server", "give it as http://HOST:PORT")
    if config.teacher and config.reward.where != "scorer":
        refuse("reward.where", config.reward.where, "has nobody to ask [teacher]", "set it to 'scorer'")
    if config.teacher and config.agent.is_set:
        refuse("teacher", sorted(config.teacher), "is for samples without agents", "leave out [agent] or [teacher]")
    for number, source in enumerate(config.data.sources):
        if source.teacher and source.teacher not in config.teacher:
            known = ", ".join(sorted(config.teacher)) or "none is"
            refuse(f"data.sources.{number}.teacher", source.teacher, "is no [teacher.NAME]", f"configured: {known}")
        if not source.teacher and len(config.teacher) > 1:
            fix = f"name one of {sorted(config.teacher)}"
            refuse(f"data.sources.{number}.teacher", "", "leaves the teacher open", fix)
    if len(config.teacher) > 1 and not config.data.sources:
        refuse("teacher", sorted(config.teacher), "has several for one source", "name one for each of data.sources")
    if config.algorithm.distillation and not config.teacher:
        refuse("algorithm.distillation", config.algorithm.distillation, "has no teacher", "add a [teacher.NAME]")
    if config.algorithm.distillation and config.sampling.is_cut:
        refuse(
            "algorithm.distillation",
            config.algorithm.distillation,
            "compares whole distributions, and sampling.top_k, top_p or min_p cuts the policy's",
            "leave those out",
        )


def teacher_of(config: Config, source: int) -> str:
    """Name of the teacher of a training source, by its number; "" without one."""
    sources = config.data.sources
    return (sources[source].teacher if sources else "") or next(iter(config.teacher), "")
