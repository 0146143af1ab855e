"""Chat: the model's own Jinja template, and the loop that reads, answers and remembers.

Job: turn messages into the exact text that the model was trained on, as Hugging Face renders it (the same sandbox,
whitespace settings, filters and functions), and run a dialogue over two callables, one that reads a line and one that
answers. Choice: no built-in templates; a model without one is told so, since a wrong template is a silent quality
loss. What it does not do: start the engine, print tokens (`run` does).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mkdeploy.errors import MkdeployError
from mkdeploy.gguf_io import GgufHeader

Message = Mapping[str, Any]

HELP = """\
/help   this text
/clear  forget the conversation (the system message stays)
/exit   leave; so do Ctrl-D, and Ctrl-C at the prompt
Ctrl-C while the model answers stops the answer."""

FULL = "the context is full: /clear starts anew, -c makes it larger"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own protocol

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: tokenizer.chat_template of the model; None or empty: it has none.
        bos, eos: the text of the special tokens, "" if the model has none.

    Raises:
        MkdeployError: no template, or one that does not compile.
    """

    def __init__(self, source: str | None, *, bos: str = "", eos: str = "") -> None:
        if not source or not source.strip():
            raise MkdeployError(
                "the model has no chat template (tokenizer.chat_template is missing from its metadata): use it without"
                " --chat, or convert it from a source that carries its template"
            )
        self.bos, self.eos = bos, eos
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise MkdeployError(f"the model's chat template cannot be read: {error}") from None

    @classmethod
    def of_header(cls, header: GgufHeader) -> "ChatTemplate":
        """The template in a GGUF's metadata."""

        def special(name: str) -> str:
            key = f"tokenizer.ggml.{name}_token_id"
            tokens = header.by_key.get("tokenizer.ggml.tokens")
            if key not in header.by_key or tokens is None:
                return ""
            i, values = header.get_int(key), tokens.value()
            return str(values[i]) if i < len(values) else ""

        source = header.get_str("tokenizer.chat_template", "")
        return cls(source, bos=special("bos"), eos=special("eos"))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Messages to text.

        Args:
            messages: {"role": …, "content": …} each.
            add_generation_prompt: end with what opens the assistant's turn.

        Raises:
            MkdeployError: the template refuses these messages (many know no system role, or want strict turns).
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
                tools=None,
                documents=None,
            )
        except jinja2.TemplateError as error:
            raise MkdeployError(f"the model's chat template refuses the conversation: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise MkdeployError(f"the model's chat template failed: {type(error).__name__}: {error}") from None

    def add_special(self, text: str) -> bool:
        """Whether the tokenizer should add its BOS: not if the template has already written it."""
        return not (self.bos and text.startswith(self.bos))


@dataclass(frozen=True)
class Reply:
    """What one turn gave. A reply that was interrupted stays in the conversation as far as it came."""

    text: str
    context_full: bool = False


def chat_loop(
    read_line: Callable[[], str | None],
    answer: Callable[[Sequence[Message]], Reply],
    say: Callable[[str], None],
    *,
    system: str | None = None,
    first: str | None = None,
) -> list[Message]:
    """Runs a dialogue until the reader ends.

    Args:
        read_line: the next thing the user typed; None at the end (Ctrl-D, Ctrl-C at the prompt, end of a pipe).
        answer: produces (and shows) the reply to a conversation that ends with the user's turn.
        say: shows a line that is not part of the dialogue.
        system: the system message, if any.
        first: the user's first turn, if it is known already.

    Returns:
        The conversation.
    """
    head: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(head)
    full = False
    line = first
    while line is not None or (line := read_line()) is not None:
        text, line = line.strip(), None
        if not text:
            continue
        if text == "/exit":
            break
        if text == "/help":
            say(HELP)
        elif text == "/clear":
            messages, full = list(head), False
            say("the conversation is forgotten")
        elif text.startswith("/") and text[1:].isalpha():
            say(f"'{text}' is not a command; /help lists them")
        elif full:
            say(FULL)
        else:
            reply = answer([*messages, {"role": "user", "content": text}])
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply.text}]
            full = reply.context_full
            if full:
                say(FULL)
    return messages
