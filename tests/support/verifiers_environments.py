"""Two environments of the package `verifiers` for the quickstart's policy, written without any code of April."""

import verifiers as vf
from datasets import Dataset


def load_environment(turns=1, rows=8, fails=False):
    """Environment in which the policy guesses a digit: in a single turn, or in `turns` turns with an answer to each."""
    questions = [{"question": f"0{n}*3+60=", "answer": str(n % 2), "info": {"n": n}} for n in range(rows)]

    def last_is_right(completion, answer) -> float:
        if fails:
            raise LookupError("the rubric has lost its notes")
        return float(completion[-1]["content"].endswith(answer)) if completion else 0.0

    rubric, dataset = vf.Rubric(funcs=[last_is_right]), Dataset.from_list(questions)
    rows = {"dataset": dataset, "eval_dataset": dataset.select(range(2))}
    return vf.SingleTurnEnv(rubric=rubric, **rows) if turns == 1 else Guesses(rubric=rubric, max_turns=turns, **rows)


class Guesses(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"+{state['info']['n']}="}]
