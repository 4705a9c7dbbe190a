"""Stand-ins for the classes of AReaL that April's adapter uses; AReaL itself pins torch below 2.11.

areal 1.0.4 on PyPI, and github.com/areal-project/AReaL at cbff54d645d2cd8ee1f1c358a82f3f473588433d: `InferenceEngine`
and `RolloutWorkflow` of areal/api, `PPOTrainer` of areal/trainer/rl_trainer.py in its single-controller mode,
`RolloutCallback` of areal/infra/controller/rollout_callback.py, `RecoverInfo` and `RecoverHandler` of
areal/utils/recover.py, and the rolled columns of `PPOActor._compute_advantages`. `install` registers the stand-ins
under AReaL's module names.
"""

import abc
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save_file


class InferenceEngine(abc.ABC):
    @property
    @abc.abstractmethod
    def initialized(self): ...

    def save_perf_tracer(self, step=None, force=False):
        return None


class RolloutWorkflow(abc.ABC):
    @abc.abstractmethod
    async def arun_episode(self, engine, data): ...


class InValidRecoverInfo(Exception):
    pass


class RecoverInfo:
    def __init__(self, step):
        self.last_step_info = SimpleNamespace(global_step=step)

    @classmethod
    def load(cls, folder):
        if not Path(folder).exists():
            raise FileNotFoundError(folder)
        try:
            return cls(json.loads(Path(folder, "step_info.json").read_text())["global_step"])
        except Exception as error:
            raise InValidRecoverInfo(folder) from error


class RecoverHandler:
    @staticmethod
    def recover_info_path(experiment_name, trial_name, fileroot):
        root = Path(fileroot, "checkpoints", experiment_name, trial_name)
        root.mkdir(parents=True, exist_ok=True)
        return str(root / "recover_info")


class Loader:
    """Stand-in for torchdata's StatefulDataLoader: yields lists of rows, and its position can be saved and restored."""

    def __init__(self, rows, batch_size):
        self.rows, self.batch_size, self.place = rows, batch_size, 0

    def __len__(self):
        return len(self.rows) // self.batch_size

    def __iter__(self):
        while self.place < len(self):
            first, self.place = self.place * self.batch_size, self.place + 1
            yield self.rows[first : first + self.batch_size]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def cycle_dataloader(loader):
    while True:
        yield from loader


class Meta:
    """Stand-in for AReaL's WeightUpdateMeta with weight_update_mode = disk."""

    type = "disk"

    def __init__(self, path):
        self.path = path

    def with_version(self, version):
        return Meta(str(Path(self.path).with_name(f"weight_update_v{version}")))


class Actor:
    """Stand-in for AReaL's TrainController and its one worker, whose calls to the rollout engine arrive over HTTP."""

    def __init__(self, weights):
        self.weights, self.seen = weights, []

    def connect_engine(self, rollout, meta):
        self.rollout, self.addr = rollout, rollout.callback_addr

    def prepare_batch(self, dataloader, workflow, workflow_kwargs=None, should_accept_fn=None, group_size=1, **more):
        return self.rollout.prepare_batch(
            dataloader=dataloader, workflow=workflow, workflow_kwargs=workflow_kwargs,
            should_accept_fn=should_accept_fn, group_size=group_size, **more,
        )  # fmt: skip

    def update_weights(self, meta):
        self.say("pause_generation")
        self.say("update_weights_disk", {"meta": {"data": {"path": meta.path}}})
        Path(meta.path).mkdir(parents=True, exist_ok=True)
        save_file(self.weights(), Path(meta.path, "model.safetensors"))
        self.say("continue_generation")

    def say(self, what, payload=None):
        request = Request(f"http://{self.addr}/callback/{what}", json.dumps(payload or {}).encode(), method="POST")
        assert json.load(urlopen(request, timeout=60)) == {}


class PPOTrainer:
    """Stand-in for AReaL's PPOTrainer: makes the same calls in the same order, but computes no losses."""

    weights = None

    def __init__(self, config, train_dataset=None, valid_dataset=None):
        self.config, self.actor = config, Actor(self.weights)
        self.train_dataloader = self._create_dataloader(train_dataset, dataset_config=config.train_dataset)
        self.rollout = self._init_rollout(config.rollout, is_eval=False, lora_path=None)
        self.eval_rollout = self._init_rollout(config.rollout, is_eval=True, lora_path=None)
        self.weight_update_meta = Meta(str(Path(config.recover.fileroot, "weight_update")))
        self.actor.connect_engine(self.rollout, self.weight_update_meta)
        self.info = Path(RecoverHandler.recover_info_path(*self.place))
        self.start = 0
        if config.recover.mode == "auto" and self.info.exists():
            self.start = RecoverInfo.load(self.info).last_step_info.global_step + 1
            self.train_dataloader.load_state_dict(json.loads((self.info / "dataloader_info").read_text()))
            self.rollout.pause()
            self.actor.update_weights(self.weight_update_meta.with_version(self.start))
            self.rollout.resume()
            self.rollout.set_version(self.start)
            assert self.rollout.staleness_manager is None

    @property
    def place(self):
        return self.config.recover.experiment_name, self.config.recover.trial_name, self.config.recover.fileroot

    def _create_dataloader(self, dataset, dataset_config):
        return Loader(dataset, dataset_config.batch_size)

    def train(self, workflow, stop=None):
        assert isinstance(workflow, RolloutWorkflow)
        total = self.config.total_train_epochs * len(self.train_dataloader)
        for step in range(self.start, min(total, self.config.total_train_steps or total)):
            batch = self.actor.prepare_batch(
                self.train_dataloader, workflow, group_size=self.config.gconfig.n_samples, dynamic_bs=False
            )
            self.actor.seen.append(batch)
            self.rollout.pause()
            self.actor.update_weights(self.weight_update_meta.with_version(step + 1))
            self.rollout.set_version(step + 1)
            self.dump(step)
            assert all(isinstance(value, float) for value in self.rollout.export_stats().values())
            self.rollout.resume()
            self.rollout.save_perf_tracer(step=step)

    def dump(self, step):
        if self.config.recover.mode == "auto" and step in self.config.recover.steps:
            self.info.mkdir(exist_ok=True)
            (self.info / "step_info.json").write_text(json.dumps({"global_step": step}))
            (self.info / "dataloader_info").write_text(json.dumps(self.train_dataloader.state_dict()))

    def close(self):
        self.rollout.destroy()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()
        return False


def rolled(trajectory):
    """Loss mask and behaviour log-probabilities as AReaL's losses read them: shifted one column to the left of the
    token."""
    return tuple(torch.roll(trajectory[name], shifts=-1, dims=-1) for name in ("loss_mask", "logprobs"))


def install(monkeypatch):
    own = {
        "areal": {"PPOTrainer": PPOTrainer},
        "areal.api": {"InferenceEngine": InferenceEngine, "RolloutWorkflow": RolloutWorkflow},
        "areal.utils": {},
        "areal.utils.data": {"cycle_dataloader": cycle_dataloader},
        "areal.utils.network": {
            "gethostip": lambda: "127.0.0.1",
            "format_hostport": lambda host, port: f"{host}:{port}",
        },
        "areal.utils.recover": {
            "InValidRecoverInfo": InValidRecoverInfo, "RecoverHandler": RecoverHandler, "RecoverInfo": RecoverInfo,
        },
    }  # fmt: skip
    for name, members in own.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
