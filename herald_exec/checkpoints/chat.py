"""Chat templates as checkpoints carry them: jinja2 in a sandbox, with the few names that such templates rely on."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from herald_pipeline.errors import ConfigError

Message = Mapping[str, str]
"""One turn: ``role`` (system, user, assistant) and ``content``."""


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's part for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse to the body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


Renderer = Callable[[Sequence[Message], Mapping[str, Any], bool], str]
"""Called as ``render(messages, special tokens' texts, whether to begin the assistant's turn)``."""


def compile_template(source: str, where: str) -> Renderer:
    """Renderer of a template.

    Raises
    ------
    ConfigError
        The template cannot be parsed; when rendering, the template refuses the messages (its own words are shown).
    """
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        message = f"{where}: the chat template is no valid jinja2 (line {error.lineno}: {error.message})"
        raise ConfigError(message) from None

    def render(messages: Sequence[Message], special_tokens: Mapping[str, Any], begin_answer: bool) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=begin_answer, **special_tokens)
        except jinja2.TemplateError as error:
            message = f"{where}: the chat template refuses the messages: {error.message}"
            raise ConfigError(message) from None

    return render
