"""What a verifier meets in the wild: endless, huge, forking and pathological answers, and servers that fail.

Each is an error with its reason, never a reward, and costs no other item anything.
"""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from april.workers.rewards import sandbox
from tests.support.marks import full
from tests.support.reward_scores import collect
from tests.support.run_processes import wait_until

pytestmark = pytest.mark.xdist_group("programs")
"""Programs of one test process must not count as leftovers of another's."""
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
ENDS_BY_ITSELF_S = 25.0
"""Time limit of a program that must finish, however slow a busy machine starts it (s)."""


def program(text):
    return f"<think>\n```python\nbroken(\n```\n</think>Here it is:\n```python\n{text}\n```\nDone."


def verified(pool, *items):
    """Scores of (verifier, response, label) items, in order."""
    for key, (verifier, response, label) in enumerate(items):
        pool.submit(key, verifier, response, label, "stop")
    scores = collect(pool, len(items))
    return [scores[key] for key in range(len(items))]


def test_programs_are_scored_by_their_output(make_pool):
    programs = ("print(sum(map(int, input().split())))", "print(3)", "raise ValueError", "def")
    items = [("code", program(text), SUMS) for text in programs]
    *scores, missing = verified(make_pool(code_test_s=ENDS_BY_ITSELF_S), *items, ("code", "no program", SUMS))
    assert [(score.reward, score.details["passed"]) for score in scores] == [
        (1.0, 1.0),
        (0.0, 0.5),
        (0.0, 0.0),
        (0.0, 0.0),
    ]
    assert missing.reward == missing.details["program"] == 0.0


ENDLESS = {
    "loop": ("while True: pass", "wall clock"),
    "sleep": ("import time; time.sleep(1000)", "wall clock"),
    "memory": ("x = [0] * (1 << 30)", "memory"),
    "output": ("while True: print('x' * 1000)", "output"),
    "file": ("open('f', 'w').write('x' * (64 << 20)); print(1)", "output"),
    "fork": ("import os\nwhile True: os.fork()", "processes"),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()", "wall clock"
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", ENDLESS)
def test_a_program_beyond_its_limits_has_an_exceeded_limit_and_no_verdict(make_pool, name):
    text, limit = ENDLESS[name]
    pool = make_pool(code_test_s=1.5 if limit == "wall clock" else ENDS_BY_ITSELF_S, over_limit="failed")
    endless, after = verified(pool, ("code", program(text), SUMS), ("exact", "a", "a"))
    assert endless.reward is None and "exceeded its limit of" in endless.error
    assert limit in endless.error or name == "fork", endless.error
    assert after.reward == 1.0
    assert_none_is_left()


def test_a_program_beyond_its_limits_has_failed_where_configured(make_pool):
    [score] = verified(make_pool(code_test_s=0.5), ("code", program("while True: pass"), SUMS))
    assert (score.reward, score.error) == (0.0, None) and score.details["over_limit"] == 1.0


def test_a_program_that_only_prints_a_limit_s_error_has_not_exceeded_it(make_pool):
    text = "import sys\nprint('MemoryError', file=sys.stderr)\nraise ValueError('no')"
    pool = make_pool(code_test_s=ENDS_BY_ITSELF_S, over_limit="failed")
    [score] = verified(pool, ("code", program(text), SUMS))
    assert (score.reward, score.error) == (0.0, None) and "over_limit" not in score.details


def assert_none_is_left():
    """Folders of the programs that run now. Programs of concurrent tests come and go."""
    now = programs()
    wait_until(lambda: not now & programs())


def programs():
    """Process ids of the running programs."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"sandbox_runner.py" in command and state != "Z":
            found.add(int(folder.name))
    return found


def test_a_program_reaches_no_network_and_leaves_nothing_behind(make_pool):
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    try:
        port = server.server_port
        daemon = (
            "import os, time\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    os.close(0); os.close(1); os.close(2)\n"
            "    time.sleep(1000)\n"
            "print('started')\n"
        )
        connect = (
            "import socket\n"
            "try:\n"
            f"    socket.create_connection(('127.0.0.1', {port}), 2)\n"
            "    print('connected')\n"
            "except OSError:\n"
            "    print('refused')\n"
        )
        wanted = [json.dumps({"inputs": [""], "outputs": [word]}) for word in ("started", "refused")]
        pool = make_pool(code_test_s=ENDS_BY_ITSELF_S)
        scores = verified(pool, ("code", program(daemon), wanted[0]), ("code", program(connect), wanted[1]))
        assert [score.reward for score in scores] == [1.0, 1.0]
        assert_none_is_left()
    finally:
        server.server_close()


def test_a_program_with_its_own_proc_sees_no_other_process():
    look = (
        "import os\n"
        "for each in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: print(open(f'/proc/{each}/cmdline').read().replace(chr(0), ' '))\n"
        "    except (FileNotFoundError, ProcessLookupError): pass  # another of the host's, which has ended\n"
    )
    sleeper = subprocess.Popen(["sleep", "1234567"])
    try:
        outcome = sandbox.run(look, b"", sandbox.SandboxLimits(wall_s=ENDS_BY_ITSELF_S))
    finally:
        sleeper.kill()
        sleeper.wait()
    assert outcome.status == 0 and b"sandbox_runner" in outcome.output
    assert (b"1234567" in outcome.output) is ("--mount-proc" not in sandbox.isolation())


WITHOUT_NAMESPACES = """
import json, os, sys
from april.workers.rewards import sandbox
sandbox.NAMESPACES = ["false"]
programs = json.loads(sys.argv[1])
outcomes = [sandbox.run(program, b"", sandbox.SandboxLimits(wall_s=wall_s)) for program, wall_s in programs]
assert sandbox.isolation() == [] and sandbox.children(os.getpid()) == []
print(json.dumps([[outcome.status, outcome.output.decode(), outcome.exceeded] for outcome in outcomes]))
"""


def test_without_namespaces_sockets_are_refused_and_what_a_program_started_is_killed():
    detached = "os.setsid(); os.close(1); os.close(2); time.sleep(1000)"
    daemon = f"import os, time\nif os.fork() == 0:\n    {detached}\nprint('started')"
    ending = [daemon, "import socket; socket.socket()", "import ctypes; print(1)"]
    programs = [*((text, ENDS_BY_ITSELF_S) for text in ending), ("while True: pass", 1.5)]
    command = [sys.executable, "-c", WITHOUT_NAMESPACES, json.dumps(programs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    started, socket, foreign, endless = json.loads(done.stdout)
    assert started == [0, "started\n", ""]
    assert socket[0] == 1
    assert endless[2] == "wall clock"
    assert foreign == [0, "1\n", ""]
    assert_none_is_left()


JUDGED_WITHOUT_NAMESPACES = """
from april.workers.rewards import code, sandbox
from april.workers.rewards.messages import RewardRules
sandbox.NAMESPACES = ["false"]
[test] = code.read_label("assert add(1, 2) == 3")
for body in ("return a + b", "import os; os._exit(0)", "return 0"):
    print(not code.failure(f"def add(a, b):\\n    {body}", test, RewardRules(code_test_s=30.0)))
"""


def test_without_namespaces_a_program_that_ends_first_does_not_end_its_judge():
    """Its judge is a process beside it, and decides that it is wrong."""
    command = [sys.executable, "-c", JUDGED_WITHOUT_NAMESPACES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


def test_programs_of_a_killed_verifier_process_end_with_it(make_pool):
    pool = make_pool(timeout_s=1.5, code_test_s=1000.0, over_limit="failed")
    endless, after = verified(pool, ("code", program("while True: pass"), SUMS), ("exact", "a", "a"))
    assert "no answer within 1.5 s" in endless.error and after.reward == 1.0
    assert_none_is_left()


@pytest.mark.full
@pytest.mark.parametrize(
    "expression",
    ["9^{9^{9^{9^9}}}", full("(10^{10^{10}})!"), full("\\left(" * 3000)],
    ids=["a tower", "a factorial", "brackets"],
)
def test_a_pathological_expression_is_an_error_or_wrong_and_stalls_nobody(make_pool, expression):
    pool = make_pool(timeout_s=4.0, memory_mb=1024, verifiers=("math",))
    pathological, after = verified(pool, ("math", f"\\boxed{{{expression}}}", "12"), ("math", "\\boxed{12}", "12"))
    assert pathological.error or pathological.reward == 0.0
    assert after.reward == 1.0


# --- a reward model behind HTTP -----------------------------------------------------------------------------


class RewardModel(ThreadingHTTPServer):
    """A reward model that scores by length; it fails as configured."""

    def __init__(self):
        self.batches, self.faults, self.asked = [], [], []
        """Sizes of the requested batches, statuses with which to answer first, and (path, key) of each request."""
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/score"


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.batches.append(len(items))
        self.server.asked.append((self.path, self.headers["Authorization"]))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, int):
            return self.send_error(fault)
        if fault == "hang":
            time.sleep(30)
        scores = [self.score(item) for item in items]
        body = b"nonsense" if fault == "nonsense" else json.dumps(scores[1:] if fault == "short" else scores).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    @staticmethod
    def score(item):
        if item["response"] == "bad":
            return {"error": "cannot judge this"}
        if item["response"] == "nan":
            return None
        return {"score": len(item["prompt"] + item["response"]), "helpful": 0.5}

    def log_message(self, *_):
        pass


@pytest.fixture
def reward_model():
    server = RewardModel()
    yield server
    server.shutdown()
    server.server_close()


def test_a_reward_model_scores_in_batches_with_details(make_pool, reward_model):
    pool = make_pool(url=reward_model.url)
    reward_model.faults = [503]
    for key in range(64):
        pool.submit(key, "remote", "x" * key, "", "stop", prompt="pp")
    scores = collect(pool, 64)
    wanted = {"helpful": 0.5, "over_limit": 0.0}
    assert all(scores[key].reward == key + 2 and scores[key].details == wanted for key in range(64))
    assert max(reward_model.batches) > 8 and len(reward_model.batches) < 40


def test_a_temporary_refusal_is_retried(make_pool, reward_model):
    reward_model.faults = [503, 429]
    [score] = verified(make_pool(url=reward_model.url), ("remote", "abc", ""))
    assert score.reward == 3 and len(reward_model.batches) == 3


def test_a_permanent_refusal_is_an_error_at_once(make_pool, reward_model):
    pool = make_pool(url=reward_model.url)
    refusals = {400: "status 400", 404: "404", "nonsense": "JSON", "short": "list of 1 scores"}
    for number, (fault, reason) in enumerate(refusals.items(), 1):
        reward_model.faults = [fault]
        [score] = verified(pool, ("remote", "abc", ""))
        assert score.reward is None and reason in score.error
        assert len(reward_model.batches) == number


def test_a_reward_model_that_hangs_or_is_away_is_an_error(make_pool, reward_model):
    reward_model.faults = ["hang"]
    hanging = make_pool(url=reward_model.url, timeout_s=1.0)
    hung, judged = verified(hanging, ("remote", "abc", ""), ("exact", "a", "a"))
    assert hung.reward is None and judged.reward == 1.0
    [away] = verified(make_pool(url="http://127.0.0.1:9/"), ("remote", "abc", ""))
    assert away.reward is None and "gave no answer in 4 tries" in away.error


def test_a_reward_model_s_secrets_come_from_the_environment(make_pool, reward_model, monkeypatch):
    monkeypatch.setenv("RM_KEY", "s3cr3t&+")
    rules = {"url": f"{reward_model.url}?key=${{RM_KEY}}", "url_key_variable": "RM_KEY"}
    [score] = verified(make_pool(**rules), ("remote", "abc", ""))
    assert score.reward == 3 and reward_model.asked == [("/score?key=s3cr3t%26%2B", "Bearer s3cr3t&+")]
    reward_model.faults = [404]
    errors = verified(make_pool(**rules), ("remote", "abc", ""))
    for wrong in ("s3cr3t\nX-Other: 1", "s3cr3t \u2026", ""):
        monkeypatch.setenv("RM_KEY", wrong)
        errors += verified(make_pool(**rules), ("remote", "abc", ""))
    assert "status 404" in errors[0].error and all("RM_KEY" in error.error for error in errors)
    assert "s3cr3t" not in "".join(error.error for error in errors)


def test_an_item_that_the_reward_model_cannot_score_affects_no_other(make_pool, reward_model):
    bad, nan, good = verified(
        make_pool(url=reward_model.url), *[("remote", text, "") for text in ("bad", "nan", "abc")]
    )
    assert "cannot judge this" in bad.error and bad.reward is None
    assert "no finite score" in nan.error and nan.reward is None
    assert good.reward == 3
