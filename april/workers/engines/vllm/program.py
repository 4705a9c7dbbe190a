"""A vLLM server with the part of SGLang's HTTP API that `SGLangEngine` uses, so that one engine drives both servers.

It runs in the interpreter that has vLLM, without April: `python -P program.py --model M --host H --port P`, and vLLM's
own options. A worker starts it, or a process outside April that loads the weights. It answers requests that address it
by an IP address, its machine's name or a name in `--allowed-hosts`.

Token ids in, token ids out. No request outlives a weight update: a pause ends each with the tokens it has, so that all
tokens of a request are of the version it names.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import runpy
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors import safe_open
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

try:
    from vllm.exceptions import VLLMClientError
except ImportError:  # older versions raise ValueError
    VLLMClientError = ValueError

LONGEST_BODY_BYTES = 64 << 20
WEB_REQUESTS = Path(__file__).parents[3] / "wire/security/web_requests.py"
"""File of April that this program runs, since it cannot import April: it checks that no page of another web site has
sent a request."""
WATCH_S = 0.2
ABORT_AGAIN_S = 0.2
"""Interval at which an abort is repeated (s), since it misses a request that the engine has not admitted yet."""
DEFAULT_OPTIONS = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
"""Options set by April: log-probabilities after the temperature, and no sampling defaults from the model's folder."""
HAS_STREAM_INTERVAL = hasattr(SamplingParams, "stream_interval")
"""Whether vLLM takes a stream interval per request; older versions have one for all requests, `--stream-interval`."""
EXTENSION = "__mp_main__.WeightsInPlace"
"""Import path of `WeightsInPlace`, under the module name that this program has in the processes it spawns."""


class WeightsInPlace:
    """Mixin for vLLM's own worker class, which reloads weights."""

    reload_weights: Callable[..., None]
    model_runner: Any

    def reload_from(self, folder: str) -> None:
        """Reload weights from a folder.

        vLLM's reload skips an output projection tied to the embedding, of which the CPU back end keeps a packed copy.
        """
        self.reload_weights(weights_path=folder)
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
        self.compare_with(folder)

    def compare_with(self, folder: str) -> None:
        """Compare the parameters with the folder's tensors, rounded to each parameter's type. Raises ValueError for
        parameters with other values.

        Only a parameter that vLLM keeps as the tensors' concatenation is compared. vLLM keeps others in another form:
        on several ranks, as experts, packed for a processor, or with rows in another order. One parameter's tensors are
        read at a time.
        """
        model = self.model_runner.get_model()
        fused = {part: whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
        order = list(fused)
        held = dict(model.named_parameters())
        parts: dict[str, dict[int, tuple[Path, str]]] = {}
        for file in Path(folder).glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    owner, _, kind = name.rpartition(".")
                    outer, _, module = owner.rpartition(".")
                    whole = ".".join(filter(None, [outer, fused.get(module, module), kind]))
                    if whole in held:
                        place = order.index(module) if module in fused else -1
                        parts.setdefault(whole, {})[place] = file, name
        differing = [
            name for name, own in parts.items() if differs(held[name], [read(*own[place]) for place in sorted(own)])
        ]
        if differing:
            raise ValueError(f"vLLM holds other values than it was sent for {', '.join(differing[:3])}")


def read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def differs(held: torch.Tensor, sent: list[torch.Tensor]) -> bool:
    """Whether a parameter's values, `held`, differ from those of the tensors `sent`, concatenated. Rows that `held` has
    beyond them are padding. False if the shapes do not fit, or if the same values stand in another order."""
    if not held.dim() or any(not tensor.dim() for tensor in sent):
        return False
    rows = sum(len(tensor) for tensor in sent)
    if len(held) < rows or held.shape[1:] != sent[0].shape[1:]:
        return False
    whole, own = torch.cat(sent).to(held), held[:rows]
    return not torch.equal(own, whole) and not torch.equal(own.flatten().sort()[0], whole.flatten().sort()[0])


class SchedulerLoad(StatLoggerBase):
    """The scheduler's last statistics of requests and memory."""

    def __init__(self, config: Any = None, engine_index: int = 0):
        self.stats = {"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx: int = 0) -> None:
        if scheduler_stats:
            self.stats = {
                "num_running_reqs": scheduler_stats.num_running_reqs,
                "num_waiting_reqs": scheduler_stats.num_waiting_reqs,
                "token_usage": scheduler_stats.kv_cache_usage,
            }

    def log_engine_initialized(self) -> None: ...


class VLLMServerProgram:
    def __init__(self, arguments: AsyncEngineArgs):
        self._loads = SchedulerLoad()
        self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda config, index: self._loads])
        self._version = "default"
        self._holds_base_weights = True
        """Whether the engine still has the weights of the folder that it was started with."""
        self._adapter: LoRARequest | None = None
        """Adapter that is loaded on top of the base weights; None: they are used alone."""
        self._adapters = 0
        """Number of adapters loaded so far."""
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._answers: dict[str, asyncio.Task] = {}
        """Tasks that answer /generate, by request id."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort_request),
            web.post("/pause_generation", self.pause_generation),
            web.post("/update_weights_from_disk", self.update_weights_from_disk),
            web.post("/load_lora_adapter", self.load_lora_adapter),
            web.post("/flush_cache", self.flush_cache),
            web.post("/update_weight_version", self.update_weight_version),
            web.post("/continue_generation", self.continue_generation),
        ]

    async def watch(self) -> None:
        """Wait until vLLM's engine has failed, then end this process, so that its worker finds the server dead."""
        while not self._engine.errored:
            await asyncio.sleep(WATCH_S)
        os._exit(1)

    async def model_info(self, request: web.Request) -> web.Response:
        model = self._engine.vllm_config.model_config
        return web.json_response(
            {
                "model_path": model.model,
                "model_type": model.hf_config.model_type,
                "architectures": model.hf_config.architectures,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        config = self._engine.vllm_config
        return web.json_response(
            {
                "context_length": config.model_config.max_model_len,
                "dtype": str(config.model_config.dtype),
                "max_running_requests": config.scheduler_config.max_num_seqs,
                "tp_size": config.parallel_config.tensor_parallel_size,
                "pp_size": config.parallel_config.pipeline_parallel_size,
                "dp_size": config.parallel_config.data_parallel_size,
                "takes_adapters": self._takes_adapters,
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        most = self._engine.vllm_config.scheduler_config.max_num_seqs
        return web.json_response({"loads": [self._loads.stats | {"max_running_requests": most}]})

    # --- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream new tokens; or, with `stream` = false, return the prompt's log-probabilities."""
        body = await request.json()
        if not body.get("stream", True):
            return await self._score(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._admitting.wait()
        if task := asyncio.current_task():
            self._answers[body["rid"]] = task
        try:
            async with contextlib.aclosing(self._events(body)) as events:
                async for event in events:
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        except EngineDeadError:
            os._exit(1)
        except (ValueError, VLLMClientError) as error:
            await response.write(b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n")
        finally:
            del self._answers[body["rid"]]
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, body: dict) -> AsyncGenerator[dict, None]:
        version, length = self._version, 0
        stops = set(body["sampling_params"]["stop_token_ids"])
        prompt = tokens_input(body["input_ids"], cache_salt=body["extra_key"])
        async for output in self._engine.generate(
            prompt, sampling_params(body), body["rid"], lora_request=self._adapter
        ):
            (answer,) = output.outputs
            length += len(answer.token_ids)
            yield {
                "output_ids": list(answer.token_ids),
                "meta_info": {
                    "id": body["rid"],
                    "completion_tokens": length,
                    "output_token_logprobs": logprobs(answer),
                    "weight_version": version,
                    "finish_reason": finish_reason(answer, stops),
                },
            }

    async def _score(self, body: dict) -> web.Response:
        """Answer with [log-probability, token id] of each token of the prompt (`input_ids` of the request's `body`), at
        temperature 1; the first token has no log-probability (null)."""
        await self._admitting.wait()
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = tokens_input(body["input_ids"], cache_salt=body["extra_key"])
        scores: list = []
        try:
            async for output in self._engine.generate(prompt, params, body["rid"], lora_request=self._adapter):
                scores = output.prompt_logprobs or scores
        except EngineDeadError:
            os._exit(1)
        except (ValueError, VLLMClientError) as error:
            return refusal(str(error))
        entries = [
            [entry[token].logprob if entry else None, token]
            for token, entry in zip(body["input_ids"], scores, strict=False)
        ]
        return web.json_response({"meta_info": {"input_token_logprobs": entries}})

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self._engine.abort(list(self._answers) if body.get("abort_all") else [body["rid"]])
        return web.json_response({})

    # --- weights ------------------------------------------------------------------------------------------------

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Pause; answered once nothing runs, nothing is queued, and the prefix cache is empty."""
        self._admitting.clear()
        while self._answers:
            await self._engine.abort(list(self._answers))
            await asyncio.wait(self._answers.values(), timeout=ABORT_AGAIN_S)
        await self._engine.pause_generation(mode="abort", clear_cache=True)
        return web.json_response({"success": True})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = Path(body["model_path"])
        if self._answers:
            return refusal("weights change only while nothing is generated: call /pause_generation before")
        if not any(folder.glob("*.safetensors")):
            return refusal(f"{folder} holds no .safetensors file")
        was_admitting = self._admitting.is_set()
        self._admitting.clear()
        self._holds_base_weights, self._adapter = False, None
        try:
            await self._engine.collective_rpc("reload_from", args=(str(folder),))
        except Exception as error:
            return refusal(f"Weights were updated in part: {error}")
        finally:
            if was_admitting:
                self._admitting.set()
        self._version = body.get("weight_version", self._version)
        return web.json_response({"success": True})

    @property
    def _takes_adapters(self) -> bool:
        return self._holds_base_weights and self._engine.vllm_config.lora_config is not None

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        """Replace the current adapter, which stays if the new one cannot be loaded."""
        body = await request.json()
        if self._answers:
            return refusal("an adapter changes only while nothing is generated: call /pause_generation before")
        if not self._takes_adapters:
            return refusal("the server was started without --enable-lora, or holds other weights than its model's")
        self._adapters += 1
        adapter = LoRARequest(body["weight_version"], self._adapters, body["lora_path"])
        try:
            await self._engine.add_lora(adapter)
        except Exception as error:
            return refusal(str(error))
        previous, self._adapter = self._adapter, adapter
        self._version = body["weight_version"]
        if previous:
            await self._engine.remove_lora(previous.lora_int_id)
        return web.json_response({"success": True})

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self._engine.reset_prefix_cache()
        return web.json_response({"success": True})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Set the version name of weights that a process outside April has loaded."""
        self._version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self._engine.resume_generation()
        self._admitting.set()
        return web.json_response({"success": True})


def sampling_params(body: dict) -> SamplingParams:
    """vLLM's sampling parameters for `body`, the JSON of a request to /generate. The seed is mixed with the context
    length: a resumed sample draws fresh numbers."""
    params = body["sampling_params"]
    interval = {"stream_interval": params["stream_interval"]} if HAS_STREAM_INTERVAL else {}
    return SamplingParams(
        max_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=params["top_k"],
        min_p=params["min_p"],
        repetition_penalty=params["repetition_penalty"],
        seed=random.Random(f"{params['sampling_seed']} {len(body['input_ids'])}").getrandbits(62),
        stop_token_ids=params["stop_token_ids"],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
        **interval,
    )


def logprobs(answer: CompletionOutput) -> list[list]:
    """The pair [log-probability, token id] of each new token. If there is no new token, older versions of vLLM repeat
    old pairs, which are left out."""
    entries = (answer.logprobs or [])[: len(answer.token_ids)]
    return [[entry[token].logprob, token] for token, entry in zip(answer.token_ids, entries, strict=True)]


def finish_reason(answer: CompletionOutput, stops: set[int]) -> dict | None:
    """Finish reason in SGLang's form, such as {"type": "stop"}; None for an answer that has not finished. If the last
    token of the budget is one of the token ids `stops`, the reason is "stop", not "length"."""
    if answer.finish_reason == "length" and answer.token_ids and answer.token_ids[-1] in stops:
        return {"type": "stop"}
    return {"type": answer.finish_reason} if answer.finish_reason else None


def refusal(why: str) -> web.Response:
    return web.json_response({"success": False, "message": why}, status=400)


async def serve(arguments: AsyncEngineArgs, host: str, port: int, names: list[str]) -> None:
    program = VLLMServerProgram(arguments)
    requests = runpy.run_path(str(WEB_REQUESTS))
    check = requests["check_requests"](requests["names_of"](host, *names))
    app = web.Application(client_max_size=LONGEST_BODY_BYTES, middlewares=[check])
    app.add_routes(program.routes())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await program.watch()


def main(argv: list[str]) -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--allowed-hosts", nargs="*", default=[])
    parser.set_defaults(**DEFAULT_OPTIONS)
    options = parser.parse_args(argv)
    arguments = AsyncEngineArgs.from_cli_args(options)
    arguments.worker_extension_cls = EXTENSION
    asyncio.run(serve(arguments, options.host, options.port, options.allowed_hosts))


def die_with_parent() -> None:
    """Have the kernel kill vLLM's own processes, which would outlive a killed program."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    given = os.environ.pop("APRIL_SERVER_OPTIONS", None)
    main(json.loads(given) if given else sys.argv[1:])
elif __name__ == "__mp_main__":
    die_with_parent()
