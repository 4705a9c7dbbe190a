"""Mean occupancy of the engines' slots over a step, from samples taken at equal intervals."""


class SlotMeans:
    def __init__(self) -> None:
        self.looks = self.busy = self.slots = self.waiting = 0

    def add(self, busy: int, slots: int, waiting: int) -> None:
        self.looks += 1
        self.busy += min(busy, slots)
        self.slots += slots
        self.waiting += waiting

    def means(self) -> dict[str, float]:
        """`busy`: share of slots in use; `slots`: their number; `waiting`: samples that waited for one; `looks`: number
        of measurements behind these means."""
        looks = max(1, self.looks)
        busy = self.busy / self.slots if self.slots else 0.0
        return {
            "busy": round(busy, 4),
            "slots": round(self.slots / looks, 2),
            "waiting": round(self.waiting / looks, 1),
            "looks": self.looks,
        }
