"""Writes long_lag_vectors.json: what verl, AReaL and the authors of BAPO and VCPO give on the tensors of
verl_vectors.json, and on groups of responses.

Run once, with verl as in `make_verl_vectors.py`, AReaL's areal/trainer/ppo/actor.py (commit 4aef98d), of which two
functions are taken, recipe/bapo/policy_loss.py of WooooDyy/BAPO (commit 7287044), and of mit-han-lab/vcpo (commit
c7f030f) recipe/fully_async_policy/staleness_utils.py, of which two functions are taken:

    PYTHONPATH=VERL python tests/support/learner/make_long_lag_vectors.py actor.py policy_loss.py staleness_utils.py
"""

import ast
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

FOLDER = Path(__file__).parent
KNOWN = orjson.loads((FOLDER / "verl_vectors.json").read_bytes())
LENGTHS = torch.tensor(KNOWN["lengths"])
MASK = (torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]).float()
DPPO = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04, "clip_ratio_c": 1.2}
THRESHOLDS = (0.02, 0.05)
BAPO = {
    "raised": {"adv_ratio_target": 2.85, "ratio_lower_start": 0.6, "ratio_lower_max": 0.9, "ratio_upper_max": 3.0},
    "at their ends": {"adv_ratio_target": 9, "ratio_lower_start": 0.6, "ratio_lower_max": 0.9, "ratio_upper_max": 1.3},
}
RESPONSES = [
    {"rewards": [1.0, 0.0, 0.0, 1.0], "ratios": [0.5, 1.0, 3.0, 0.01], "norms": [40.0, 25.0, 90.0, 300.0]},
    {"rewards": [0.2, 0.7], "ratios": [1.0, 1.0], "norms": [30.0, 30.0]},
]
STEPS = {"ratio_upper_start": 1.0, "ratio_lower_step": 0.05, "ratio_upper_step": 0.1, "eps": 0.0}


def padded(name: str) -> torch.Tensor:
    return torch.zeros_like(MASK).masked_scatter(MASK.bool(), torch.tensor(KNOWN["columns"][name]))


def losses_of(function, config) -> dict:
    leaf = padded("logprobs").requires_grad_()
    loss = function(padded("behaviour"), leaf, padded("advantages"), MASK, "token-mean", config)[0]
    loss.backward()
    return {"loss": loss.item(), "gradient": leaf.grad[MASK.bool()].tolist()}


def functions_of(path: Path, *names: str) -> dict:
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    found = {"torch": torch, "List": list, "TrajRecord": SimpleNamespace}
    exec(compile(tree, str(path), "exec"), found)
    return found


def bapo(path: Path) -> dict:
    spec = importlib.util.spec_from_file_location("authors_bapo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = {}
    for name, keys in BAPO.items():
        config = SimpleNamespace(policy_loss=SimpleNamespace(**STEPS, **keys), get=lambda key, default: 1.5)
        result[name] = losses_of(module.compute_policy_loss_bapo, config)
        [chosen] = config.policy_loss._bapo_metrics_buffer
        result[name] |= {"keys": STEPS | keys, "lower": chosen["clip_low"], "upper": chosen["clip_high"]}
    return result


def opob(path: Path) -> list[dict]:
    """Test groups with the OPOB baseline that VCPO's code computes for each."""
    baseline = functions_of(path, "compute_opob_baseline", "get_weighted_mean")["compute_opob_baseline"]
    records = [
        SimpleNamespace(group_uid=uid, reward_scalar=reward, rollout_seq_is=ratio, grad_norm_unscaled=norm)
        for uid, group in enumerate(RESPONSES)
        for reward, ratio, norm in zip(*group.values(), strict=True)
    ]
    return [group | {"baseline": baseline(records, uid)} for uid, group in enumerate(RESPONSES)]


def main(actor: Path, policy_loss: Path, staleness_utils: Path) -> None:
    areal = functions_of(actor, "_apply_m2po_masking", "_get_m2po_loss_mask")
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **DPPO)
    columns = padded("behaviour"), padded("logprobs"), MASK.bool()
    result = {
        "dppo_tv": losses_of(core_algos.get_policy_loss_fn("dppo_tv"), config) | {"keys": DPPO},
        "m2po": {
            str(threshold): areal["_apply_m2po_masking"](*columns, threshold)[MASK.bool()].int().tolist()
            for threshold in THRESHOLDS
        },
        "bapo": bapo(policy_loss),
        "opob": opob(staleness_utils),
    }
    out = FOLDER / "long_lag_vectors.json"
    out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
