"""Docstrings are written with a little reStructuredText; the site renders Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: ``:class:`~package.Name``` -> ```Name```.
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?(?:[\w.]*\.(?=\w+`))?([\w.]+)`")
#: ``like this::`` before an indented block, which is code to Markdown too.
_LITERAL = re.compile(r"(?<=\S)::$", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """``docstring`` with roles as plain code, and one colon before a block of code."""
    return _LITERAL.sub(":", _ROLE.sub(r"`\1`", docstring))


class Docstrings(griffe.Extension):
    """Called by griffe for each object that it reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj``, where it has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstring of ``pkg``, which is not there yet when griffe calls :meth:`on_object` for it."""
        self.on_object(obj=pkg)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show the fields of a named tuple, which has no method that griffe could take them from."""
        if cls.docstring is not None and any(str(base) == "NamedTuple" for base in cls.bases):
            fields = "\n".join(f"{name}: {field.annotation}" for name, field in cls.attributes.items())
            cls.docstring.value += f"\n\n```python\n{fields}\n```"
