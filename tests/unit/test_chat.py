"""chat.py: templates render as Hugging Face renders them; the dialogue keeps what was said."""

import json
from collections.abc import Sequence

import pytest

from mkdeploy.chat import ChatTemplate, Message, Reply, chat_loop
from mkdeploy.errors import MkdeployError

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' -}}\n"
    "{% endif %}\n"
)
HELLO: list[Message] = [{"role": "user", "content": "Hi"}]


def test_block_whitespace_is_trimmed_as_hugging_face_does() -> None:
    text = ChatTemplate(CHATML).render([{"role": "system", "content": "Be brief."}, *HELLO])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_generation_prompt_can_be_left_out() -> None:
    assert ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_special_tokens_and_loop_controls_are_known() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source + "{{ eos_token }}", bos="<s>", eos="</s>")
    text = template.render([*HELLO, {"role": "user", "content": "again"}])
    assert text == "<s>Hi</s>"
    assert not template.add_special(text)
    assert template.add_special("Hi")


def test_tojson_keeps_html_and_unicode() -> None:
    text = ChatTemplate("{{ messages[0] | tojson(indent=2) }}").render([{"role": "user", "content": "<é>"}])
    assert text == json.dumps({"role": "user", "content": "<é>"}, indent=2, ensure_ascii=False)


def test_strftime_now_and_the_generation_tag_exist() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}").render(HELLO)
    assert text[:4].isdecimal() and text.endswith("x")


def test_a_refusal_of_the_template_is_one_error() -> None:
    template = ChatTemplate("{{ raise_exception('System role not supported') }}")
    with pytest.raises(MkdeployError, match="refuses the conversation: System role not supported"):
        template.render(HELLO)


@pytest.mark.parametrize("source", [None, "", "  "])
def test_a_model_without_template_is_told_so(source: str | None) -> None:
    with pytest.raises(MkdeployError, match=r"no chat template .* without --chat"):
        ChatTemplate(source)


def test_a_broken_template_is_one_error() -> None:
    with pytest.raises(MkdeployError, match="cannot be read"):
        ChatTemplate("{% if %}")


def test_templates_cannot_reach_python() -> None:
    with pytest.raises(MkdeployError, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(HELLO)


def test_template_errors_in_python_are_one_error() -> None:
    with pytest.raises(MkdeployError, match="template failed: TypeError"):
        ChatTemplate("{{ 'a' + 1 }}").render(HELLO)


class Dialogue:
    """Feeds lines to chat_loop and records what the model was shown."""

    def __init__(self, *lines: str, reply: Reply | None = None) -> None:
        self.lines = list(lines)
        self.reply = reply
        self.seen: list[list[Message]] = []
        self.said: list[str] = []

    def read(self) -> str | None:
        return self.lines.pop(0) if self.lines else None

    def answer(self, messages: Sequence[Message]) -> Reply:
        self.seen.append(list(messages))
        return self.reply or Reply(f"answer {len(self.seen)}")

    def run(self, **options: str | None) -> list[Message]:
        return chat_loop(self.read, self.answer, self.said.append, **options)


def test_a_chat_sends_everything_that_was_said() -> None:
    dialogue = Dialogue("one\n", "two\n")
    conversation = dialogue.run(system="Be kind.")
    assert [message["content"] for message in dialogue.seen[1]] == ["Be kind.", "one", "answer 1", "two"]
    assert [message["role"] for message in conversation] == ["system", "user", "assistant", "user", "assistant"]


def test_the_first_turn_may_be_given() -> None:
    dialogue = Dialogue("two")
    dialogue.run(first="one")
    assert dialogue.seen[0] == [{"role": "user", "content": "one"}]
    assert len(dialogue.seen) == 2


def test_clear_forgets_all_but_the_system_message() -> None:
    dialogue = Dialogue("one", "/clear", "two")
    dialogue.run(system="S")
    assert [message["content"] for message in dialogue.seen[1]] == ["S", "two"]


def test_exit_leaves_and_help_helps() -> None:
    dialogue = Dialogue("/help", "/exit", "never")
    assert dialogue.run() == []
    assert "/clear" in dialogue.said[0]
    assert dialogue.seen == []


def test_empty_lines_and_unknown_commands_are_no_turns() -> None:
    dialogue = Dialogue("", "   ", "/hepl", "/ 2 is a half?")
    dialogue.run()
    assert dialogue.said == ["'/hepl' is not a command; /help lists them"]
    assert len(dialogue.seen) == 1


def test_a_full_context_is_explained_and_nothing_more_is_sent_until_it_is_cleared() -> None:
    dialogue = Dialogue("one", "two", "/clear", "three", reply=Reply("cut", context_full=True))
    dialogue.run()
    full = "the context is full: /clear starts anew, -c makes it larger"
    assert dialogue.said == [full, full, "the conversation is forgotten", full]
    assert [messages[-1]["content"] for messages in dialogue.seen] == ["one", "three"]
