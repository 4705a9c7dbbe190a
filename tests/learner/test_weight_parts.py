"""Weights in parts: what the ranks gather is what rank 0 would, also of mixtures whose files have each expert apart."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from april.learner.lora import held_weights
from april.learner.model import empty_policy
from april.learner.weight_parts import DivisibleWeights, divide
from april.weights.channel import TensorHead
from tests.support.learner.comparison import equal
from tests.support.learner.families import FAMILIES, family
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, make_policy

RANKS = 3
"""The last one holds none of four experts."""
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "jamba", "olmo_hybrid")
"""Families whose files have experts, or other parts of a tensor of the model, apart."""
SMALL_BYTES = 600
"""Size of a bucket that has part of a tensor, or a few of its rows, or part of a row."""


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """{family: what the ranks gather}"""
    folder = tmp_path_factory.mktemp("parts")
    for name in MIXTURES:
        family(name).save_pretrained(folder / name)
    jobs = [job(make_config(folder / name, folder / f"run_{name}"), [], parts=True) for name in MIXTURES]
    return dict(zip(MIXTURES, run_ranks(RANKS, jobs, folder / "ranks"), strict=True))


@pytest.mark.parametrize(("base", "rank"), [("fp32", 1), pytest.param("nf4", 3, marks=pytest.mark.full)])
def test_ranks_merge_an_adapter_into_the_parts_that_they_gather(tmp_path, base, rank):
    """Of a single row of A two ranks have nothing. A product of a few rows may differ in its last bit from that of all
    rows of a rank."""
    make_policy(tmp_path / "qwen3", intermediate_size=64)
    config = make_config(tmp_path / "qwen3", tmp_path / "run", lora={"rank": rank, "base": base})
    adapted = job(config, [], parts=True, random_adapter=True, bucket_bytes=SMALL_BYTES)
    (result,) = run_ranks(RANKS, [adapted], tmp_path / "ranks")
    found, expected = result["from_parts"], result["weights"]
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        torch.testing.assert_close(found[each], value, rtol=1e-6, atol=1e-6)
    assert all(result["names"]), "each rank gathers a part"


@pytest.mark.full
@pytest.mark.turn("mixtures")
@pytest.mark.parametrize("name", MIXTURES)
def test_parts_of_a_mixture_are_the_weights_that_rank_0_gathers(gathered, name):
    assert equal(gathered[name]["from_parts"], gathered[name]["weights"])
    assert all(gathered[name]["names"]), "each rank gathers a part"


@pytest.mark.full
@pytest.mark.turn("mixtures")
def test_an_expert_is_sent_by_the_rank_that_has_it(gathered):
    by_rank = gathered["qwen3_moe"]["names"]
    for rank, experts in enumerate([(0, 1), (2, 3)]):
        own = [name for name in by_rank[rank] if ".experts." in name]
        assert own and all(int(name.partition(".experts.")[2][0]) in experts for name in own)


def test_a_rank_that_has_its_share_is_given_no_more_though_it_holds_everything():
    heads = [TensorHead(f"experts.{i}.down_proj.weight", "bfloat16", [8, 8]) for i in range(12)]
    assert sorted(divide(heads, RANKS, [{1}] * len(heads))) == [0] * 4 + [1] * 4 + [2] * 4


EXPORTED = ("qwen3", "qwen3_moe")
CASES = {name: {"export": (0, 0)} for name in EXPORTED} | {
    "tried again": {"export": (1, 1)},
    "full disk": {"export": (1, 9)},
    "two disks": {"export": (0, 0), "disks": [0, 1, 1]},
}
"""Models that the ranks export, and what happens to a rank's writes; without a model's name it is `qwen3`."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{case: (why each rank cannot write the model, the run's folder, the starting model's)}"""
    folder = tmp_path_factory.mktemp("exports")
    for name in EXPORTED:
        family(name).bfloat16().save_pretrained(folder / name)
    starts = {case: folder / (case if case in EXPORTED else "qwen3") for case in CASES}
    configs = {case: make_config(starts[case], folder / f"run {case}") for case in CASES}
    results = run_ranks(RANKS, [job(configs[case], [], **CASES[case]) for case in CASES], folder / "ranks")
    return {
        case: (result["reasons"], configs[case].run_dir, starts[case])
        for case, result in zip(CASES, results, strict=True)
    }


@pytest.mark.xdist_group("exported")
@pytest.mark.parametrize("case", [*EXPORTED, "tried again", "two disks"])
def test_each_rank_writes_a_part_of_an_exported_model_which_is_the_one_of_a_single_rank(exported, case):
    reasons, run_dir, start = exported[case]
    assert reasons == [""] * RANKS
    (folder,) = run_dir.parent.glob(f"**/{run_dir.name}/checkpoints/policy")
    written = [path.name for path in sorted(folder.glob("*.safetensors"))]
    assert written == [f"model-{rank:04d}-0000.safetensors" for rank in range(RANKS)]
    found = {name: tensor for each in written for name, tensor in load_file(folder / each).items()}
    assert equal(found, load_file(start / "model.safetensors")), "weights that were not trained are those of the start"
    theirs = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert equal(AutoModelForCausalLM.from_pretrained(folder).state_dict(), theirs)
    assert (folder / "config.json").read_bytes() == (start / "config.json").read_bytes()
    assert [*run_dir.parent.glob(f"**/{run_dir.name}/checkpoints/*")] == [folder], "no other disk keeps its part"


@pytest.mark.xdist_group("exported")
def test_a_part_that_cannot_be_written_is_said_by_all_ranks_and_leaves_no_model(exported):
    reasons, run_dir, _ = exported["full disk"]
    (reason,) = set(reasons)
    assert reason.startswith("rank 1 cannot write its part of") and reason.endswith("No space left on device")
    assert not (run_dir / "checkpoints/policy").exists()


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_divided(name, one_rank, tmp_path):
    family(name).save_pretrained(tmp_path)
    lm = empty_policy(tmp_path, 1.0).lm
    assert DivisibleWeights(lm).tensors(held_weights(lm)) is not None


class Doubling(ConversionOps):
    """Doubles a tensor when it is loaded; files have half of it."""

    def convert(self, input_dict, target_patterns, **_):
        (values,) = input_dict.values()
        return {target_patterns[0]: values[0] / 2}

    @property
    def reverse_op(self):
        return self


@pytest.mark.parametrize("operation", [Transpose(), Doubling()])
def test_a_model_whose_tensors_are_computed_or_turned_for_its_files_is_gathered_by_rank_0(
    operation, one_rank, tmp_path
):
    family("qwen3").save_pretrained(tmp_path)
    lm = empty_policy(tmp_path, 1.0).lm
    lm._weight_conversions = [WeightConverter("up_proj.weight", "up_proj.weight", [operation])]
    assert DivisibleWeights(lm).tensors(held_weights(lm)) is None
