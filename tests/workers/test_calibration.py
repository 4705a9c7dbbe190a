"""`april calibrate` on a real SGLang server, through the engine that a worker of a run would have."""

import pytest

from april.cli import main
from april.simulate import calibrate
from april.simulate.scenario import load_scenario

pytestmark = [pytest.mark.timeout(900), pytest.mark.sglang]
"""the first test on SGLang starts its server"""


def test_calibration_measures_a_server_and_reads_its_cache_size(
    sglang_server, tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(calibrate, "LONGEST_RESPONSES", (16,))
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    path = tmp_path / "cost.toml"
    words = {"model": tiny_model().folder, "slots": 2, "out": path, "engine.url": sglang_server.url}
    options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    assert main(["calibrate", *options, "--worker.engine", "sglang"]) == 0
    assert "KV cache: 40,960 tokens" in capsys.readouterr().out
    cost = load_scenario(path).cost
    assert "sglang" in cost.source and cost.kv_tokens == 64 * 640
