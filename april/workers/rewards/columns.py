"""Columns of a row, as a label has them: a JSON object of several, or the text of one."""

import json
from collections.abc import Sequence
from typing import Any

NAMES_OF_A_LABEL = ("label", "answer", "solution", "ground_truth", "target")
"""under which a function with `**columns` finds a label that is no object"""


def columns_in(label: str, needed: Sequence[str], any_name: bool) -> dict[str, Any]:
    """Those of a label that is a JSON object; of another one, it is the one column that the function needs."""
    if label.startswith("{"):
        try:
            columns = json.loads(label)
        except ValueError:
            columns = None
        if isinstance(columns, dict):
            return columns
    if len(needed) > 1:
        raise ValueError(f"needs the columns {', '.join(needed)}; name them in data.label_key = {','.join(needed)!r}")
    return dict.fromkeys(needed or (NAMES_OF_A_LABEL if any_name else ()), label)
