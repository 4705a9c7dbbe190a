"""Dataset columns in a label: a JSON object of several columns, or the text of a single one."""

import json
from collections.abc import Sequence
from typing import Any

LABEL_COLUMN_NAMES = ("label", "answer", "solution", "ground_truth", "target")
"""Names under which a function with `**columns` gets a label that is not an object."""


def columns_in(label: str, needed: Sequence[str], any_name: bool) -> dict[str, Any]:
    """The columns in a label: those of a JSON object, or else the text as the one column that a function needs.

    `needed`: required parameters. `any_name`: the function takes any keyword. Raises ValueError if several columns are
    needed and the label is not an object.
    """
    if label.startswith("{"):
        try:
            columns = json.loads(label)
        except ValueError:
            columns = None
        if isinstance(columns, dict):
            return columns
    if len(needed) > 1:
        raise ValueError(f"needs the columns {', '.join(needed)}; name them in data.label_key = {','.join(needed)!r}")
    return dict.fromkeys(needed or (LABEL_COLUMN_NAMES if any_name else ()), label)
