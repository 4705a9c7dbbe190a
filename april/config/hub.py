"""Models and datasets by their names on a hub, OWNER/NAME, through `huggingface_hub` and its cache.

Before parts of a run start, their launcher on a machine resolves each name to a commit and fetches what the parts read
of it (`Fetcher`). The parts find it in the cache of their machine (`from_cache`), and contact no hub. A run that goes
on keeps the commits that it began with.

    config = load(files, overrides, fetch=Fetcher("weights", "rows"))
"""

import contextlib
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from april.config.section import HubSection, Section, cached_folder, tables
from april.util.errors import ConfigError, refuse
from april.util.files import WEIGHTS, WEIGHTS_INDEX, weight_files
from april.util.text import counted, format_bytes, masked

NO_NAME = r"--|\.\.|\.(?:git|jsonl?|ndjson|parquet|arrow|csv|tsv|txt|gz|zst|zip)$"
NAME = re.compile(rf"(?!.*(?:{NO_NAME}))[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")
DATA_FILE = re.compile(
    r"(?:.*/)?(?!dataset_infos?\.json$|dataset_dict\.json$|state\.json$)[^/]*\.(jsonl|ndjson|json|parquet|arrow)"
)
"""Regular expression for the path of a file of rows. Metadata files of the `datasets` library do not match."""
MODEL_FILE = re.compile(r"(additional_chat_templates/)?[^/]+\.(json|txt|model|jinja|tiktoken)")
"""Regular expression for the path of a file, other than weights, that belongs to a model in its repository."""


def is_hub_name(path: str) -> bool:
    """Whether a path has the form of a repository's name on a hub."""
    return bool(NAME.fullmatch(path))


@dataclass
class HubInput:
    """A path in a configuration that is the name of a repository on a hub."""

    section: str
    """Key of the table that has the path."""
    table: dict[str, Any]
    """Keys and values of the table at `section`; resolved values are added."""
    prefix: str
    """Prefix of the input's keys in its table: "eval_" for `eval_path` and `eval_revision`, or ""."""
    repository: Literal["model", "dataset"]
    """Kind of the repository."""

    @property
    def name(self) -> str:
        return str(self.table[f"{self.prefix}path"])

    @property
    def commit(self) -> str | None:
        commit: str | None = self.get("commit")
        return commit

    @property
    def revision(self) -> str:
        """Branch, tag or commit that the configuration asks for."""
        return str(self.get("revision") or "main")

    @property
    def folder(self) -> Path:
        """Folder of the resolved commit in the cache."""
        return cached_folder(self.repository, self.name, str(self.commit))

    @property
    def is_for_evaluation(self) -> bool:
        return bool(self.prefix) or self.section.startswith("evaluation")

    @property
    def kinds(self) -> set[str]:
        """Kinds of input that the repository provides: "model"; "data"; or "data" and "conversations" for a source of
        kind sft."""
        if self.repository == "model":
            return {"model"}
        return {"data", "conversations"} if self.get("kind") == "sft" else {"data"}

    def key(self, name: str) -> str:
        """The whole key, section and prefix included, of the input's key `name`: `data.eval_split` for "split" of
        held-out prompts."""
        return f"{self.section}.{self.prefix}{name}"

    def get(self, name: str) -> Any:
        """The value of the input's key `name`, such as "revision" or "split"; None if it is unset. Where held-out
        prompts have no revision or configuration of their own, those of the training prompts from the same repository
        count."""
        value = self.table.get(f"{self.prefix}{name}")
        shared = self.prefix and name in ("revision", "configuration") and self.table.get("path") == self.name
        return self.table.get(name) if shared and value is None else value

    def set(self, **values: str | None) -> None:
        self.table |= {f"{self.prefix}{name}": value for name, value in values.items() if value is not None}

    @property
    def fetch_command(self) -> str:
        """Command line that downloads the repository into the cache."""
        kind = "" if self.repository == "model" else f" --repo-type {self.repository}"
        revision = self.commit or self.revision
        return f"hf download {self.name}{kind}" + (f" --revision {revision}" if revision != "main" else "")


def hub_inputs(tree: dict[str, Any], model: type[Section]) -> list[HubInput]:
    """The paths in `tree`, a configuration's tables, that name a repository on a hub. `model`: class of the
    configuration. Paths to files and folders must have been made absolute (`make_paths_absolute`)."""
    return [
        HubInput(key, table, prefix, section.repository)
        for key, table, section in tables(tree, model)
        if issubclass(section, HubSection)
        for prefix in section.prefixes
        if is_hub_name(str(table.get(f"{prefix}path", "")))
    ]


Fetch = Callable[[Sequence[HubInput]], None]
"""Function that sets the commit of each hub input that it gets, and may download files of it into the cache. Raises
ConfigError."""

# --- without a hub ----------------------------------------------------------------------------------------------------


def take_recorded_commits(named: Sequence[HubInput], file: Path, model: type[Section]) -> None:
    """Set the commit of each input in `named` that has none. It is taken from `file`, the config.toml of a run that has
    begun, if that records one for the same repository and revision. `model`: class of the configuration."""
    try:
        recorded = hub_inputs(tomllib.loads(file.read_text()), model)
    except (OSError, tomllib.TOMLDecodeError):
        return
    commits = {(each.repository, each.name, each.revision): each.commit for each in recorded}
    for each in named:
        if not each.commit:
            each.set(commit=commits.get((each.repository, each.name, each.revision)))


def from_cache(inputs: Collection[str]) -> Fetch:
    """A `Fetch` function for a part of a run, which sets commits from the cache alone. `inputs`: the kinds that it
    resolves: "model", "data" (all datasets), or "conversations" (datasets of sources of kind sft)."""

    def fetch(named: Sequence[HubInput]) -> None:
        for each in named:
            if each.kinds.isdisjoint(inputs):
                continue
            known = each.folder.parents[1] / "refs" / each.revision
            if not each.commit and known.is_file():
                each.set(commit=known.read_text().strip())
            elif not each.commit and COMMIT.fullmatch(each.revision):
                each.set(commit=each.revision)
            if not (each.commit and each.folder.is_dir()):
                refuse_missing(each, "a part of a run fetches nothing")
            if each.repository == "dataset" and not each.get("split"):
                choose_rows(each, names_in(each.folder))

    return fetch


def refuse_missing(named: HubInput, why: str) -> NoReturn:
    refuse(
        named.key("path"),
        named.name,
        f"is no file or folder here, and the hub's {named.repository} of that name is not whole in the cache of this "
        f"machine: {why}",
        f"mend the path, or fetch it, here or with `{named.fetch_command}`; a download goes on where it ended",
    )


# --- from a hub -------------------------------------------------------------------------------------------------------


class Fetcher:
    """A `Fetch` for a launcher: resolves the names of models and datasets, and fetches what is not in the cache.

    `model`: "commit" (fetches nothing), "tokenizer" (all but the weights) or "weights"; `data`: "commit", "rows", or
    "conversations" (rows of sources of kind sft alone). A kind that is left out is not resolved, since no part that is
    launched reads it.
    """

    def __init__(
        self,
        model: Literal["commit", "tokenizer", "weights"] | None = None,
        data: Literal["commit", "rows", "conversations"] | None = None,
    ):
        self._wanted = {"model": model, "dataset": data}
        self._resolved: dict[tuple[str, str, str], str] = {}
        """Commit by (kind, name, revision): a name is resolved once."""
        self.facts: list[str] = []
        """A line about each name: its commit, and what is still to be fetched."""

    def __call__(self, named: Sequence[HubInput]) -> None:
        for each in named:
            wanted = self._wanted[each.repository]
            if wanted == "conversations" and wanted not in each.kinds:
                continue
            if wanted:
                with refusing(each):
                    self._resolve(each)
                    lacking = self._fetch(each, wanted) if wanted != "commit" else ""
                self.facts.append(f"{each.name} at {each.commit}{lacking}")

    def _resolve(self, named: HubInput) -> None:
        from huggingface_hub import HfApi

        asked = named.repository, named.name, named.revision
        if not named.commit:
            if asked not in self._resolved:
                found = HfApi().resolve_revision(named.name, repo_type=named.repository, revision=named.revision)
                self._resolved[asked] = found.resolved
            named.set(commit=self._resolved[asked])

    def _fetch(self, named: HubInput, wanted: str) -> str:
        """Fetch the files `wanted` of an input: "weights" (all files of a model), "tokenizer" (all but the weights),
        "rows" or "conversations" (a dataset's). Returns a clause with the size of the weights that are still to be
        fetched, empty if there are none."""
        try:
            sizes, known = sizes_of(named)
            if named.repository == "dataset":
                download(named, sizes, ["README.md"])
                download(named, sizes, choose_rows(named, list(sizes)))
                return ""
            download(named, sizes, [name for name in sizes if MODEL_FILE.fullmatch(name)])
            weights = weight_names(named, sizes)
        except ConfigError:
            if known:
                raise
            refuse_missing(named, "the hub cannot be asked")
        if wanted == "weights":
            download(named, sizes, weights)
        lacking = [name for name in weights if not (named.folder / name).is_file()]
        return f", of which {format_bytes(sum(sizes[name] for name in lacking))} are to fetch" if lacking else ""


def sizes_of(named: HubInput) -> tuple[dict[str, int], bool]:
    """(size of each file of the commit in bytes, True); if the hub cannot be asked, (sizes of the cached files,
    False)."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HTTPError, OfflineModeIsEnabled
    from huggingface_hub.hf_api import RepoFile

    where: dict[str, Any] = {"repo_type": named.repository, "revision": named.commit}
    try:
        listed: Iterable[Any] = get_cached_repo_tree(named.name, **where)
    except CachedRepoTreeNotFoundError:
        try:
            listed = list(HfApi().list_repo_tree(named.name, recursive=True, **where))  # an error is raised here
        except (HTTPError, OfflineModeIsEnabled):
            if not named.folder.is_dir():
                raise
            return {name: (named.folder / name).stat().st_size for name in names_in(named.folder)}, False
    return {file.path: file.size for file in listed if isinstance(file, RepoFile)}, True


def download(named: HubInput, sizes: Mapping[str, int], files: Sequence[str]) -> list[str]:
    """Download into the cache those of `files` that the commit has, and return their names. `sizes`: size (bytes) of
    each file of the commit."""
    from huggingface_hub import snapshot_download

    there = [name for name in files if name in sizes]
    missing = [name for name in there if not (named.folder / name).is_file()]
    if missing:
        size = format_bytes(sum(sizes[name] for name in missing))
        print(f"fetching {named.name}: {size} in {counted(len(missing), 'file')}", file=sys.stderr, flush=True)
        literal = [re.sub(r"([*?[])", r"[\1]", name) for name in missing]
        snapshot_download(named.name, repo_type=named.repository, revision=named.commit, allow_patterns=literal)
    return there


def weight_names(named: HubInput, sizes: Mapping[str, int]) -> list[str]:
    """Names of a model's weight files, as its index lists them. `sizes`: size (bytes) of each file of the commit.
    Raises ConfigError if the model has no weights that April reads."""
    found = [path.name for path in weight_files(named.folder)] if WEIGHTS_INDEX in sizes else []
    plain = [name for name in sizes if re.fullmatch(r"[^/]+\.safetensors", name)]
    found = found or ([WEIGHTS] if WEIGHTS in sizes else plain)
    if lacking := [name for name in found if name not in sizes] if found else ["*.safetensors"]:
        why = f"has no weights {lacking[0]} at commit {named.commit}"
        refuse(named.key("path"), named.name, why, "take another revision, or a model that has them")
    return found


@contextlib.contextmanager
def refusing(named: HubInput) -> Iterator[None]:
    """Context manager that turns the errors of the hub and of its cache, for the input `named`, into ConfigError."""
    from huggingface_hub import constants, errors, get_token

    key, endpoint = named.key("path"), masked(constants.ENDPOINT)
    url = f"{endpoint}/{'datasets/' * (named.repository == 'dataset')}{named.name}"
    reader = "with the token that is set" if get_token() else "without a token"
    set_token = "set HF_TOKEN, or `hf auth login`"
    try:
        yield
    except ConfigError:
        raise
    except errors.GatedRepoError:
        fix = f"ask for access at {url}, and {set_token}"
        refuse(key, named.name, f"is a gated {named.repository}, which cannot be read {reader}", fix)
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        why = f"is no file or folder here, and no {named.repository} at {endpoint} that can be seen {reader}"
        refuse(key, named.name, why, f"mend the path or the name; if it is private, {set_token}")
    except errors.RevisionNotFoundError:
        why = f"is no branch, tag or commit of {url}"
        asked, value = ("commit", named.commit) if named.commit else ("revision", named.revision)
        refuse(named.key(asked), value, why, "give one that is, or leave it out")
    except Exception as error:  # of its connections, its files, and answers that are no hub's
        answer = getattr(error, "response", None)
        if answer is not None and answer.status_code in (401, 403):
            fix = f"{set_token} of one who may read {url}"
            refuse(key, named.name, f"cannot be read {reader} (the hub answers {answer.status_code})", fix)
        if constants.is_offline_mode():
            refuse_missing(named, "HF_HUB_OFFLINE is set")
        cause = error.__cause__ or error
        said = f"{type(cause).__name__}: {masked(str(cause).strip().partition(chr(10))[0])}"
        refuse_missing(named, f"fetching it from {endpoint} has failed ({said})")


# --- files of a dataset -----------------------------------------------------------------------------------------------

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation", "heldout"),
}
"""Words in the name of a file or folder that denote a split, as in the `datasets` library."""
SHARD_NAME = re.compile(r"(?:.*/)?([^/]+?)-\d+-of-\d+[^/]*")


def names_in(folder: Path) -> list[str]:
    """Names of all files in a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def choose_rows(named: HubInput, names: Sequence[str]) -> list[str]:
    """Set the configuration and the split of a dataset whose files have these names; returns the split's files."""
    asked = named.get("configuration"), named.get("split")
    card = read_card(named.folder)
    configuration, split, files = choose_files(names, card, *asked, named.key, named.is_for_evaluation)
    named.set(configuration=configuration, split=split)
    return files


def read_card(folder: Path) -> dict[str, Any]:
    """Metadata at the top of the README.md in a dataset's folder; empty if there is none."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        found = metadata_load(card) if card.is_file() else {}
    except Exception:  # what is no YAML there is of no use, and the names of the files say as much
        return {}
    return found if isinstance(found, dict) else {}


def choose_files(
    names: Sequence[str],
    card: Mapping[str, Any],
    configuration: str | None,
    split: str | None,
    key: Callable[[str], str],
    for_evaluation: bool = False,
) -> tuple[str | None, str, list[str]]:
    """(configuration, split, its files) of a dataset whose files have these names, by the `configs` of its card or by
    the names. `card`: metadata of the dataset's README. `configuration`, `split`: the wanted ones; None: the default or
    only one. `for_evaluation`: the default split is test or validation, not train. `key`: turns "split" and so on into
    the whole key, for errors. Raises ConfigError."""
    files = sorted(name for name in names if DATA_FILE.fullmatch(name) and not name.startswith("."))
    if not files:
        refuse(
            key("path"), None, "is a dataset without JSONL, JSON, Parquet or Arrow files", "convert it to one of them"
        )
    described = {str(one.get("config_name", "default")): one for one in mappings(card.get("configs")) if files_of(one)}
    if described:
        default = [name for name, one in described.items() if one.get("default") or name == "default"]
        configuration = chosen(key("configuration"), configuration, described, default)
        splits = matching(files, described[configuration])
    elif configuration:
        folders = dict.fromkeys(name.partition("/")[0] for name in files if "/" in name)
        configuration = chosen(key("configuration"), configuration, folders, ())
        splits = by_names([name for name in files if name.startswith(f"{configuration}/")])
    else:
        splits = by_names(files)
    split = chosen(key("split"), split, splits, ("test", "validation") if for_evaluation else ("train",))
    return configuration, split, splits[split]


def chosen(key: str, asked: str | None, known: Collection[str], preferred: Sequence[str]) -> str:
    """The name that is `asked` for; if that is None, the first of `preferred` that is in `known`, or the only one in
    `known`. `key`: configuration key for the error. Raises ConfigError."""
    first = [name for name in preferred if name in known] or (list(known) if len(known) == 1 else [])
    if asked in known or (asked is None and first):
        return asked or first[0]
    listed = ", ".join(sorted(known)) or "none"
    refuse(
        key, asked, "is none of this dataset" if asked else "has to be said for this dataset", f"use one of: {listed}"
    )


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The tables in `value`, a list in a dataset card; other entries, as in a card with mistakes, are skipped."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def files_of(configuration: Mapping[str, Any]) -> dict[str, list[str]]:
    """Glob patterns of the files of each split, as `configuration`, an entry of `configs` in a dataset card, gives
    them."""
    data, folder = configuration.get("data_files"), configuration.get("data_dir")
    within = f"{str(folder).strip('/')}/" if folder else ""
    if data is None and folder:
        data = "**"
    if isinstance(data, str) or (isinstance(data, list) and all(isinstance(each, str) for each in data)):
        data = [{"split": "train", "path": data}]
    found: dict[str, list[str]] = {}
    for each in mappings(data):
        paths = each.get("path")
        patterns = paths if isinstance(paths, list) else [paths]
        if wanted := [within + pattern for pattern in patterns if isinstance(pattern, str)]:
            found.setdefault(str(each.get("split", "train")), []).extend(wanted)
    return found


def matching(files: Sequence[str], configuration: Mapping[str, Any]) -> dict[str, list[str]]:
    """{split: those of `files` that belong to it}, by the file patterns in `configuration`, an entry of `configs` in a
    dataset card; splits without files are left out."""
    from fsspec.utils import glob_translate

    splits = {
        split: [name for name in files if any(re.match(glob_translate(pattern), name) for pattern in patterns)]
        for split, patterns in files_of(configuration).items()
    }
    if "data_files" not in configuration:
        return by_names([name for found in splits.values() for name in found])
    return {split: found for split, found in splits.items() if found}


def by_names(files: Sequence[str]) -> dict[str, list[str]]:
    """{split: its files}, by the words in the names of `files`, as "test" in `test-0.parquet`. Files whose names denote
    no split are left out, but if no name denotes one, all files are "train"."""
    splits: dict[str, list[str]] = {}
    for name in files:
        words = set(re.split(r"[^a-z]+", name.lower().rpartition(".")[0]))
        shard = SHARD_NAME.fullmatch(name)
        by_word = next((split for split, known in SPLIT_WORDS.items() if words & set(known)), None)
        if split := by_word or (shard and shard[1]):
            splits.setdefault(split, []).append(name)
    return splits or ({"train": list(files)} if files else {})
