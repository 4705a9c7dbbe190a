"""No test asks a hub but one on loopback."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
