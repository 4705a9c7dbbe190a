"""An example record in the schema of each published dataset, by the name of its mapping."""

RECORDS = {
    "dapo_math": {
        "data_source": "math_dapo",
        "prompt": [{"content": "What is 2+3? End with Answer: $Answer", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "5", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "00000000-0000-0000-0000-000000000000"},
    },
    "deepscaler": {"problem": "What is 2+3?", "answer": "5", "solution": "Add them."},
    "deepmath": {
        "question": "What is 2+3?", "final_answer": "5", "difficulty": 1.0, "topic": "Arithmetic",
        "r1_solution_1": "a", "r1_solution_2": "b", "r1_solution_3": "c",
    },
    "aime": {"ID": "2024-I-0", "Problem": "What is 2+3?", "Solution": "Add them.", "Answer": 5},
    "gsm8k": {"question": "What is 2+3?", "answer": "Add them: 2+3 = <<2+3=5>>5\n#### 5"},
}  # fmt: skip
