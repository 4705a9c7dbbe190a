"""April's rollouts for your own trainer: it takes batches and publishes weights, and no durable work is lost in a
crash.

    with april.connect("my-run.toml", checkpoint=T) as run:
        run.publish(model)                              # the checkpoint's weights
        for batch in run.batches():
            loss = step(model, batch)
            run.consumed(batch, {"loss": loss})
            run.publish(model)
            if saved:
                run.durable(batch)

`docs/trainers.md` states the contract.
"""

from april.trainers.rollouts.batch import RolloutBatch
from april.trainers.rollouts.local import LocalRunFailed
from april.trainers.rollouts.prompts import Prompt, PromptsWanted
from april.trainers.rollouts.run import LOCAL, Rollouts, connect

__all__ = ["LOCAL", "LocalRunFailed", "Prompt", "PromptsWanted", "RolloutBatch", "Rollouts", "connect"]
