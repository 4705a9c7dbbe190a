"""How full the engines' slots were over a step, of looks at them in equal distances."""


class SlotMeans:
    def __init__(self) -> None:
        self.looks = self.busy = self.slots = self.waiting = 0

    def add(self, busy: int, slots: int, waiting: int) -> None:
        self.looks += 1
        self.busy += min(busy, slots)
        self.slots += slots
        self.waiting += waiting

    def means(self) -> dict[str, float]:
        """`busy`: share of the slots; `slots` and `waiting`: how many there were, and samples that waited for one;
        `looks`: of how many looks these are means."""
        looks = max(1, self.looks)
        busy = self.busy / self.slots if self.slots else 0.0
        return {
            "busy": round(busy, 4),
            "slots": round(self.slots / looks, 2),
            "waiting": round(self.waiting / looks, 1),
            "looks": self.looks,
        }
