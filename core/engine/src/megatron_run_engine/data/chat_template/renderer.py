"""Renders a chat template in a process of its own, which has limits of time and memory.

Jinja's sandbox keeps a template from files and from Python, and bounds neither: twenty characters ask for a text of ten
gigabytes, three loops for centuries. The process is this file, run by itself: it imports Jinja and nothing of ours.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Around what ``{% generation %}`` marks while a template renders: code points that no text may hold (Unicode 23.7).
BEGIN, END = "\ufdd0", "\ufdd1"
#: Seconds of processor time for one rendering, which takes milliseconds, and bytes of memory.
_SECONDS, _MEMORY = 5, 2 << 30


class Refused(Exception):
    """The template's complaint about its messages, or what fails as it renders them."""


class Broken(Exception):
    """It is no template, or it takes more than it may."""


class Renderer:
    """The template ``source``, in its process until this object is gone; ``seconds`` limit a rendering.

    ``date``, in the form of ISO 8601, is what the template reads as today; None is the moment of a rendering.
    Raises :class:`Broken`.
    """

    def __init__(self, source: str, seconds: int = _SECONDS, date: str | None = None) -> None:
        words = (sys.executable, "-P", __file__, str(seconds))
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        weakref.finalize(self, _end, self._process)
        #: The words that the template compares with a message's role.
        self.roles: frozenset[str] = frozenset(self._ask({"source": source, "date": date})["roles"])

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for ``variables``, which JSON can hold. Raises :class:`Refused` and :class:`Broken`."""
        text: str = self._ask(variables)["text"]
        return text

    def _ask(self, what: object) -> dict[str, Any]:
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None
        assert pipes[1] is not None
        try:
            pipes[0].write(json.dumps(what).encode() + b"\n")
            pipes[0].flush()
            answer: dict[str, Any] = json.loads(pipes[1].readline())
        except (BrokenPipeError, ValueError):  # it is gone
            raise Broken(_why(self._process.wait())) from None
        for kind, error in (("refused", Refused), ("broken", Broken)):
            if kind in answer:
                raise error(answer[kind])
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _why(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "it renders for seconds, and a conversation takes milliseconds"
    return f"the process that renders it ended with {code}"


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks what a model says."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the body, between marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def compiled(source: str, date: str | None = None) -> jinja2.Template:
    """The template ``source`` in Jinja's immutable sandbox, for which ``date`` is today. Raises :class:`Broken`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=partial(_now, date))
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as cause:
        raise Broken(f"line {cause.lineno}: {cause.message}") from cause
    except (SyntaxError, RecursionError) as cause:  # Python's, of what Jinja makes of it
        raise Broken("it is nested too deeply") from cause


def roles_of(tree: nodes.Template) -> set[str]:
    """The words of the template ``tree`` that it compares with a message's role, or that it looks up by one.

    A role is ``role`` of anything, as ``message.role`` and ``message['role']``, and a variable that is set to one. Any
    other word of a template, of which ``'role'`` is one, says nothing of roles.
    """
    assigned = list(tree.find_all(nodes.Assign))
    sets = [(each.target.name, each.node) for each in assigned if isinstance(each.target, nodes.Name)]
    names, known = {"role"}, 0
    while known < len(names):
        known = len(names)
        names |= {name for name, value in sets if _is_role(value, names)}
    found: set[str] = set()
    for node in tree.find_all((nodes.Compare, nodes.Test, nodes.Call, nodes.Filter, nodes.Getitem)):
        for each in _compared(node, names):
            named = [value for name, value in sets if isinstance(each, nodes.Name) and name == each.name]
            found.update(text for one in (each, *named) for text in _words_in(one))
    return found


def _is_role(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether ``node`` is a message's role, for the variables ``names``, or what a filter or method makes of it."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "role" or _is_role(node.node, names)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    if isinstance(node, nodes.CondExpr):
        return _is_role(node.expr1, names) or _is_role(node.expr2, names)
    if isinstance(node, nodes.Call):
        of_role = bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "role"
        return of_role or _is_role(node.node, names)  # message.get('role'), message.role.lower()
    return isinstance(node, nodes.Filter) and _is_role(node.node, names)


def _compared(node: nodes.Node, names: set[str]) -> list[nodes.Expr]:
    """The other sides of ``node`` where one side of it is a role; none where it compares none."""
    if isinstance(node, nodes.Compare):
        sides = [node.expr, *(each.expr for each in node.ops)]
    elif isinstance(node, nodes.Getitem):
        sides = [node.node, node.arg]  # {'user': ...}[message.role]
        return sides[:1] if _is_role(node.arg, names) else []
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        sides = [node.node.node, *node.args[:1]]  # {...}.get(message.role), message.role.startswith('tool')
    elif isinstance(node, nodes.Test):
        sides = [node.node, *node.args]  # message.role is eq 'user'
    elif isinstance(node, nodes.Filter) and node.name in ("selectattr", "rejectattr"):
        chosen = isinstance(next(iter(node.args), None), nodes.Const) and node.args[0].as_const() == "role"
        return node.args[2:] if chosen else []  # messages | selectattr('role', 'equalto', 'user')
    else:
        return []
    others = [each for each in sides if not _is_role(each, names)]
    return others if len(others) < len(sides) else []


def _words_in(node: nodes.Node) -> list[str]:
    """The texts that ``node`` is, lists, or has for keys."""
    if isinstance(node, nodes.Dict):
        return [text for pair in node.items for text in _words_in(pair.key)]
    if isinstance(node, nodes.List | nodes.Tuple):
        return [text for each in node.items for text in _words_in(each)]
    return [node.value] if isinstance(node, nodes.Const) and isinstance(node.value, str) else []


def rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of ``template``. Raises :class:`Refused`."""
    try:
        return template.render(**variables)
    except RecursionError as cause:
        raise Refused("a macro calls itself without end") from cause
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as cause:
        raise Refused(" ".join(str(cause).split())) from cause


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(date: str | None, form: str) -> str:
    moment = datetime.now() if date is None else datetime.fromisoformat(date)
    return moment.astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # the names and order that templates use
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as json.dumps writes it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def serve(seconds: int) -> None:
    """Answer each line of standard input: first a template and its date, then what it is rendered with."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = None
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        answer: dict[str, Any] = {"text": ""}
        try:
            if template is None:
                asked = json.loads(line)
                template = compiled(**asked)
                answer["roles"] = sorted(roles_of(template.environment.parse(asked["source"])))
            else:
                answer["text"] = rendered(template, json.loads(line))
        except Refused as cause:
            answer = {"refused": str(cause)}
        except Broken as cause:
            answer = {"broken": str(cause)}
        except MemoryError:
            answer = {"broken": f"it takes more than {_MEMORY >> 30} GiB"}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
