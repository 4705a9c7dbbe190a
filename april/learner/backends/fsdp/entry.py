"""Entry of the FSDP2 back end: each rank holds its rows of every weight and trains a part of the batch."""

from typing import TYPE_CHECKING

from april.config import Config, ConfigError
from april.learner.backends.entry import BackendEntry
from april.util.errors import refuse, refuse_for

if TYPE_CHECKING:
    import torch

    from april.learner.backends.backend import Backend


class FSDPEntry(BackendEntry):
    can_offload = True
    divides_rows = True
    holds_teachers = True

    @classmethod
    def check_model(cls, config: Config) -> None:
        from april.learner.policy import objection

        section = config.learner
        if said := objection(config.model.path, section.activation_checkpointing, section.compute != "fp32"):
            refuse_for("model.path", config.model.path, "cannot be trained", said)
        if section.context_parallel > 1:
            from april.learner.policy.divided import objection_to_division

            if said := objection_to_division(config.model.path, section.context_parallel):
                raise ConfigError(f"key 'learner.context_parallel' = {section.context_parallel} {said}")
        if config.agent.is_set and config.teacher:
            from april.learner.loading import loads_tower

            if loads_tower(config.model.path):
                why = "sees images that agents send, which a teacher is not shown"
                fix = "use a text model, or leave out [agent] or [teacher.NAME]"
                refuse("model.path", config.model.path, why, fix)

    @classmethod
    def check_images(cls, config: Config) -> None:
        from april.learner.loading import loads_tower

        if not loads_tower(config.model.path):
            why = "is loaded as a text model, which does not see the images that rows have"
            fix = "use Qwen2-VL, Qwen2.5-VL or Qwen3-VL, or leave the images out with data.images_key = ''"
            refuse("model.path", config.model.path, why, fix)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.learner.activations_on_host and not config.learner.activation_checkpointing:
            refuse(
                "learner.activations_on_host",
                True,
                "moves the inputs of layers that are recomputed, and none is",
                "set learner.activation_checkpointing = true",
            )
        if config.lora.is_set and not config.learner.freeze_vision:
            refuse(
                "learner.freeze_vision",
                False,
                f"trains the vision tower, which lora.rank = {config.lora.rank} leaves as it is",
                "leave out one of them",
            )

    @classmethod
    def build(cls, config: Config, device: "torch.device") -> "Backend":
        from april.learner.backends.fsdp.backend import FSDPBackend

        return FSDPBackend(config, device)
