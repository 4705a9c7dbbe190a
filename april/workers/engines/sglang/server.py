"""SGLang servers: one started as a child process, with its command line and deadlines, or an external one.

A child never outlives its worker: it is killed with its whole process group, and by the kernel if the worker is killed
first. A server that does not fit the run, or is not installed, is refused.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from april.config import Config
from april.util import clock
from april.util.errors import refuse
from april.util.lifetime import PR_SET_PDEATHSIG, pass_on_niceness, reap
from april.util.logs import APRIL_FOLDER
from april.util.text import masked
from april.workers.engines.base import EngineError
from april.workers.engines.sglang.client import API_KEY, ApiKeyRefused, ServerGone, ServerRefuses, SGLangClient

POLL_S = 0.1
RETURN_POLL_S = 0.5
"""Interval between two attempts to reach an external server (s)."""
TAIL_LINES = 15
OPTIONS_VARIABLE = "APRIL_SERVER_OPTIONS"
"""Environment variable with a server's options, a JSON list of words. They may hold keys, and every user of the machine
may read a command line."""
SGLANG_PROGRAM = f"""
import json, os, runpy, sys
sys.argv += json.loads(os.environ.pop("{OPTIONS_VARIABLE}"))
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
HOST = "127.0.0.1"
PORTS = range(20_000, 30_000)
"""Ports for servers, outside Linux's default ephemeral range: a server may bind its port minutes after April found it
free."""
PORTS_TRIED = 3
"""Number of ports tried in turn, if another process binds the chosen one first."""
IMAGES_AS_SENT = {"SGLANG_MM_AVOID_RETOKENIZE": "1", "SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""Environment variables by which SGLang keeps the tokens around images as they are sent, and caches no embeddings of
images, which would outlive a weight update."""


class ServerFailed(EngineError):
    """The server cannot be started; the text says why, with the end of its log."""


class PortLost(ServerFailed):
    """Another process has bound the port chosen for the server before the server did."""


@dataclass(frozen=True)
class ServerSettings:
    """Command line and environment of a server. `options`: options of SGLang's command line, with underscores for
    hyphens; they override those that April sets."""

    name: ClassVar[str] = "SGLang"

    python: Path
    model: Path
    log: Path
    device: str = "cpu"
    slots: int = 64
    context_tokens: int | None = None
    port: int = 0
    """Port to bind; 0 for any free one."""
    threads: int = 1
    start_s: float = 600.0
    adapter_rank: int = 0
    """LoRA rank of the adapters that the server must accept; 0 for none."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, port: int) -> list[str]:
        options = self.own_options(port) | dict(self.options)
        return [word for name, value in options.items() for word in option_words(name, value)]

    def program(self) -> list[str]:
        """Interpreter arguments that start the server's program."""
        return ["-c", SGLANG_PROGRAM]

    def own_options(self, port: int) -> dict[str, Any]:
        """Options set by April for a server at `port`: token ids in and out, incremental streaming, no sampling
        defaults from the model."""
        given: dict[str, Any] = {
            "model_path": str(self.model.absolute()), "host": HOST, "port": port, "skip_tokenizer_init": True,
            "incremental_streaming_output": True, "max_running_requests": self.slots, "sampling_defaults": "openai",
            "skip_server_warmup": True, "sleep_on_idle": True, "log_level_http": "warning",
        }  # fmt: skip
        if key := os.environ.get(API_KEY):
            given["api_key"] = key
        if self.device == "cpu":
            given |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
            if self.context_tokens:
                given["max_total_tokens"] = self.slots * self.context_tokens
        return given

    def environment(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | self.own_environment()

    def own_environment(self) -> dict[str, str]:
        own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.threads)} | IMAGES_AS_SENT
        if self.device == "cpu":
            own["SGLANG_USE_CPU_ENGINE"] = "1"
        return own


def option_words(name: str, value: Any) -> list[str]:
    """Command-line words of one option: `--name value`. The value True gives only `--name`, and False gives no word."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, (list, tuple)):
        return [flag, *map(str, value)]
    return [flag, str(value)]


class SGLangServer:
    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.port, self._port_was_found = 0, False
        self._process: subprocess.Popen | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start the process; `wait` waits until it serves. Raises ServerFailed."""
        settings = self.settings
        if not settings.python.exists():
            raise ServerFailed(
                f"key 'engine.python' = {str(settings.python)!r} does not exist; make it with "
                f"launch/install-{settings.name.lower()}.sh, or give the interpreter that has {settings.name}"
            )
        given = int(settings.options.get("port", settings.port))
        self.port, self._port_was_found = given or free_port(), not given
        if given and not is_free(given):
            raise ServerFailed(f"key 'engine.port' = {self.port} is taken; give another one, or 0 for any that is free")
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        options = {OPTIONS_VARIABLE: json.dumps(settings.arguments(self.port))}
        with settings.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [str(settings.python), *settings.program()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=settings.environment() | options,
                cwd=settings.log.parent, start_new_session=True, preexec_fn=prepare_child,
            )  # fmt: skip

    async def wait(self, client: SGLangClient) -> dict:
        """Wait until the server answers; returns its /server_info.

        Raises ServerFailed if the process ends or `start_s` has passed, PortLost if another process has taken its port,
        and ApiKeyRefused if it requires another API key.
        """
        deadline = clock.now() + self.settings.start_s
        while True:
            if not self.alive:
                status = self._process.wait() if self._process else None
                self.kill()
                failure = PortLost if self._port_was_found and not is_free(self.port) else ServerFailed
                raise failure(
                    f"the {self.settings.name} server ended at its start with status {status}; {self.log_tail()}"
                )
            try:
                return await client.call("/server_info", deadline_s=2.0)
            except ApiKeyRefused:
                raise
            except (ServerGone, ServerRefuses):
                pass
            if clock.now() > deadline:
                self.kill()
                raise ServerFailed(
                    f"the {self.settings.name} server does not serve after {self.settings.start_s:g} s; "
                    f"raise engine.start_s if it only needs longer; {self.log_tail()}"
                )
            await asyncio.sleep(POLL_S)

    def kill(self) -> None:
        """Kill the whole process group, whose first process may have ended already, and wait for it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            reap(self._process)

    def log_tail(self) -> str:
        """The last lines that the server has logged since its last start, without its keys."""
        log = self.settings.log
        with log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read()[-16_384:].decode(errors="replace").splitlines()[-TAIL_LINES:]
        return f"the end of {log}:\n" + "\n".join(f"  {masked(line)}" for line in lines)


class AttachedServer:
    """An external server, not started by April; the engine waits for it while it does not answer."""

    alive = True

    def __init__(self, url: str, start_s: float):
        self.url = url
        self._start_s, self._patience_s = start_s, 0.0

    def spawn(self) -> None: ...

    async def wait(self, client: SGLangClient) -> dict:
        """The server's /model_info and /server_info, merged.

        The server must answer the first call at once; later it may take `start_s` to return. Raises ServerGone and
        ServerRefuses.
        """
        deadline = clock.now() + self._patience_s
        self._patience_s = self._start_s
        while True:
            try:
                return await client.call("/model_info") | await client.call("/server_info")
            except (ServerGone, ServerRefuses):
                if clock.now() >= deadline:
                    raise
            await asyncio.sleep(RETURN_POLL_S)

    def kill(self) -> None: ...

    def log_tail(self) -> str:
        return "it is kept by others"


def prepare_child() -> None:
    """Give the server process the worker's niceness, and have the kernel kill it with the worker; runs in the child."""
    die_with_parent()
    pass_on_niceness()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A random free port of PORTS. Raises ServerFailed."""
    tried = random.SystemRandom().sample(PORTS, 100)
    found = next(filter(is_free, tried), None)
    if found is None:
        raise ServerFailed(f"of 100 ports tried between {PORTS[0]} and {PORTS[-1]} none is free; give engine.port one")
    return found


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# --- checks of a server -----------------------------------------------------------------------------------------------

ARCHITECTURE = ("model_type", "architectures")
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
"""Keys of config.json that must agree between the server's model folder and the run's."""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def check_server(info: Mapping[str, Any]) -> None:
    """Raise ServerFailed for a server with pipeline or data parallelism, or with speculative decoding that does not
    sample from the policy. `info`: the server's answer to /server_info."""
    for key in ("pp_size", "dp_size"):
        if info.get(key, 1) != 1:
            raise ServerFailed(
                f"the server runs with {key} = {info[key]}, under which it takes no weights while it runs; "
                "use one worker for each replica, and tensor parallelism inside it"
            )
    check_speculation(info, info.get("device", "cuda"))


def check_model(info: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ServerFailed if the server's model differs from that of `own`, the run's config.json. `info`: what the
    server has answered to /server_info or /model_info.

    Compares the architecture, and all sizes if the server's model folder can be read on this machine.
    """
    folder, server_model = str(info.get("model_path")), {}
    with contextlib.suppress(OSError, ValueError):
        server_model = json.loads((Path(folder) / "config.json").read_bytes())
    server_model |= {key: info[key] for key in ARCHITECTURE if key in info}
    for key in (*ARCHITECTURE, *SHAPE):
        if None not in (server_model.get(key), own.get(key)) and server_model[key] != own[key]:
            raise ServerFailed(
                f"the server's model {folder} has {key} = {server_model[key]!r} where key 'model.path' has "
                f"{own[key]!r}; start it with that folder, or give its folder as model.path"
            )


def check_ranks(info: Mapping[str, Any], expected: int) -> None:
    """Raise ServerFailed if a server started by April has not the `expected` number of tensor-parallel ranks. `info`:
    its answer to /server_info."""
    if info.get("tp_size", expected) != expected:
        raise ServerFailed(
            f"the server runs with {info['tp_size']} tensor-parallel ranks where key 'engine.server' was read as "
            f"{expected}, by which devices are counted; spell it engine.server.tp_size"
        )


def check_pause(pause: str, stream_tokens: int) -> None:
    """Raise EngineError for a pause mode under which a token's version would be unknown: any but "abort", if an event
    has more than one token. `stream_tokens`: tokens per streamed event."""
    if pause != "abort" and stream_tokens != 1:
        raise EngineError(
            f"pause = {pause!r} leaves tokens unsent whose version is known only at the end; "
            "set stream_tokens = 1, or use pause = 'abort'"
        )


def check_speculation(options: Mapping[str, Any], device: str, rocm: bool = False) -> None:
    """Raise ServerFailed for speculative decoding that does not sample from the policy. `options`: the server's
    options. `rocm`: whether the device is an AMD accelerator.

    On devices without kernels that sample during verification, SGLang 0.5.23 takes the likeliest token at any
    temperature: `_verify_uses_greedy` in its speculative/eagle_utils.py.
    """
    algorithm = options.get("speculative_algorithm")
    if not algorithm:
        return
    if device in ("cpu", "xpu") or (rocm and not options.get("speculative_use_rejection_sampling")):
        where = "an AMD accelerator without speculative_use_rejection_sampling" if rocm else f"device {device!r}"
        raise ServerFailed(
            f"key 'engine.server.speculative_algorithm' = {algorithm!r} cannot be: on {where} SGLang verifies guesses "
            "against the likeliest token, whatever the temperature, so that samples would not be the policy's; "
            "leave it out"
        )
    for key in THRESHOLDS:
        if options.get(key, 1.0) != 1.0:
            raise ServerFailed(
                f"key 'engine.server.{key}' = {options[key]} accepts guesses that the policy would not have drawn; "
                "leave it at 1.0"
            )


# --- the server's package ---------------------------------------------------------------------------------------------

INTERPRETER_START_S = 60.0
"""Time limit of a program in the server's Python interpreter, start included (s); a slower one is refused."""
VERSION_PROGRAM = """
import importlib.metadata as metadata, importlib.util as util, sys
module, *packages = sys.argv[1:]
found = [metadata.version(name) for name in packages if list(metadata.Distribution.discover(name=name))]
print(found[0] if found else "of unknown version") if util.find_spec(module) else sys.exit(3)
"""
ARCHITECTURES_PROGRAM = """
import importlib.util as util, pathlib, re, sys
module, models, *names = sys.argv[1:]
folder = pathlib.Path((util.find_spec(module) or sys.exit(3)).submodule_search_locations[0], models)
text = "".join(path.read_text(errors="replace") for path in folder.rglob("*.py"))
print(*(name for name in names if not re.search(rf"class {name}\\b|['\\"]{name}['\\"]", text)))
"""


def server_python(config: Config, name: str) -> Path:
    """The Python interpreter with the server's package: `engine.python`, or else that of a folder .venv-NAME, with the
    server's `name` (such as SGLang) in small letters.

    The folder is looked for in the working directory, next to April's environment, and in April's checkout.
    """
    folders = (Path.cwd(), Path(sys.prefix).parent, Path(APRIL_FOLDER).parent)
    candidates = [folder / f".venv-{name.lower()}/bin/python" for folder in folders]
    return config.engine.python or next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def installed_server(config: Config, name: str, packages: tuple[str, ...]) -> str:
    """Name, version and Python interpreter of the server `name` (such as SGLang), in one text.

    `packages`: possible distribution names; the first is also the module's. Raises ConfigError.
    """
    found = ask_interpreter(config, name, VERSION_PROGRAM, *packages[:1], *packages)
    return f"{name} {found} of {server_python(config, name)}"


def unknown_architectures(config: Config, name: str, module: str, models: str) -> list[str]:
    """Architectures that config.json names and the package of server `name` has no class for. `module`: the package;
    `models`: its folder of models. Nothing of the package is imported. Raises ConfigError."""
    named = json.loads((config.model.path / "config.json").read_text()).get("architectures") or []
    return ask_interpreter(config, name, ARCHITECTURES_PROGRAM, module, models, *named).split()


def ask_interpreter(config: Config, name: str, program: str, *arguments: str) -> str:
    """Run Python source, `program`, with `arguments` in the interpreter that has the server `name` (such as SGLang);
    returns the last line that it prints. It runs in the interpreter's folder, so that no module of the user's is
    imported. Raises ConfigError."""
    python = server_python(config, name).absolute()
    fix = f"make it with launch/install-{name.lower()}.sh, or give the interpreter that has {name}"
    if not python.exists():
        refuse("engine.python", python, "does not exist", fix)
    try:
        command = [str(python), "-c", program, *arguments]
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INTERPRETER_START_S,
            cwd=python.parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        refuse("engine.python", python, f"cannot be run ({error})", fix)
    if result.returncode:
        refuse("engine.python", python, f"has no {name}", fix)
    return (result.stdout.splitlines() or [""])[-1].strip()
