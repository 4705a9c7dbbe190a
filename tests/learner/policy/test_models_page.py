"""The page of models says which families train: what the sweep of transformers' families found."""

from importlib import import_module
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/models.md").read_text()
ASKED_FOR = (
    "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "llama", "mistral", "gemma2", "gemma3_text",
    "gpt_oss", "olmo3", "phi3", "smollm3", "deepseek_v3", "glm4", "glm4_moe", "minimax", "lfm2", "nemotron_h",
    "falcon_h1", "granite",
)  # fmt: skip


@pytest.fixture(scope="module")
def sweep():
    if f"of transformers {transformers.__version__}," not in PAGE:
        pytest.skip("the page is of another version of transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield import_module("models")


def test_the_families_that_users_ask_for_train():
    trained = PAGE.partition("## Families that are refused")[0]
    assert [name for name in ASKED_FOR if f"`{name}`" not in trained] == []


@pytest.mark.parametrize("family", ["lfm2", "xglm"])
def test_the_page_has_what_becomes_of_a_family(sweep, family):
    outcome = sweep.outcome_of(family)
    trained, _, refused = PAGE.partition("## Families that are refused")
    assert outcome.apart <= sweep.EXACT
    assert f"`{family}`" in (trained if outcome.kind == sweep.TRAINS else refused)
    assert outcome.said in PAGE


@pytest.mark.full
def test_the_page_is_what_the_sweep_finds(sweep):
    """Of every 24th family: the whole sweep takes some minutes."""
    trained, _, refused = PAGE.partition("## Families that are refused")
    for name in list(sweep.families())[::24]:
        outcome = sweep.outcome_of(name)
        if outcome.kind == sweep.UNBUILT:
            continue
        assert outcome.kind != sweep.OFF, name
        assert f"`{name}`" in (trained if outcome.kind == sweep.TRAINS else refused), name
        assert outcome.said in PAGE, f"{name}: call python benchmarks/models.py --page"
