"""Teachers: their log-probabilities become token scores, and whatever else they say is an error, never a number."""

import json
import shutil

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from april.config import ConfigError
from april.data.tokenizer import Tokenizer
from april.launch.memory import read_shape, teacher_bytes
from april.learner.policy.arithmetic import build_tokenizer
from april.workers.rewards.messages import Score
from april.workers.rewards.remote import RemoteError
from april.workers.scoring import LeasedTask, Scoring, closing, token_values
from april.workers.teachers.check import check_teacher
from april.workers.teachers.folder import FolderTeacher
from april.workers.teachers.messages import TeacherAnswer, TeacherError, TeacherItem, TeacherRules
from april.workers.teachers.pool import Teachers, with_column
from april.workers.teachers.process import answer_of
from april.workers.teachers.servers import OpenaiTeacher, SglangTeacher, VllmTeacher
from tests.support.reward_scores import collect, grant_of, task_of
from tests.support.teacher_servers import serving, with_teacher

IDS = [1, 2, 3, 4, 5]
LOGPROBS = [-0.5, -1.0, -2.0, -4.0]
"""Of the ids from the second on."""


def rules(path="", url="", kind="sglang", top_k=0, vocabulary=9):
    return TeacherRules("big", kind, str(path), url, "", "", "cpu", 5.0, top_k, vocabulary)


def as_sglang(entries):
    return lambda path, body: {"meta_info": {"input_token_logprobs": entries}}


RIGHT = [[logprob, number, None] for logprob, number in zip([None, *LOGPROBS], IDS, strict=True)]
SERVERS = {
    "sglang": (SglangTeacher, {"meta_info": {"input_token_logprobs": RIGHT}}),
    "vllm": (
        VllmTeacher,
        {"choices": [{"prompt_logprobs": [None, *({str(n): {"logprob": p}} for p, n, _ in RIGHT[1:])]}]},
    ),
    "openai": (
        OpenaiTeacher,
        {"choices": [{"logprobs": {"token_logprobs": [None, *LOGPROBS], "tokens": list("abcde")}}]},
    ),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_s_log_probabilities_are_those_of_the_ids(kind):
    teacher, answer = SERVERS[kind]
    with serving(lambda path, body: answer) as url:
        assert teacher(rules(url=url))(np.array(IDS, np.int32)).tolist() == LOGPROBS


def test_sglang_calls_the_largest_id_of_its_vocabulary_0_and_no_other():
    ids = np.array([*IDS, 5], np.int32)
    entries = [*RIGHT[:-1], [-4.0, 0, "<pad>"], [-8.0, 0, "<pad>"]]
    with serving(as_sglang(entries)) as url:
        assert SglangTeacher(rules(url=url, vocabulary=6))(ids).tolist() == [*LOGPROBS, -8.0]
        with pytest.raises(TeacherError, match="token 0 where 5"):
            SglangTeacher(rules(url=url, vocabulary=7))(ids)
    entries[1] = [-0.5, 0, None]
    with serving(as_sglang(entries)) as url, pytest.raises(TeacherError, match="token 0 where 2"):
        SglangTeacher(rules(url=url, vocabulary=6))(ids)


FAULTS = {
    "too few": (RIGHT[:-1], "scored 4 tokens where 5"),
    "another sample": ([*RIGHT[:-1], [-4.0, 9, None]], "another text: token 9 where 5"),
    "not a number": ([*RIGHT[:-1], [None, 5, None]], "not finite"),
    "above 0": ([*RIGHT[:-1], [0.5, 5, None]], "above 0"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_answers_for_another_sample_or_with_no_numbers_gives_an_error(fault):
    entries, reason = FAULTS[fault]
    ids = np.array(IDS, "<i4")
    item = TeacherItem(1, ids[:2].tobytes(), [ids[2:].tobytes()])
    with serving(as_sglang(entries)) as url, pytest.raises(TeacherError, match=reason):
        answer_of(SglangTeacher(rules(url=url)), item, rules())
    with serving(lambda path, body: None) as url, pytest.raises(RemoteError, match="refuses with status 400"):
        answer_of(SglangTeacher(rules(url=url)), item, rules())
    with serving(as_sglang(RIGHT)) as url:
        (column,) = answer_of(SglangTeacher(rules(url=url)), item, rules()).columns
    assert np.frombuffer(column, np.float32).tolist() == LOGPROBS[1:]


TOPS = [[(7, -0.25), (8, -0.375)], [(6, -0.5), (3, -1.0)], [(0, -0.75), (1, -1.25)], [(6, -0.1), (1, -3.0)]]
"""The two most likely ids in the places of those from the second on."""
BY_ID = [{number: {"logprob": p} for number, p in top} for top in TOPS]
AS_TEXTS = [{f"token_id:{number}": p for number, p in [*reversed(top), (5, -4.0)]} for top in TOPS]
TOLD = {
    "sglang": {
        "meta_info": {
            "input_token_logprobs": RIGHT,
            "input_top_logprobs": [None, *([[p, number, None] for number, p in top] for top in TOPS)],
        }
    },
    "vllm": {"choices": [{"prompt_logprobs": [
        None, *({str(n): {"logprob": p}} | top for (p, n, _), top in zip(RIGHT[1:], BY_ID, strict=True)),
    ]}]},
    "openai": {"choices": [{"logprobs": {
        "token_logprobs": [None, *LOGPROBS], "tokens": [f"token_id:{n}" for n in IDS],
        "top_logprobs": [None, *AS_TEXTS],
    }}]},
}  # fmt: skip
"""What servers answer that are asked for these. vLLM and OpenAI's API add the token of the text, or leave it among
them."""


@pytest.mark.parametrize("kind", TOLD)
def test_a_server_is_asked_for_its_top_k_and_they_are_kept_bit_by_bit(kind):
    (teacher, _), asked = SERVERS[kind], []
    ids = np.array(IDS, "<i4")
    item = TeacherItem(1, ids[:2].tobytes(), [ids[2:].tobytes()])
    with serving(lambda path, body: asked.append(body) or TOLD[kind]) as url:
        given = rules(url=url, top_k=2)
        answer = answer_of(teacher(given), item, given)
    assert [asked[0].get(name) for name in ("top_logprobs_num", "prompt_logprobs", "logprobs")].count(2) == 1
    assert np.frombuffer(answer.columns[0], np.float32).tolist() == LOGPROBS[1:]
    assert np.array_equal(np.frombuffer(answer.tops[0], np.float32).reshape(3, 2, 2), np.array(TOPS[1:], np.float32))
    score = with_column(Score(1, 1.0), "big", answer)
    assert closing(score).columns == [{"big": 3, "big/top_k": 12}] and len(token_values(score)) == 4 * 15


def lying(last):
    meta = TOLD["sglang"]["meta_info"]
    return {"meta_info": meta | {"input_top_logprobs": [*meta["input_top_logprobs"][:-1], last]}}


LIES = {
    "not a number": (lying(last=[[None, 6, None], [-3.0, 1, None]]), "not finite, above 0"),
    "above 0": (lying(last=[[0.5, 6, None], [-3.0, 1, None]]), "not finite, above 0"),
    "fewer than k": (lying(last=[[-0.1, 6, None]]), "told the 1 most likely ids of a token where 2 were asked for"),
    "none": (lying(last=None), "told the 0 most likely ids of a token where 2"),
    "of another length": (
        {"meta_info": TOLD["sglang"]["meta_info"] | {"input_top_logprobs": [None]}},
        "told the most likely ids of 1 tokens where it scored 5",
    ),
    "outside of the vocabulary": (lying(last=[[-0.1, 9, None], [-3.0, 1, None]]), "none of the policy's 9"),
    "no id": (lying(last=[[-0.1, 6.5, None], [-3.0, 1, None]]), "none of the policy's 9"),
    "twice": (lying(last=[[-0.1, 6, None], [-3.0, 6, None]]), "an id twice"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_about_its_top_k_gives_an_error_and_the_response_goes_back(lie):
    told, reason = LIES[lie]
    ids = np.array(IDS, "<i4")
    item = TeacherItem(1, ids[:2].tobytes(), [ids[2:].tobytes()])
    with serving(lambda path, body: told) as url, pytest.raises(TeacherError, match=reason):
        answer_of(SglangTeacher(rules(url=url, top_k=2)), item, rules(top_k=2))
    failed = closing(with_column(Score(1, 1.0), "big", TeacherAnswer(1, error=reason)))
    assert failed.cause == "scoring_failed", "counted as a failed attempt, and scored again"


def test_tokens_that_a_server_tells_as_texts_are_no_ids():
    told = TOLD["openai"]["choices"][0]["logprobs"] | {"tokens": list("abcde")}
    why = "tells a token as 'a', where token_id:ID was asked for"
    with serving(lambda path, body: {"choices": [{"logprobs": told}]}) as url, pytest.raises(TeacherError, match=why):
        OpenaiTeacher(rules(url=url, top_k=2))(np.array(IDS, np.int32))


def test_a_folder_s_top_k_are_those_of_its_distributions_among_the_ids_of_the_policy(policy_folder):
    ids, given = np.array(IDS, np.int32), rules(policy_folder, top_k=3, vocabulary=20)
    teacher = FolderTeacher(given)
    with torch.no_grad():
        logprobs = teacher.model(torch.from_numpy(ids[None]).long()).logits[0, :-1].log_softmax(-1)
    top, numbers = logprobs[:, :20].topk(3)
    item = TeacherItem(1, ids[:1].tobytes(), [ids[1:].tobytes()])
    told = np.frombuffer(answer_of(teacher, item, given).tops[0], np.float32).reshape(4, 3, 2)
    assert np.array_equal(told[..., 0], numbers.numpy()) and np.allclose(told[..., 1], top.numpy(), atol=1e-5)


@pytest.mark.full
def test_a_response_is_scored_by_its_verifier_and_by_a_folder_s_model_together(config_file, policy_folder):
    config = with_teacher(config_file, path=policy_folder)
    scoring = Scoring(config, Tokenizer(policy_folder), start_now=False)
    prompt = scoring.tokenizer.encode_prompt("1+1=")
    response = scoring.tokenizer.encode_prompt("#2")
    task = replace(task_of("exact"), teacher="big")
    scoring.submit(LeasedTask(grant_of(1), task, [prompt, response]), "stop")
    scoring.submit(LeasedTask(grant_of(2), task_of("exact"), [prompt, response]), "stop")
    scores = collect(scoring, 2)
    scoring.close()
    model = FolderTeacher(rules(policy_folder)).model
    with torch.no_grad():
        logits = model(torch.from_numpy(np.concatenate([prompt, response])[None].astype(np.int64))).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.from_numpy(response)[:, None].long())[:, 0]
    np.testing.assert_allclose(np.frombuffer(token_values(scores[1]), np.float32), expected, atol=1e-5)
    assert closing(scores[1]).columns == [{"big": len(response)}] and not scores[2].token_scores


@pytest.mark.full
def test_the_forks_of_a_session_are_scored_from_the_first_sampled_token_on_and_a_said_reward_needs_no_verifier(
    config_file, policy_folder
):
    config = with_teacher(config_file, path=policy_folder)
    scoring, none = Scoring(config, Tokenizer(policy_folder), start_now=False), np.zeros(0, np.int32)
    forks = [scoring.tokenizer.encode_prompt(text) for text in ("1+1=#2", "1+1=#2+2=")]
    task, starts = replace(task_of("exact"), teacher="big"), [5, 6]
    for lease_id, rewarded in ((1, False), (2, True)):
        grant = replace(grant_of(lease_id), forks=starts, rewarded=rewarded)
        of_session = task if not rewarded else replace(task, reward="not:there")
        scoring.submit(LeasedTask(grant, of_session, [none, forks[1], *forks]), "stop")
    scores = collect(scoring, 2)
    scoring.close()
    teacher = FolderTeacher(rules(policy_folder))
    expected = np.concatenate([teacher(ids)[start - 1 :] for ids, start in zip(forks, starts, strict=True)])
    for score in scores.values():
        assert closing(score).columns == [{"big": len(ids) - start} for ids, start in zip(forks, starts, strict=True)]
        np.testing.assert_allclose(np.frombuffer(token_values(score), np.float32), expected, atol=1e-5)


@pytest.mark.full
def test_a_teacher_s_error_is_the_score_s_and_a_failed_verifier_does_not_wait_for_the_teacher(
    config_file, policy_folder
):
    score = Score(1, 1.0, None, {"right": 1.0})
    failed = with_column(score, "big", TeacherAnswer(1, error="teacher 'big': gone"))
    assert closing(failed).cause == "scoring_failed" and closing(failed).error == "teacher 'big': gone"
    teachers = Teachers(with_teacher(config_file, path=policy_folder / "missing"))
    ids = np.array(IDS, np.int32)
    teachers.submit(1, "big", ids, [ids])
    teachers.submit(2, "big", ids, [ids])
    assert teachers.joined([score]) == [] and teachers.pending == 1
    assert teachers.joined([Score(2, None, "it fell over")]) == [Score(2, None, "it fell over")]
    found = []
    while not found:
        found = teachers.joined([])
    teachers.close()
    assert found[0].reward is None and found[0].error.startswith("teacher 'big': ")


def test_a_teacher_with_other_tokens_is_refused_with_the_first_that_differs(config_file, policy_folder, tmp_path):
    inner = build_tokenizer()
    inner.add_tokens(["zebra"])
    inner.save_pretrained(tmp_path / "other")
    first = len(inner) - 1
    config = with_teacher(config_file, path=tmp_path / "other")
    why = rf"'teacher.big.path' = .* has token {first} as 'zebra', and the policy as None; take a teacher"
    with pytest.raises(ConfigError, match=why):
        check_teacher(config, "big", config.teacher["big"])
    config = with_teacher(config_file, path=policy_folder)
    check_teacher(config, "big", config.teacher["big"])


def test_a_teacher_that_the_learner_holds_is_counted_and_has_all_ids_of_the_policy(
    config_file, policy_folder, tmp_path
):
    shutil.copytree(policy_folder, tmp_path / "held")
    config = with_teacher(config_file, path=tmp_path / "held", where="learner")
    assert teacher_bytes(config) == 4 * read_shape(policy_folder).parameters
    assert teacher_bytes(with_teacher(config_file, path=policy_folder)) == 0
    shape = json.loads((policy_folder / "config.json").read_text())
    (tmp_path / "held" / "config.json").write_text(json.dumps(shape | {"vocab_size": 7}))
    with pytest.raises(ConfigError, match=r"'teacher\.big\.path' = .*7 ids"):
        check_teacher(config, "big", config.teacher["big"])


def test_a_server_that_lies_about_its_tokeniser_is_refused(config_file, policy_folder):
    inner = Tokenizer(policy_folder).inner

    def answer(path, body, shift=0):
        numbers = (0 if number == len(inner) - 1 else number for number in body["input_ids"])  # as SGLang names them
        entries = [[-1.0, number, inner.decode([number + shift])] for number in numbers]
        return {"meta_info": {"input_token_logprobs": entries}}

    def checked(url, **keys):
        config = with_teacher(config_file, kind="sglang", path=policy_folder, url=url, **keys)
        check_teacher(config, "big", config.teacher["big"])

    with serving(answer) as url:
        checked(url)
    with serving(lambda path, body: answer(path, body, 1)) as url, pytest.raises(ConfigError, match="and the policy"):
        checked(url)
    with serving(lambda path, body: {}) as url, pytest.raises(ConfigError, match="gives no log-probabilities"):
        checked(url)

    def telling(path, body):
        tops = [[[-1.0, number, None] for number in range(2)] for _ in body["input_ids"]]
        return {"meta_info": answer(path, body)["meta_info"] | {"input_top_logprobs": tops}}

    with serving(telling) as url:
        checked(url, top_k=2)
        with pytest.raises(ConfigError, match=r"the 2 most .*where 3 .*teacher\.big\.top_k"):
            checked(url, top_k=3)
        with pytest.raises(ConfigError, match=r"'teacher\.big\.top_k' = 200 .*policy"):
            checked(url, top_k=200)
