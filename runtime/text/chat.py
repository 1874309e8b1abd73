"""The chat template of a shard set: messages to the text that the model was trained to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...shardplan.errors import CheckpointError, MgtpError, UsageError
from .files import one_line, read_json_object, read_text, token_text

if TYPE_CHECKING:
    import jinja2

    from .sandbox import ChatEnvironment

_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of a checkpoint by name, and the special tokens they may use.

    A rendered text holds its special tokens already: encode it with `add_special_tokens=False`.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], label: str = "the checkpoint"):
        self._templates = templates
        self._special_tokens = special_tokens
        self._label = label
        self._compiled: dict[str, tuple[ChatEnvironment, jinja2.Template]] = {}

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The templates of a folder, from the first of chat_template.jinja, chat_template.json, tokenizer_config.json.

        Raises CheckpointError for a file that cannot be read. A folder without a template can be loaded, not rendered.
        """
        tokenizer_config = read_json_object(folder / "tokenizer_config.json")
        templates = (
            _by_name(read_text(folder / "chat_template.jinja"))
            or _by_name(read_json_object(folder / "chat_template.json").get("chat_template"))
            or _by_name(tokenizer_config.get("chat_template"))
        )
        special_tokens = {
            key: text
            for key, value in tokenizer_config.items()
            if key.endswith("_token") and (text := token_text(value)) is not None
        }
        return cls(templates, special_tokens, str(folder))

    @property
    def available(self) -> bool:
        """Whether there is a template at all."""
        return bool(self._templates)

    def source(self, has_tools: bool = False) -> str:
        """The text of the template that `render` would use; raises as it does."""
        return self._templates[self._choose(has_tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation; `kwargs` are further variables, as a template may know them.

        Raises UsageError when the template does not accept the messages, CheckpointError when the template itself is
        wrong, MgtpError when it runs away.
        """
        if not messages:
            raise UsageError("the conversation has no message", "give at least one message")
        from .sandbox import LimitExceeded

        variables: dict[str, Any] = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": [_message(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        environment, template = self._compile(self._choose(tools is not None))
        try:
            return environment.render(template, variables)
        except LimitExceeded as error:
            raise MgtpError(f"the chat template was stopped: {error}", "check the template, or send less") from None
        except Exception as error:  # a template is code: any exception may come out of it
            raise UsageError(
                f"the chat template does not accept these messages: {one_line(error)}",
                "check the roles, their order and the fields of the messages against the template",
            ) from None

    def _choose(self, has_tools: bool) -> str:
        """The name of the template to use."""
        if not self._templates:
            raise UsageError(
                f"{self._label} has no chat template",
                "use a plain prompt, or add a chat_template.jinja and shard again",
            )
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._templates:
                return name
        raise CheckpointError(
            f"{self._label} has the chat templates {', '.join(sorted(self._templates))}, and none called default",
            "rename one of them to default",
        )

    def _compile(self, name: str) -> tuple[ChatEnvironment, jinja2.Template]:
        """The compiled template; compiling takes milliseconds, so it is done once."""
        if name not in self._compiled:
            import jinja2

            from .sandbox import ChatEnvironment

            environment = ChatEnvironment()
            try:
                self._compiled[name] = environment, environment.from_string(self._templates[name])
            except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
                line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                raise CheckpointError(
                    f"{self._label}: the chat template {name}{line} is not valid: {one_line(error)}",
                    "correct the template and shard again",
                ) from None
        return self._compiled[name]


def _by_name(value: Any) -> dict[str, str]:
    """A chat_template field by template name: it may be one text, a list of {name, template}, or an object."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {entry["name"]: entry.get("template") for entry in value if isinstance(entry, dict) and "name" in entry}
    if not isinstance(value, dict):
        return {}
    return {str(name): text for name, text in value.items() if isinstance(text, str)}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it.

    Fields that are null are left out: clients send `"content": null` or `"tool_calls": null`, and templates ask
    whether a field is there. A model's reasoning is offered under the names that templates in use read.
    """
    if not isinstance(message, Mapping):
        raise UsageError(f"a message is a {type(message).__name__}, not an object", "send role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in _REASONING if key in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields
