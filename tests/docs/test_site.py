"""The pages hold together: the site builds strictly and offline, and what pages and README name exists."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from april.config import Config, SourceSection, known_keys
from april.config.evaluation import EvaluationSetSection
from april.config.loading import FLAGS
from april.config.rewards import RewardPartSection
from april.config.workers import TeacherSection
from april.simulate.scenario import Scenario

ROOT = Path(__file__).parents[2]
OUTSIDE_THE_SITE = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *OUTSIDE_THE_SITE]
KEYS = {
    *known_keys(),
    *(f"data.sources.{name}" for name in SourceSection.model_fields),
    *(f"evaluation.sets.{name}" for name in EvaluationSetSection.model_fields),
    *(f"reward.part.{name}" for name in RewardPartSection.model_fields),
    *(f"teacher.{name}" for name in TeacherSection.model_fields),
}
SCENARIO_KEYS = set(known_keys(Scenario))
SECTIONS = [name for name in Config.model_fields if f"{name}.{name}" not in KEYS and name != "seed"]
FREE_TABLES = ("engine.server", "data.template_options", "evaluation.sets", "reward.part", "teacher")
"""Tables whose keys are not April's."""
FILES = (".py", ".json", ".jsonl", ".key", ".md", ".msgpack", ".toml", ".sh")


def generated():
    """The pages that docs/generate.py would write, by name."""
    return runpy.run_path(str(ROOT / "docs/generate.py"))["pages"]()


def relative(path):
    return str(path.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=relative)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetched(HTMLParser):
    """Addresses that a browser fetches to show a page."""

    def __init__(self, page):
        super().__init__()
        self.addresses = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        address = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
        if address:
            self.addresses.append(address)


@pytest.mark.full
def test_the_site_builds_strictly_and_fetches_nothing_from_elsewhere(site):
    built = sorted(site.rglob("*.html"))
    assert len(built) > 20
    for page in built:
        for address in Fetched(page).addresses:
            assert not re.match(r"(https?:)?//", address), f"{page.name} fetches {address}"
            assert (page.parent / address.partition("?")[0]).exists() or page.name == "404.html", (
                f"{page.name}: {address}"
            )


@pytest.mark.parametrize("name, content", generated().items(), ids=lambda value: value.partition("\n")[0])
def test_the_reference_pages_are_what_the_code_says(name, content):
    assert (ROOT / f"docs/reference/{name}.md").read_text() == content, "call python docs/generate.py"


def test_the_reference_has_every_key_with_its_help(site):
    page = (site / "reference/configuration.html").read_text()
    rows = re.findall(r"<tr>\s*<td><code>[a-z_0-9]+</code></td>.*?</tr>", page, re.S)
    assert len(rows) == len(KEYS)
    for row in rows:
        help_text = re.findall(r"<td>(.*?)</td>", row, re.S)[-1].partition("<br")[0]
        assert len(help_text) > 10 and help_text.endswith("."), row


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path = target.partition("#")[0]
        if "://" not in target and path:
            assert (page.parent / path).exists(), target


@each_page
def test_keys_that_a_page_names_exist(page):
    section = "|".join(SECTIONS)
    for key in re.findall(rf"(?:`| --)((?:{section})\.[a-z_.]+)", page.read_text()):
        assert key in KEYS | SCENARIO_KEYS or key.startswith(FREE_TABLES) or key.endswith(FILES), key


def test_metrics_that_the_pages_name_are_served(site):
    served = set(re.findall(r"<code>(april_\w+)</code>", (site / "reference/metrics.html").read_text()))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert set(re.findall(r"\b(april_[a-z_]+)\b", page.read_text())) <= served, page


@each_page
def test_configurations_that_a_page_shows_have_known_keys(page):
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S):
        shown = tomllib.loads(block)
        if not shown.keys() & Config.model_fields.keys():
            continue  # of something else
        for section, keys in shown.items():
            if section == "teacher":
                assert all(teacher.keys() <= TeacherSection.model_fields.keys() for teacher in keys.values())
                continue
            for key in keys:
                assert f"{section}.{key}" in KEYS, f"{section}.{key}"


@each_page
def test_files_that_a_page_names_exist(page):
    for path in re.findall(r"`((?:april|tests|launch|configs|benchmarks|docs)/[\w/.*-]+)`?", page.read_text()):
        assert list(ROOT.glob(path.rstrip("/"))), path


def examples_of(name):
    """Names that the Python examples of a page define."""
    defined = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.S):
        exec(block, defined)
    return defined


def test_the_rewards_of_the_pages_reward():
    assert examples_of("start/own-reward.md")["grade"]("3+4=7#7", "7", "stop", 10) == (0.99, {"correct": 1.0})
    rewards = examples_of("rewards.md")
    assert rewards["brief"]("so 8</think>it is 7", "8", "stop", 10) == (-0.001, {"right": 0.0})


def test_the_filter_of_the_page_gives_a_reason():
    filters = examples_of("data.md")
    assert filters["cut_short"](SimpleNamespace(finish_reasons=["length", "length"])) == "cut_short"
    assert filters["cut_short"](SimpleNamespace(finish_reasons=["length", "stop"])) is None


def test_short_flags_are_those_of_the_readme():
    assert set(re.findall(r" --((?:[a-z]+-)+[a-z]+)", (ROOT / "README.md").read_text())) - {"dry-run"} <= set(FLAGS)


READMES = ["README.md", "README.zh.md"]


@pytest.mark.parametrize("name", READMES)
def test_the_readme_is_short(name):
    """At most one screen and a half."""
    assert len((ROOT / name).read_text().splitlines()) <= 100


def test_the_readmes_say_the_same():
    """Commands, configuration, figures and links are the same in both languages."""
    english, chinese = ((ROOT / name).read_text() for name in READMES)
    for pattern in (
        r"^    ([\w./-][^#\n]*?)\s*(?:#|$)",
        r"^(\w+ = \S+)",
        r"\]\((?!README)([^)]+)\)",
    ):
        assert re.findall(pattern, english, re.M) == re.findall(pattern, chinese, re.M) != []
    figures = [sorted(re.findall(r"\d+\.\d+", text)) for text in (english, chinese)]
    assert figures[0] == figures[1] != []
