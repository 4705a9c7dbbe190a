"""The quickstart policy's model and tokeniser."""

from april.launch.sft.warm_start import Recipe
from april.learner.policy.arithmetic import VOCABULARY, build_model, build_tokenizer


def test_the_quickstart_policy_has_half_a_million_parameters():
    recipe = Recipe()
    assert build_model(recipe.hidden_size, recipe.layers, 0).num_parameters() == 526_272


def test_every_character_is_one_token_and_comes_back():
    tokenizer = build_tokenizer()
    text = "".join(character for character in VOCABULARY if len(character) == 1)
    assert tokenizer.encode(text) == list(range(2, 71))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_keeps_the_stride_of_eight_tokens():
    message = [{"role": "user", "content": "05*3+60="}]
    ids = build_tokenizer().apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 8
