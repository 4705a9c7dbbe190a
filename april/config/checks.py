"""What is valid key by key but cannot work together; each refusal names the key, the value and the mend."""

import ipaddress
import re
from collections.abc import Collection

from april.config.sections import (
    AlgorithmSection,
    BrokerSection,
    Config,
    ConfigError,
    DataSection,
    EngineSection,
    EnvironmentSection,
    EvaluationSection,
    ScheduleSection,
)
from april.limits import TOP_K

VLLM_TEMPERATURE = 2.0
"""the highest that vLLM takes"""
INPUTS = ("model", "data")
"""what a run reads; its data is read by the broker alone, which may be on another machine"""


def check(config: Config, inputs: Collection[str] = INPUTS) -> None:
    """Refuse what is valid key by key but cannot work together, and those of the `inputs` that are not there."""
    check_schedule(config.schedule)
    check_sampling(config)
    check_evaluation(config.evaluation)
    check_algorithm(config.algorithm)
    check_addresses(config)
    check_leases(config.broker)
    check_reward(config)
    check_environment(config.environment)
    if "model" in inputs:
        check_model(config)
    if "data" in inputs:
        check_data(config.data)
    check_engine(config)


def check_schedule(schedule: ScheduleSection) -> None:
    if key := schedule.automatic_key:
        check_automatic(schedule, key)
        schedule = schedule.model_copy(update={key: None})
    n, groups, per_round = schedule.n_samples_per_prompt, schedule.rollout_batch_size, schedule.groups_per_round
    if n < 2:
        raise ConfigError(
            f"key 'schedule.n_samples_per_prompt' = {n} gives group-relative advantages nothing to compare; "
            "use 2 or more"
        )
    if schedule.kind == "sync" and per_round > groups:
        raise ConfigError(
            f"key 'schedule.over_sampling_batch_size' = {per_round} over-samples N = {groups}, "
            "which schedule.kind = 'sync' never does; use schedule.kind = 'april' or leave the key out"
        )
    if schedule.kind == "continuous":
        check_continuous(schedule)
    elif schedule.in_flight is not None:
        raise ConfigError(
            f"key 'schedule.in_flight' = {schedule.in_flight} is for schedule.kind = 'continuous', not "
            f"{schedule.kind!r}; leave it out, or set schedule.over_sampling_batch_size"
        )
    admitted = schedule.batches_in_reach * groups
    if per_round > admitted:
        raise ConfigError(
            f"key 'schedule.over_sampling_batch_size' = {per_round} exceeds {admitted}, the most that "
            f"schedule.max_staleness = {schedule.max_staleness} allows for N = {groups}"
            f"{' with overlap' if schedule.overlap else ''}; lower it or raise max_staleness"
        )
    if schedule.min_group_size and schedule.min_group_size > n:
        raise ConfigError(
            f"key 'schedule.min_group_size' = {schedule.min_group_size} exceeds n = {n}; use a value from 1 to {n}"
        )


def check_automatic(schedule: ScheduleSection, key: str) -> None:
    """Refuse `auto` where there is nothing to choose."""
    wanted = {"april": "over_sampling_batch_size", "continuous": "in_flight"}.get(schedule.kind)
    if wanted is None:
        raise ConfigError(
            f"key 'schedule.{key}' = 'auto' has nothing to choose where schedule.kind = {schedule.kind!r}; "
            "use schedule.kind = 'april' or 'continuous', or leave the key out"
        )
    if key != wanted:
        raise ConfigError(
            f"key 'schedule.{key}' = 'auto' is not what schedule.kind = {schedule.kind!r} goes by; "
            f"set schedule.{wanted} = 'auto'"
        )


def check_evaluation(evaluation: EvaluationSection) -> None:
    if evaluation.samples > 1 and evaluation.temperature == 0:
        raise ConfigError(
            f"key 'evaluation.samples' = {evaluation.samples} asks for greedy samples, which are all the same; "
            "set evaluation.temperature above 0 or use 1"
        )


def check_continuous(schedule: ScheduleSection) -> None:
    """Refuse what `continuous` has no use for, and more samples in flight than the staleness bound ever admits."""
    if not schedule.partial_rollout:
        raise ConfigError(
            "key 'schedule.partial_rollout' = False cannot be: schedule.kind = 'continuous' ends no round, so that "
            "nothing is discarded unfinished; leave it true, or use schedule.kind = 'april'"
        )
    if schedule.overlap:
        raise ConfigError(
            "key 'schedule.overlap' = True says nothing: schedule.kind = 'continuous' always generates while the "
            "learner trains; leave it out, or use schedule.kind = 'april'"
        )
    groups, n = schedule.rollout_batch_size, schedule.n_samples_per_prompt
    admitted = schedule.batches_in_reach * groups * n
    if schedule.in_flight is not None and schedule.in_flight > admitted:
        raise ConfigError(
            f"key 'schedule.in_flight' = {schedule.in_flight} exceeds {admitted}, the most samples that "
            f"schedule.max_staleness = {schedule.max_staleness} ever admits for {groups} x {n} in a batch; "
            "lower it or raise max_staleness"
        )


def check_sampling(config: Config) -> None:
    """Training samples may be drawn from a part of the distribution where the engine returns which part that was."""
    sampling, server = config.sampling, config.engine.server
    if not sampling.is_cut:
        return
    whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    key, value = next((key, getattr(sampling, key)) for key in whole if getattr(sampling, key) != whole[key])
    if config.worker.engine != "sglang":
        raise ConfigError(
            f"key 'sampling.{key}' = {value} cuts the distribution, and worker.engine = {config.worker.engine!r} does "
            "not say what is left of it, without which training would be biased; set worker.engine = 'sglang', or "
            "use top_k = 0, top_p = 1.0 and min_p = 0.0"
        )
    if sampling.top_k < 2:
        raise ConfigError(
            f"key 'sampling.{key}' = {value} does not bound what travels with every token, the ids that it was drawn "
            f"from; set sampling.top_k from 2 to {TOP_K}"
        )
    if algorithm := server.get("speculative_algorithm"):
        raise ConfigError(
            f"key 'engine.server.speculative_algorithm' = {algorithm!r} cannot be with sampling.{key} = {value}: "
            "SGLang does not say what tokens of a draft were drawn from; leave one out"
        )
    if sampling.min_p and server.get("enable_deterministic_inference"):
        raise ConfigError(
            f"key 'sampling.min_p' = {sampling.min_p} cannot be with engine.server.enable_deterministic_inference, "
            "under which SGLang does not do it; use sampling.top_p, or leave one out"
        )


def check_algorithm(algorithm: AlgorithmSection) -> None:
    weighing = [name for name in algorithm.corrections if name in ("truncated", "truncated_sequence", "icepop")]
    if weighing and algorithm.proximal == "behaviour":
        raise ConfigError(
            f"key 'algorithm.corrections' = {list(algorithm.corrections)} holds {weighing[0]!r}, which weighs 1 around "
            "the behaviour policy; set algorithm.proximal = 'recomputed' or 'interpolated', or leave it out"
        )
    if len(weighing) > 1 or len(set(algorithm.corrections)) < len(algorithm.corrections):
        raise ConfigError(
            f"key 'algorithm.corrections' = {list(algorithm.corrections)} applies the same ratio twice; name each "
            "correction once, and only one of 'truncated', 'truncated_sequence' and 'icepop'"
        )
    if algorithm.dual_clip is not None and algorithm.loss != "ppo":
        raise ConfigError(
            f"key 'algorithm.dual_clip' = {algorithm.dual_clip} is for algorithm.loss = 'ppo', not "
            f"{algorithm.loss!r}; leave it out"
        )
    if algorithm.constant_tokens is not None and algorithm.normalisation != "constant":
        raise ConfigError(
            f"key 'algorithm.constant_tokens' = {algorithm.constant_tokens} is for algorithm.normalisation = "
            f"'constant', not {algorithm.normalisation!r}; leave it out"
        )
    for band in ("icepop", "geometric"):
        low, high = getattr(algorithm, f"{band}_low"), getattr(algorithm, f"{band}_high")
        if low >= high:
            raise ConfigError(
                f"key 'algorithm.{band}_low' = {low} is not below algorithm.{band}_high = {high}, so every token "
                "would be masked; lower it"
            )


def check_addresses(config: Config) -> None:
    """Addresses are well-formed, and nobody outside this machine gets in without keys."""
    port = re.fullmatch(r"tcp://[^:/\s]+:(\*|\d+)", config.broker.bind)
    if not port or (port[1] != "*" and not 0 < int(port[1]) < 65536):
        raise ConfigError(
            f"key 'broker.bind' = {config.broker.bind!r} is no address; use tcp://INTERFACE:PORT, * for a free port"
        )
    hosts = {"broker.bind": config.broker.bind[len("tcp://") : -len(port[1]) - 1], "weights.host": config.weights.host}
    for key, host in hosts.items():
        if config.security.keys is None and not is_loopback(host):
            value = config.broker.bind if key == "broker.bind" else host
            raise ConfigError(
                f"key {key!r} = {value!r} would let anybody on the network in; make keys with `april keygen KEYS` and "
                "set security.keys = 'KEYS', or keep to 127.0.0.1"
            )
    if config.security.keys is not None and not config.security.keys.exists():
        raise ConfigError(
            f"key 'security.keys' = {str(config.security.keys)!r} does not exist; make it with "
            f"`april keygen {config.security.keys}`"
        )
    port = re.fullmatch(r"[^:/\s]+:(\d+)", config.operations.http)
    if config.operations.http != "none" and not (port and int(port[1]) < 65536):
        raise ConfigError(
            f"key 'operations.http' = {config.operations.http!r} is no address; use HOST:PORT, port 0 for a free one, "
            "or none"
        )


def check_leases(broker: BrokerSection) -> None:
    if broker.renew_s >= broker.lease_s:
        raise ConfigError(
            f"key 'broker.renew_s' = {broker.renew_s} is not below broker.lease_s = {broker.lease_s}; "
            "a lease would end before its renewal: lower renew_s"
        )


def check_reward(config: Config) -> None:
    reward, budget = config.reward, config.sampling.max_response_tokens
    if reward.overlong_buffer_tokens > budget:
        raise ConfigError(
            f"key 'reward.overlong_buffer_tokens' = {reward.overlong_buffer_tokens} is more than "
            f"sampling.max_response_tokens = {budget}; use a part of it"
        )
    if reward.code_memory_mb > reward.memory_mb:
        raise ConfigError(
            f"key 'reward.code_memory_mb' = {reward.code_memory_mb} is more than reward.memory_mb = "
            f"{reward.memory_mb}, within which programs run; raise that"
        )
    if reward.url and not re.match(r"https?://[^/\s]", reward.url):
        raise ConfigError(f"key 'reward.url' = {reward.url!r} is no address; give it as http://HOST:PORT/PATH")
    try:
        re.compile(reward.format_pattern)
    except re.error as error:
        raise ConfigError(
            f"key 'reward.format_pattern' = {reward.format_pattern!r} is no regular expression ({error}); mend it"
        ) from None


def check_environment(environment: EnvironmentSection) -> None:
    ends = environment.turn_ends or environment.max_turn_tokens is not None
    if environment.name and not ends:
        raise ConfigError(
            f"key 'environment.name' = {environment.name!r} is never asked, since nothing ends a turn; set "
            "environment.turn_ends or environment.max_turn_tokens"
        )
    if ends and not environment.name:
        raise ConfigError(
            f"key 'environment.turn_ends' = {environment.turn_ends!r} ends turns that nothing answers; set "
            "environment.name, or leave the section out"
        )


def check_model(config: Config) -> None:
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"key 'model.path' = {str(config.model.path)!r} is not a Hugging Face model folder (no config.json); "
            "give one, or make the quickstart's with `april make-policy`"
        )
    try:
        room = config.longest_prompt_tokens
    except (OSError, ValueError, AttributeError):
        raise ConfigError(
            f"key 'model.path' = {str(config.model.path)!r} has a config.json that is not a JSON object; "
            "give a whole Hugging Face folder"
        ) from None
    if room < 1:
        raise ConfigError(
            f"key 'sampling.max_response_tokens' = {config.sampling.max_response_tokens} leaves no room for a prompt "
            f"in the model's context of {config.context_tokens} tokens; lower it"
        )


def check_data(data: DataSection) -> None:
    if bool(data.path) == bool(data.sources):
        if not data.path:
            raise ConfigError("key 'data.path' is missing; set it in the file or with --data.path VALUE")
        raise ConfigError(
            f"key 'data.path' = {str(data.path)!r} goes beside data.sources; make it one of them, or leave one out"
        )
    paths = [("data.path" if data.path else "data.sources", source.path) for source in data.train_sources]
    for key, path in [*paths, ("data.eval_path", data.eval_path)]:
        if path is not None and not path.exists():
            raise ConfigError(
                f"key {key!r} = {str(path)!r} does not exist; give a file or folder of prompts, or make the "
                "quickstart's with `april make-data`"
            )


def check_engine(config: Config) -> None:
    """Refuse what the server cannot do, or cannot do rightly."""
    engine, tensor_parallel = config.engine, "tp_size"
    if config.worker.engine == "torch":
        return check_no_server(engine)
    if config.worker.engine == "vllm":
        check_vllm(config)
        tensor_parallel = "tensor_parallel_size"
    if engine.pause != "abort" and engine.stream_tokens != 1:
        raise ConfigError(
            f"key 'engine.pause' = {engine.pause!r} leaves tokens unsent when weights change, whose version would be "
            "unknown; set engine.stream_tokens = 1, or use engine.pause = 'abort'"
        )
    for key, spelled in (("pp_size", "pipeline_parallel_size"), ("dp_size", "data_parallel_size")):
        value = engine.server.get(key, engine.server.get(spelled, 1))
        if value != 1:
            raise ConfigError(
                f"key 'engine.server.{key}' = {value!r} cannot be: new weights go only into tensor-parallel ranks; use "
                f"{tensor_parallel}, and one worker for each replica"
            )
    ranks = engine.tensor_ranks
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"key 'engine.server.{tensor_parallel}' = {ranks!r} is no number of ranks; use 1 or more")
    if heads := config.attention_heads:
        query, shared = heads
        if query % ranks or (shared % ranks and ranks % shared):
            raise ConfigError(
                f"key 'engine.server.{tensor_parallel}' = {ranks} cannot split the model's {query} heads and {shared} "
                f"key-value heads evenly; use a divisor of {query}"
            )
    check_servers(engine)


def check_no_server(engine: EngineSection) -> None:
    """The embedded engine would run in place of the servers that are meant."""
    if engine.url:
        raise ConfigError(
            f"key 'engine.url' = {','.join(engine.url)!r} names servers, and 'worker.engine' is 'torch', which has "
            "none; set worker.engine = 'sglang' (or 'vllm'), or leave engine.url out"
        )


def check_servers(engine: EngineSection) -> None:
    """Refuse addresses that are none, and what is said of servers that others have started."""
    for url in engine.url:
        if not re.fullmatch(r"https?://[^/\s:]+(:\d+)?", url.rstrip("/")):
            raise ConfigError(
                f"key 'engine.url' = {url!r} is no address; give the server's as http://HOST:PORT, several with commas"
            )
    if len({url.rstrip("/") for url in engine.url}) < len(engine.url):
        raise ConfigError(
            f"key 'engine.url' = {','.join(engine.url)!r} names a server twice, whose weights would be loaded twice "
            "over; name each once"
        )
    if engine.url and engine.server:
        raise ConfigError(
            f"key 'engine.server' = {engine.server!r} cannot be passed to the server at {engine.url[0]}, which is not "
            "started here; leave it out"
        )
    if engine.url and engine.servers > 1:
        raise ConfigError(
            f"key 'engine.servers' = {engine.servers} starts servers, but engine.url = {','.join(engine.url)!r} names "
            "those that there are; leave one of them out"
        )
    if engine.port and engine.port + engine.servers > 65536:
        raise ConfigError(
            f"key 'engine.port' = {engine.port} leaves no ports for {engine.servers} servers behind it; lower it, or "
            "use 0 for any that are free"
        )


def check_vllm(config: Config) -> None:
    """Refuse what SGLang's servers do and vLLM's does not."""
    engine = config.engine
    if engine.url:
        raise ConfigError(
            f"key 'engine.url' = {','.join(engine.url)!r} cannot be: a vLLM server runs April's own program, so "
            "that a worker starts it itself; leave it out"
        )
    if engine.servers > 1:
        raise ConfigError(
            f"key 'engine.servers' = {engine.servers} is for SGLang's servers: a worker has one vLLM server; raise "
            "worker.count instead"
        )
    for key, value, only in (("pause", engine.pause, "abort"), ("weights", engine.weights, "disk")):
        if value != only:
            raise ConfigError(
                f"key 'engine.{key}' = {value!r} is for SGLang's servers, not for worker.engine = 'vllm'; use {only!r}"
            )
    for key, temperature in (("sampling", config.sampling.temperature), ("evaluation", config.evaluation.temperature)):
        if temperature > VLLM_TEMPERATURE:
            raise ConfigError(
                f"key '{key}.temperature' = {temperature} is above {VLLM_TEMPERATURE:g}, the most that vLLM takes; "
                "lower it"
            )
    for key, value, whole in (("top_k", config.evaluation.top_k, 0), ("top_p", config.evaluation.top_p, 1.0)):
        if value != whole:
            raise ConfigError(
                f"key 'evaluation.{key}' = {value} cuts the distribution, which worker.engine = 'vllm' does not do; "
                f"use {whole}"
            )


def check_address(address: str) -> str:
    """A broker's address as peers connect to it: tcp://HOST:PORT."""
    found = re.fullmatch(r"tcp://[^:/\s]+:(\d+)", address)
    if not found or not 0 < int(found[1]) < 65536:
        raise ConfigError(f"option '--connect' = {address!r} is no address; give the broker's as tcp://HOST:PORT")
    return address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; of names only localhost is known to be so."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")
