"""Tools of a request: which calls an answer may hold, and the constraint that says so.

A call is written as `<tool_call>`, a line break, `{"name": NAME, "arguments": OBJECT}`, a line
break, `</tool_call>`; between two calls is a line break. Chat templates of Qwen and Hermes use this
form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from forerun.constraints._after import After
from forerun.constraints.base import Constraint
from forerun.constraints.grammar import LARK, Grammar
from forerun.constraints.json_schema import OPTIONS, JsonSchema
from forerun.serving.errors import bad, unknown
from forerun.serving.schemas import ChatRequest, Function, NamedTool
from forerun.serving.structured.fields import Wanted, as_json, check_size, json_schema, made

BEGIN, END = "<tool_call>", "</tool_call>"
# chat templates write arguments in this form, so models learned it
FORM = {
    OPTIONS: {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """The functions of a request, and what an answer may do with them.

    callable: indices of those that it may call. must_call: whether it has to. is_parallel: whether
    it may call several.
    """

    functions: tuple[Function, ...]
    callable: tuple[int, ...]
    must_call: bool
    is_parallel: bool

    @classmethod
    def of(cls, request: ChatRequest) -> Tools | None:
        """The tools of a request; None if it has none or must not call them. Raises ApiError."""
        functions = tuple(tool.function for tool in request.tools or ())
        choice = request.tool_choice
        if not functions and choice not in (None, "auto", "none"):
            raise bad("tool_choice needs tools; list them", "tool_choice")
        _check_names(functions)
        if not functions or choice == "none":
            return None
        is_parallel = request.parallel_tool_calls is not False
        if isinstance(choice, NamedTool):
            return cls(functions, (_index(choice.function.name, functions),), True, False)
        return cls(functions, tuple(range(len(functions))), choice == "required", is_parallel)

    def parts(self) -> list[Wanted]:
        """The schema of each function alone, to find out which of them has a mistake."""
        found = []
        for i in self.callable:
            param, schema = f"tools.{i}.function.parameters", self._schema(i)
            found.append(Wanted(param, made(param, lambda schema=schema: json_schema(schema))))  # type: ignore[misc]
        return found

    def constraint(self, other: Constraint | None = None) -> Constraint:
        """Texts with calls of these functions; other: what a text without a call must be."""
        if self.must_call:
            return self._grammar("start: calls")
        if isinstance(other, JsonSchema):
            document = as_json(other.schema)
            return self._grammar(f"start: calls | document\ndocument: %json {document}")
        return After(BEGIN, self._grammar("start: rest"), is_optional=True)

    def _grammar(self, start: str) -> Grammar:
        """A grammar with the rules `calls`, and `rest`: calls without the first BEGIN."""
        begin, close = json.dumps(BEGIN), json.dumps(f"}}\n{END}")
        more = f"({json.dumps(chr(10) + BEGIN)} call)*" if self.is_parallel else ""
        rules = [start, f"calls: {begin} rest", f"rest: call {more}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in self.callable))
        for i in self.callable:
            head = json.dumps(f'\n{{"name": "{self.functions[i].name}", "arguments": ')
            rules.append(f"call_{i}: {head} arguments_{i} {close}")
            rules.append(f"arguments_{i}: %json {as_json(self._schema(i) | FORM)}")
        text = "\n".join(rules)
        made("tools", lambda: check_size(text, "the schemas of all functions together"))
        return Grammar(text, notation=LARK)

    def _schema(self, i: int) -> dict[str, Any]:
        """The schema of the arguments of a function. Raises ApiError if they are no object."""
        given = self.functions[i].parameters
        if given is None:
            given = NO_ARGUMENTS
        if (kind := given.get("type", "object")) != "object":
            param = f"tools.{i}.function.parameters"
            raise bad(f"{param}: arguments must be of type object, got {kind!r:.40}", param)
        return {"type": "object"} | given


def _index(name: str, functions: tuple[Function, ...]) -> int:
    names = [one.name for one in functions]
    if name not in names:
        raise unknown("function", name, names, param="tool_choice.function.name")
    return names.index(name)


def _check_names(functions: tuple[Function, ...]) -> None:
    seen: set[str] = set()
    for i, one in enumerate(functions):
        if one.name in seen:
            raise bad(f"the function {one.name!r} is listed twice", f"tools.{i}.function.name")
        seen.add(one.name)
