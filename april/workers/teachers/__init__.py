"""Teachers: models that give the log-probabilities of the policy's tokens, asked by scorers. One file for each kind."""

from april.util.registry import Registry

TEACHERS = Registry(
    "teacher.NAME.kind",
    "teacher",
    {"transformers": "april.workers.teachers.folder:FolderTeacher"}
    | {name: f"april.workers.teachers.servers:{name.capitalize()}Teacher" for name in ("sglang", "vllm", "openai")},
)
"""Teachers by their kind (`teacher.NAME.kind`): a function of `TeacherRules` that returns a `Teacher`. Kinds with the
attribute `is_server` need an address."""
