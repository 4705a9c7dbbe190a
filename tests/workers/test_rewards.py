"""The pool of verifier processes: whatever a verifier does affects only its own item."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from april.workers.rewards.messages import Item
from april.workers.rewards.verifiers import check_verifier
from tests.support.marks import full
from tests.support.reward_scores import PATIENCE_S, collect
from tests.support.run_processes import wait_until


@pytest.fixture(autouse=True)
def bad_verifiers(tmp_path, monkeypatch):
    """A user's module, importable here and in the verifier processes."""
    (tmp_path / "bad_verifiers.py").write_text(
        "import os, sys, time\n"
        "def loop(response, label, finish_reason):\n"
        "    while True: pass\n"
        "def crash(response, label, finish_reason): os._exit(3)\n"
        "def leave(response, label, finish_reason): sys.exit(0)\n"
        "def orphan(response, label, finish_reason):\n"
        "    if child := os.fork():\n"
        "        open(response, 'w').write(str(child)); os._exit(3)\n"
        "    time.sleep(1000)\n"
        "def segfault(response, label, finish_reason): os.kill(os.getpid(), 11)\n"
        "def fail(response, label, finish_reason): raise RuntimeError('no such unit')\n"
        "def infinite(response, label, finish_reason): return float('inf')\n"
        "def huge(response, label, finish_reason): return 1e300\n"
        "def nan(response, label, finish_reason): return float('nan')\n"
        "def text(response, label, finish_reason): return '1.0'\n"
        "def nothing(response, label, finish_reason): pass\n"
        "def boolean(response, label, finish_reason): return response == label\n"
        "def chatty(response, label, finish_reason):\n"
        "    print('x' * 100_000); return 0.5\n"
        "def size(response, label, finish_reason): return len(response)\n"
        "def memory(response, label, finish_reason):\n"
        "    if response == 'much': kept.append(bytearray(300 << 20)); bytearray(1 << 40)\n"
        "    return 1.0\n"
        "kept = []\n"
        "def strict_loop(response, label, finish_reason):\n"
        "    while True: pass\n"
        "strict_loop.wrong = -1.0\n"
        "def patient_loop(response, label, finish_reason):\n"
        "    while True: pass\n"
        "patient_loop.wrong = None\n"
        "def pid(response, label, finish_reason): return os.getpid()\n"
        "def wait_for_file(response, label, finish_reason):\n"
        "    while not os.path.exists(response): time.sleep(0.01)\n"
        "    return 1.0\n"
        "def modules(response, label, finish_reason): return float(response in sys.modules)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_known_verifiers_pass_the_check():
    check_verifier("final_answer")
    check_verifier("bad_verifiers:loop")


def test_every_item_comes_back_once_with_its_own_reward(make_pool):
    pool = make_pool(processes=2)
    for key in range(300):
        pool.submit(key, "final_answer", f"#{key % 7}", "3", "stop")
    assert pool.pending == 300
    scores = collect(pool, 300)
    assert all(scores[key].reward == float(key % 7 == 3) and scores[key].error is None for key in range(300))


def test_a_slow_item_holds_up_no_quick_one_while_another_process_is_free(make_pool, tmp_path):
    """Also after a warm-up, and however rarely the caller polls."""
    pool = make_pool(processes=2, timeout_s=30.0)
    for key in range(200):
        pool.submit(key, "exact", "a", "a", "stop")
    collect(pool, 200)
    gate = tmp_path / "gate"
    slow, quick = str(gate), str(tmp_path)
    pool.put(*(Item(key, "bad_verifiers:wait_for_file", quick if key else slow, "", "stop") for key in range(64)))
    assert len(collect(pool, 63, pending=1)) == 63
    gate.touch()
    assert collect(pool, 1).keys() == {0}


def test_a_process_that_cannot_be_replaced_is_an_error_and_no_endless_wait(make_pool, monkeypatch):
    pool = make_pool()

    def refuse():
        raise OSError("no process can be started")

    monkeypatch.setattr(pool, "start_process", refuse)
    pool.submit(0, "bad_verifiers:crash", "", "", "stop")
    with pytest.raises(OSError, match="no process"):
        collect(pool, 1)
    assert pool.pending == 1, "the item has been answered, or is lost"


def test_an_endless_verifier_is_killed_and_only_its_item_has_an_error(make_pool):
    pool = make_pool(timeout_s=1.0, over_limit="failed")
    pool.submit(0, "exact", "a", "a", "stop")
    pool.submit(1, "bad_verifiers:loop", "a", "a", "stop")
    pool.submit(2, "exact", "a", "a", "stop")
    pool.submit(3, "exact", "a", "b", "stop")
    looping = pool.processes[0].inner
    scores = collect(pool, 4)
    assert scores[1].reward is None
    assert "bad_verifiers:loop" in scores[1].error and "1 s" in scores[1].error
    assert (scores[0].reward, scores[2].reward, scores[3].reward) == (1.0, 1.0, 0.0)
    assert looping.returncode == -9


# --- what no verifier can decide ----------------------------------------------------------------------------


def test_a_response_beyond_the_time_limit_is_wrong_counted_and_affects_no_other(make_pool, caplog):
    pool = make_pool(timeout_s=1.0, overlong_buffer_tokens=2, max_response_tokens=4, overlong_penalty=0.5)
    names = ["bad_verifiers:loop", "exact", "bad_verifiers:strict_loop", "bad_verifiers:patient_loop", "exact"]
    for key, name in enumerate(names):
        pool.submit(key, name, "a", "a", "stop", tokens=4)
    scores = collect(pool, len(names))
    assert [scores[key].reward for key in range(len(names))] == [
        -0.5,  # wrong, 0, less the penalty of 0.5 that all of these responses get for their length
        0.5,  # right, 1
        -1.5,  # wrong, which this verifier's attribute sets to -1
        None,  # no reward: `wrong = None` makes it an error
        0.5,  # right, in the process that followed the killed ones
    ]
    assert scores[0].details == {"over_limit": 1.0, "base": 0.0, "overlong": -0.5}
    assert scores[1].details["over_limit"] == 0.0
    assert "no answer within 1 s" in scores[3].error
    assert pool.undecided == 2 and "beyond their verifier's limits" in caplog.text


def test_a_response_on_which_the_format_search_never_ends_lacks_the_format(make_pool):
    pool = make_pool(timeout_s=1.0, format_pattern="^(a|aa)+$", format_penalty=0.25)
    pool.submit(0, "exact", "a" * 60 + "b", "?", "stop")
    pool.submit(1, "exact", "aa", "aa", "stop")
    scores = collect(pool, 2)
    assert scores[0].details == {"over_limit": 1.0, "base": 0.0, "format": -0.25} and scores[1].reward == 1.0


@pytest.mark.full
@pytest.mark.parametrize(("over_limit", "reward"), [("wrong", 0.0), ("failed", None)])
def test_a_verifier_out_of_memory_is_replaced_and_waiting_items_are_not_charged(make_pool, over_limit, reward):
    pool = make_pool(memory_mb=512, over_limit=over_limit)
    for key, text in enumerate(["much", "little", "little", "much", "little"]):
        pool.submit(key, "bad_verifiers:memory", text, "", "stop")
    process = pool.processes[0].inner
    scores = collect(pool, 5)
    assert [scores[key].reward for key in range(5)] == [reward, 1.0, 1.0, reward, 1.0]
    assert process.returncode is not None
    if reward is None:
        assert "needs more than 512 MiB" in scores[0].error


@pytest.mark.full
@pytest.mark.parametrize(
    "answer",
    ["10^{10^{10}}", *map(full, ["2^{1000000007}", "9^{9^{9^{9^9}}}", "20000000!", "\\binom{1000000}{500000}"])],
)
def test_an_answer_too_expensive_to_compare_is_wrong(make_pool, answer):
    """A new process needs up to 0.4 s on busy cores, even for a cheap answer."""
    pool = make_pool(timeout_s=2.0, verifiers=("math",))
    pool.submit(0, "math", f"\\boxed{{{answer}}}", "12", "stop")
    pool.submit(1, "math", "\\boxed{12}", "12", "stop")
    scores = collect(pool, 2)
    assert scores[0].reward == 0.0 and scores[0].details["over_limit"] == 1.0 and scores[1].reward == 1.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("verifier", "reason"), [("crash", "exit code 3"), ("leave", "exit code 0"), ("segfault", "SIGSEGV")]
)
def test_a_process_that_dies_affects_only_its_item(make_pool, verifier, reason):
    pool = make_pool()
    names = ["exact", f"bad_verifiers:{verifier}", "exact", "exact", f"bad_verifiers:{verifier}", "exact"]
    for key, name in enumerate(names):
        pool.submit(key, name, "a", "a", "stop")
    scores = collect(pool, len(names))
    assert [scores[key].reward for key in range(len(names))] == [1.0, None, 1.0, 1.0, None, 1.0]
    assert reason in scores[1].error and reason in scores[4].error


def test_a_process_that_dies_and_leaves_a_child_is_an_error_and_the_child_is_killed(make_pool, tmp_path):
    pool = make_pool(timeout_s=PATIENCE_S, over_limit="wrong")
    pool.submit(0, "bad_verifiers:orphan", str(tmp_path / "child"), "", "stop")
    score = collect(pool, 1)[0]
    assert score.reward is None and "exit code 3" in score.error
    child = Path("/proc", (tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child))


NO_NUMBERS = {
    "bad_verifiers:fail": "RuntimeError: no such unit",
    "bad_verifiers:infinite": "not finite",
    "bad_verifiers:nan": "not finite",
    "bad_verifiers:huge": "larger than 1e+09",
    "bad_verifiers:text": "not a number",
    "bad_verifiers:nothing": "not a number",
    "unheard_of": "unheard_of",
}


def test_a_result_that_is_not_a_finite_number_is_an_error(make_pool):
    pool = make_pool()
    for key, verifier in enumerate([*NO_NUMBERS, "exact"]):
        pool.submit(key, verifier, "a", "a", "stop")
    scores = collect(pool, len(NO_NUMBERS) + 1)
    for key, reason in enumerate(NO_NUMBERS.values()):
        assert scores[key].reward is None and reason in scores[key].error
    assert scores[len(NO_NUMBERS)].reward == 1.0


def test_a_verifier_that_prints_does_not_disturb_the_scores_and_a_boolean_is_one(make_pool):
    pool = make_pool()
    pool.submit(0, "bad_verifiers:chatty", "a", "a", "stop")
    pool.submit(1, "bad_verifiers:boolean", "a", "a", "stop")
    scores = collect(pool, 2)
    assert (scores[0].reward, scores[1].reward) == (0.5, 1.0)


def test_responses_larger_than_a_pipe_arrive_whole(make_pool):
    pool = make_pool()
    for key in range(10):
        pool.submit(key, "bad_verifiers:size", "ü" * 1_000_000, "", "stop")
    assert all(score.reward == 1_000_000 for score in collect(pool, 10).values())


def test_items_still_being_written_to_a_hanging_process_are_sent_to_the_next(make_pool):
    pool = make_pool(timeout_s=1.0, over_limit="failed")
    pool.submit(0, "bad_verifiers:loop", "", "", "stop")
    for key in range(1, 6):
        pool.submit(key, "bad_verifiers:size", "x" * 200_000, "", "stop")
    scores = collect(pool, 6)
    assert scores[0].reward is None
    assert all(scores[key].reward == 200_000 for key in range(1, 6))


def test_a_process_killed_while_idle_is_replaced_before_the_next_item(make_pool):
    pool = make_pool()
    pool.submit(0, "bad_verifiers:pid", "", "", "stop")
    os.kill(int(collect(pool, 1)[0].reward), 9)
    pool.processes[0].inner.wait()
    pool.submit(1, "exact", "a", "a", "stop")
    assert collect(pool, 1)[1].reward == 1.0


def test_verifier_processes_load_neither_torch_nor_transformers(make_pool):
    pool = make_pool()
    for key, module in enumerate(["torch", "transformers", "pydantic", "msgspec"]):
        pool.submit(key, "bad_verifiers:modules", module, "", "stop")
    scores = collect(pool, 4)
    assert [scores[key].reward for key in range(4)] == [0.0, 0.0, 0.0, 1.0]


def test_close_ends_every_process(make_pool):
    pool = make_pool(processes=3)
    pool.submit(0, "bad_verifiers:loop", "a", "a", "stop")
    pool.close()
    assert all(process.inner.returncode is not None for process in pool.processes)


@pytest.mark.full
@pytest.mark.parametrize("verifier", [full("exact"), "bad_verifiers:loop"])
def test_verifier_processes_do_not_outlive_a_killed_parent(verifier):
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import april.workers.rewards.pool as p, time\n"
            "from april.workers.rewards.messages import RewardRules\n"
            "p.ORPHAN_MARGIN_S = 0.5\n"
            "pool = p.RewardPool(1, RewardRules(0.5))\n"
            f"pool.submit(0, {verifier!r}, 'a', 'a', 'stop')\n"
            "while not pool.processes[0].ready: time.sleep(0.01)\n"
            "print(pool.processes[0].inner.pid, flush=True)\n"
            "time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    verifier_process = Path(f"/proc/{int(parent.stdout.readline())}")
    parent.kill()
    parent.wait()
    deadline_s = time.monotonic() + PATIENCE_S
    while is_running(verifier_process):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_running(process: Path) -> bool:
    """Whether a process has not ended; a zombie that is not reaped yet counts as ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
