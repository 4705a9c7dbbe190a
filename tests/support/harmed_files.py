"""What may become of the files of a snapshot of weights, and its canary."""

from april.weights.canary import Canary

CANARY = Canary([1, 2, 3], [-0.5, -0.25], "float32")
PATIENCE_S = 60.0


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tear(path):
    path.write_bytes(path.read_bytes()[:-1])


HARMS = {"flipped": flip, "torn": tear, "missing": lambda path: path.unlink()}
