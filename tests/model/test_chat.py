"""Chat templates: what they put around a message, and what becomes of those that fail or do not end."""

import pytest

from fp8dash.errors import ModelError
from fp8dash.model.chat import frame_of

USUAL = (
    "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_frame_is_what_the_template_itself_writes(loaded):
    loaded.tokenizer.chat_template = USUAL
    turn = [{"role": "user", "content": "How many boats?"}]
    own = loaded.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert frame_of(loaded.tokenizer).around("How many boats?") == own


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('no such role') }}", "fails .TemplateError: no such role"),
        ("{% if %}", "fails .TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails .SecurityError"),
        ("{{ messages[0]['content'] | upper }}", "alters the message"),
        ("nothing", "alters the message"),
        (
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
            "does not terminate",
        ),
        ("{{ 'a' * 10 ** 11 }}", "fails .it asks for more memory"),
    ],
)
def test_a_template_that_fails_or_loops_is_a_sentence_with_a_way_on(loaded, template, sentence):
    loaded.tokenizer.chat_template = template
    with pytest.raises(ModelError, match=f"{sentence}.*--needle-chat off"):
        frame_of(loaded.tokenizer)
