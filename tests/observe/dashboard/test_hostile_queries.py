"""Queries with values that no page of the dashboard sends: each gets an answer or a sentence, and none is a fault."""

from urllib.parse import quote

import pytest

VALUES = [
    "-1", "9" * 5000, "-" + "9" * 30, "1e300", "-1e300", "nan", "inf", "1_0", "٣", "f" * 5000, "-f", "\x00", ".", "{}",
]  # fmt: skip
PARAMETERS = {
    "runs/demo/samples": ["prompt", "offset", "before", "sort", "text", "step.min", "reward.max", "is.x", "x.min"],
    "runs/demo/search": ["prompt", "before", "offset", "text", "sort"],
    "runs/demo/steps": ["after", "columns"],
    "runs/demo/timeline": ["from", "to", "workers"],
    "runs/demo/excerpts": ["of"],
    "runs/demo/logs": ["file"],
    "compare": ["a", "b", "offset"],
}  # fmt: skip
SEGMENTS = ["runs/{}", "runs/demo/groups/{}/0", "runs/demo/groups/0/{}", "runs/demo/samples/0/0/{}"]
SEGMENTS += ["runs/demo/samples/0/{}/0", "runs/demo/samples/{}/0/0", "runs/demo/samples/0/0/0?fork={}"]


@pytest.mark.full
@pytest.mark.parametrize("path", PARAMETERS)
def test_a_parameter_out_of_range_is_no_fault(client, path):
    for name in PARAMETERS[path]:
        for value in [*VALUES, *(f"{text}.{text}" for text in VALUES)]:
            given = {"a": "demo", "b": "other", "text": "the", "workers": "1"} | {name: value}
            answer = client.get(f"/api/{path}", params=given)
            assert answer.status_code in (200, 400, 404), (name, value[:20], answer.text[:200])


@pytest.mark.parametrize("path", SEGMENTS)
def test_a_part_of_a_path_out_of_range_is_no_fault(client, path):
    for value in VALUES:
        answer = client.get("/api/" + path.format(quote(value)))
        assert answer.status_code in (200, 400, 404), (value[:20], answer.text[:200])
