"""April's rollouts for a trainer of your own: batches come, weights go, and a crash costs nothing that was durable.

    with april.connect("my-run.toml", checkpoint=T) as run:
        run.publish(model)                              # what the checkpoint holds
        for batch in run.batches():
            loss = step(model, batch)
            run.consumed(batch, {"loss": loss})
            run.publish(model)
            if saved:
                run.durable(batch)

`docs/trainers.md` has the contract.
"""

from april.rollouts.batch import RolloutBatch
from april.rollouts.local import LocalRunFailed
from april.rollouts.prompts import Prompt, PromptsWanted
from april.rollouts.run import LOCAL, Rollouts, connect

__all__ = ["LOCAL", "LocalRunFailed", "Prompt", "PromptsWanted", "RolloutBatch", "Rollouts", "connect"]
