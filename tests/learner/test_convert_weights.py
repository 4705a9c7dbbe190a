"""A checkpoint is converted into the folder that the learner itself would export."""

import pytest
import torch

from april import cli
from april.learner.trainer import Trainer
from tests.support.learner.small_learner import make_config, run_of, uneven_batch
from tests.support.marks import full


@pytest.mark.parametrize("lora", [{}, full({"rank": 2, "embedding": True})], ids=["whole", "adapter"])
def test_a_checkpoint_is_the_folder_that_its_learner_would_write(one_rank, policy_folder, tmp_path, lora, capsys):
    config = make_config(policy_folder, tmp_path / "run", lora=lora, lr=1e-2)
    run_dir, trainer = run_of(config), Trainer(config, torch.device("cpu"))
    for step in range(2):
        trainer.step(uneven_batch(step, policy_folder))
        trainer.save()
        trainer.write_model(tmp_path / f"expected-{step + 1}")
    for step, wanted in ((1, ["--step", "1"]), (2, [])):
        out = tmp_path / f"converted-{step}"
        assert cli.main(["convert-weights", str(run_dir), *wanted, "--out", str(out)]) == 0
        assert f"step {step} is in {out}" in capsys.readouterr().out
        expected = tmp_path / f"expected-{step}"
        assert {path.name for path in out.iterdir()} == {path.name for path in expected.iterdir()}
        assert all((out / path.name).read_bytes() == path.read_bytes() for path in expected.iterdir())
    first, second = (tmp_path / f"converted-{step}/model.safetensors" for step in (1, 2))
    assert first.read_bytes() != second.read_bytes()


def test_a_checkpoint_that_is_not_there_or_damaged_is_refused(one_rank, policy_folder, tmp_path, capsys):
    config = make_config(policy_folder, tmp_path / "run")
    run_dir, out = run_of(config), str(tmp_path / "out")
    assert cli.main(["convert-weights", str(run_dir), "--out", out]) == cli.REFUSED
    assert "does not have a checkpoint; there is none" in capsys.readouterr().err
    trainer = Trainer(config, torch.device("cpu"))
    trainer.step(uneven_batch(0, policy_folder))
    trainer.save()
    assert cli.main(["convert-weights", str(run_dir), "--step", "9", "--out", out]) == cli.REFUSED
    assert "a checkpoint of step 9; there are those of steps 1" in capsys.readouterr().err
    (shard := run_dir / "checkpoints/step_000001/__0_0.distcp").rename(shard.with_suffix(".elsewhere"))
    assert cli.main(["convert-weights", str(run_dir), "--out", out]) == cli.REFUSED
    assert "lacks __0_0.distcp; a learner over several machines has them on others" in capsys.readouterr().err
    (run_dir / "checkpoints/step_000001/progress.json").write_text("{}")
    assert cli.main(["convert-weights", str(run_dir), "--out", out]) == cli.REFUSED
    assert "is damaged (__0_0.distcp, progress.json)" in capsys.readouterr().err


def test_an_existing_output_folder_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "notes").write_text("of mine")
    assert cli.main(["convert-weights", str(tmp_path), "--out", str(tmp_path)]) == cli.REFUSED
    assert "is there already; give a folder that is not" in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == "of mine"
