"""Vision-language models: images of packed sequences, ranks with and without images, and what is exported."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from april.data.pixels import PixelReader
from april.learner import exports
from april.learner.model import load
from april.learner.packing import pack
from april.learner.performance import forward_cost
from april.learner.trainer import Trainer
from april.learner.vision import ImagePacker
from tests.support.learner.comparison import equal, same
from tests.support.learner.pictures import FAMILIES, IMAGE, batch_with_images, sample_with_images, vision_model
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config

CPU = torch.device("cpu")


def logprobs_by_transformers(lm, reader, sample):
    """Log-probabilities of the response by the model's own forward pass of one sequence."""
    ids, images = torch.from_numpy(sample.tokens[None, :-1].astype(np.int64)), {}
    if read := [reader.read(png) for png in sample.images]:
        images = {
            "pixel_values": torch.from_numpy(np.concatenate([rows for rows, _ in read])),
            "image_grid_thw": torch.tensor([grid for _, grid in read]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    logits = lm(input_ids=ids, use_cache=False, **images).logits[0]
    targets = torch.from_numpy(sample.tokens[1:].astype(np.int64))[:, None]
    return torch.log_softmax(logits, -1).gather(1, targets)[sample.prompt_tokens - 1 :, 0]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_with_images_have_the_log_probabilities_and_gradients_of_each(family, recompute, tmp_path):
    lm, rng = vision_model(family, tmp_path), np.random.default_rng(1)
    samples = [
        sample_with_images(rng, sizes, rng.integers(80, size=length).tolist())
        for sizes, length in (([(2, 3)], 5), ([], 9), ([(1, 4), (3, 2)], 4))
    ]
    reader = PixelReader.of(tmp_path)
    theirs = torch.cat([logprobs_by_transformers(lm, reader, each) for each in samples])
    weights = torch.randn(len(theirs))
    (theirs * weights).sum().backward()
    policy = load(tmp_path, temperature=1.0, recompute=recompute)
    ours, _ = policy(pack(samples, CPU, ImagePacker.of(policy.lm, tmp_path)))
    (ours * weights).sum().backward()
    assert (ours - theirs).abs().max() <= 1e-5
    same(*({name: each.grad for name, each in of.named_parameters()} for of in (policy.lm, lm)))


@pytest.mark.parametrize("family", FAMILIES)
def test_images_cost_what_the_products_of_the_tower_do(family, tmp_path):
    """PyTorch counts those of attention, too, as batched products, which are left out here."""
    lm, sample = vision_model(family, tmp_path), sample_with_images(np.random.default_rng(1), [(4, 6)], [5, 6])
    read, grid = PixelReader.of(tmp_path).read(sample.images[0])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lm.base_model.visual(torch.from_numpy(read), grid_thw=torch.tensor([grid]))
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for operation, flops in counted.items() if "bmm" not in str(operation))
    policy = load(tmp_path, temperature=1.0)
    tokens = ImagePacker.of(policy.lm, tmp_path).tokens_of(sample)
    assert forward_cost(policy.lm).per_image_token * tokens == pytest.approx(products, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_placeholder_that_was_sampled_is_text(family, tmp_path):
    """It counts as any other token whose embedding is the same."""
    lm, rng = vision_model(family, tmp_path), np.random.default_rng(1)
    twin = 80
    with torch.no_grad():
        table = lm.get_input_embeddings().weight
        table[twin] = table[IMAGE]
    lm.save_pretrained(tmp_path)
    sampled, other = (
        sample_with_images(np.random.default_rng(2), [(2, 2)], [5, 6, token, 7]) for token in (IMAGE, twin)
    )
    policy = load(tmp_path, temperature=1.0)
    packer = ImagePacker.of(policy.lm, tmp_path)
    ours, _ = policy(pack([sampled, sample_with_images(rng, [(1, 2)], [3])], CPU, packer))
    assert abs(ours[3] - logprobs_by_transformers(lm, packer.reader, other)[3]) <= 1e-5


def test_samples_with_images_are_refused_by_a_policy_that_takes_none():
    sample = sample_with_images(np.random.default_rng(0), [(1, 1)], [1])
    with pytest.raises(ValueError, match="use a vision-language model"):
        pack([sample], CPU)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_vl", {"freeze_vision": True}),
        ("qwen3_vl", {"freeze_vision": False}),
        ("qwen2_5_vl", {"freeze_vision": False, "activation_checkpointing": True}),
    ],
    ids=["frozen", "trained", "recomputed"],
)
def test_ranks_with_and_without_images_train_as_one_does(family, options, tmp_path):
    folder, batch = tmp_path / "policy", batch_with_images()
    vision_model(family, folder)
    config = make_config(folder, tmp_path / "run", microbatch_tokens=64, **options)
    alone, two = (run_ranks(ranks, [job(config, [batch])], tmp_path / f"{ranks}")[0] for ranks in (1, 2))
    same(two["gradients"][0], alone["gradients"][0])
    same(two["weights"], alone["weights"])
    trained = any("visual" in name for name in alone["gradients"][0])
    assert trained is not options["freeze_vision"]


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["whole", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_exported_as_transformers_loads_it(family, lora, one_rank, tmp_path):
    folder = tmp_path / "policy"
    before = vision_model(family, folder).state_dict()
    trainer = Trainer(make_config(folder, tmp_path / "run", lora=lora), CPU)
    assert trainer.step(batch_with_images())["update_skipped"] == 0
    weights = trainer.weights()
    with safe_open(folder / "model.safetensors", "pt") as files:
        assert weights.keys() == set(files.keys())
    exports.export(trainer.backend.lm, weights, folder, tmp_path / "exported")
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported").state_dict()
    towers = [{name: each for name, each in state.items() if ".visual." in name} for state in (before, after)]
    assert equal(*towers) and not equal(before, after)
    assert (tmp_path / "exported/preprocessor_config.json").is_file()


def test_a_critic_sees_the_images(one_rank, tmp_path):
    vision_model("qwen3_vl", tmp_path / "policy")
    config = make_config(tmp_path / "policy", tmp_path / "run", algorithm={"advantage": "gae"})
    trainer = Trainer(config, CPU)
    assert trainer.step(batch_with_images())["update_skipped"] == 0
    assert not any(".visual." in name or name.startswith("lm.visual") for name, _ in trainer.critic.part.model.trained)
