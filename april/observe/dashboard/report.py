"""report.html: the dashboard's run page with a run's data inside, in one self-contained HTML file."""

import hashlib
import re
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from april.config import ConfigError
from april.observe.dashboard import run_page
from april.observe.dashboard.steps import Steps
from april.observe.report.facts import max_steps, steps_done
from april.observe.report.run_folder import RunFolder, read_run
from april.observe.report.samples import example_samples
from april.observe.report.timeline import MAX_DRAWN_WORKERS, whole_timeline

STATIC = Path(run_page.__file__).parent / "static"
NOT_IN_COMPONENTS = "!'()*"
"""Characters besides letters, digits and `_.-~` that JavaScript's encodeURIComponent does not escape."""


def write_report(run_dir: str | Path) -> Path:
    """Write report.html into the run folder and return its path. Raises ConfigError for a damaged run folder."""
    run = read_run(run_dir)
    path = run.path / "report.html"
    path.write_text(page(run), encoding="utf-8")
    return path


def page(run: RunFolder) -> str:
    """The dashboard's page as one HTML text, which contains its style sheets, scripts and pictures, and the answers to
    the requests that the page makes about the run."""
    answers = orjson.dumps(answers_of(run), option=orjson.OPT_SERIALIZE_NUMPY).decode()
    html = (STATIC / "index.html").read_text()
    html = re.sub(r'<link rel="stylesheet" href="(.*?)">', lambda found: f"<style>{static(found[1])}</style>", html)
    html = re.sub(r'<script src="(.*?)".*?(type="module")?></script>', lambda found: script(*found.groups()), html)
    icon = f"data:image/svg+xml;base64,{b64encode((STATIC / 'sprout.svg').read_bytes()).decode()}"
    html = html.replace('"sprout.svg"', f'"{icon}"').replace("<title>April", f"<title>{escape(run.name)} – April")
    policy = f'<meta http-equiv="content-security-policy" content="{content_policy(html)}">'
    # A `<` in a text of the run could end the script element that carries it.
    carried = f'<script type="application/json" id="answers">{answers.replace("<", chr(92) + "u003c")}</script>'
    return html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n  {policy}').replace(
        "</head>", f"  {carried}\n</head>"
    )


# --- data -------------------------------------------------------------------------------------------------------------


def answers_of(run: RunFolder) -> dict[str, Any]:
    """The dashboard's answers about the run, by the path that its page asks for, without the query."""
    steps = Steps(run.path)
    steps.follow()
    described = {"name": run.name, "state": run.state, "steps": steps_done(run), "max_steps": max_steps(run)}
    progress = {"steps": len(steps), "all_read": True, "problem": "", "state": run.state}
    path = f"api/runs/{quote(run.name, safe=NOT_IN_COMPONENTS)}"
    return {
        "api/runs": [described | {"views": ["run"], "live": False}],
        path: run_page.describe(run, steps) | progress,
        f"{path}/steps": run_page.thinned(run_page.table(steps)),
        f"{path}/timeline": run_page.timeline_window(steps, max_workers=MAX_DRAWN_WORKERS),
        f"{path}/lanes": whole_timeline(run),
        f"{path}/examples": examples_or_error(run),
    }


def examples_or_error(run: RunFolder) -> list[dict[str, Any]] | dict[str, str]:
    try:
        return example_samples(run.path)
    except ConfigError as error:
        return {"error": str(error)}


# --- scripts and style sheets -----------------------------------------------------------------------------------------

IMPORT = re.compile(r'^import \{(.*?)\} from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const) (\w+))", re.MULTILINE)


def static(name: str) -> str:
    return (STATIC / name).read_text()


def script(name: str, module: str | None) -> str:
    return f'<script type="module">{bundle(name)}</script>' if module else f"<script>{static(name)}</script>"


def bundle(name: str) -> str:
    """The JavaScript module `name` and all that it imports as one script. In it each module is a function that returns
    its exports."""
    modules: dict[str, str] = {}

    def add(name: str) -> None:
        text = static(f"{name}.js")
        for _, imported in IMPORT.findall(text):
            if imported not in modules:
                add(imported)
        exports = ", ".join(exported for _, exported in EXPORT.findall(text))
        body = EXPORT.sub(r"\1", IMPORT.sub(r"const {\1} = \2Module;", text))
        modules[name] = f"const {name}Module = (() => {{\n{body}return {{ {exports} }};\n}})();\n"

    add(name.removesuffix(".js"))
    return "".join(modules.values())


def content_policy(html: str) -> str:
    """Content-Security-Policy by which the page loads nothing, and runs only the scripts that are in it now."""

    def hashes(element: str) -> str:
        texts = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", html, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
