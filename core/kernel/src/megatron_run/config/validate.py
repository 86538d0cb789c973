"""From leaves to a typed, frozen model; errors name the violated bound and the origin of the value."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from types import NoneType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_run.config.fields import fields_of, submodel, walk
from megatron_run.config.origin import DEFAULT, Key, Origin, Text, Value, dotted
from megatron_run.config.values import members, plain, read_text, whole
from megatron_run.config.yaml import bare, parse
from megatron_run.contracts.option_groups import AT_KEY
from megatron_run.contracts.schema import Section
from megatron_run.errors import Findings, InputError, RunError
from megatron_run.errors.wording import did_you_mean, similar_word

AnyModel = TypeVar("AnyModel", bound=BaseModel)

#: pydantic's kind of error -> what the value must be; filled with the error's context.
_MUST = {
    "int_parsing": "it must be a whole number",
    "float_parsing": "it must be a number",
    "bool_parsing": "it must be true or false",
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be at most {le}",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "path_type": "it must be a path",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
    "tuple_type": "it must be a list",
    "list_type": "it must be a list",
    "missing": "it has too few values",
    "too_long": "it has {actual_length} values, it must have at most {max_length}",
    "too_short": "it has {actual_length} values, it must have at least {min_length}",
    "dict_type": "it must be a mapping",
    "model_type": "it must be a mapping of keys",
    "value_error": "{error}",
    AT_KEY: "{why}",
}


#: pydantic's kinds of error that another key may mend: one not set yet, a rule, a value wrong beside another's.
_MENDED_ELSEWHERE = ("missing", "rule", "beside")


def validate_section(
    model: type[AnyModel], name: str, values: Mapping[Key, Value], findings: Findings, *, partial: bool = False
) -> AnyModel | None:
    """The section ``name`` of a whole configuration's ``values``; no name: the keys above the sections.

    With ``partial`` more values may come, so only what is wrong with each value by itself is found.
    """
    prefix = (name,) if name else ()
    inside = {key[len(prefix) :]: value for key, value in values.items() if (key[0] == name if name else len(key) == 1)}
    why = "a configuration must say it"
    return validate(model, prefix, inside, findings, fix_missing=why, later=_MENDED_ELSEWHERE if partial else ())


def validate(
    model: type[AnyModel],
    prefix: Key,
    values: Mapping[Key, Value],
    findings: Findings,
    *,
    fix_missing: str = "",
    later: Container[str] = (),
) -> AnyModel | None:
    """The model made of ``values`` (keys without ``prefix``), or None when something is wrong.

    Every problem enters ``findings``: unknown keys with the nearest known one, wrong types and bounds with the value's
    origin, required keys that are not set; but not pydantic's kinds of error in ``later``. The kernel's sections are
    strict; a plugin's model says itself how strict it is.
    """
    strict = True if issubclass(model, Section) else None
    found = len(findings.problems)
    data: dict[str, Any] = {}
    for key, value in values.items():
        with findings.collect():
            annotation = annotation_at(model, prefix, key, value.origin)
            read = _read(prefix + key, value, annotation)
            _put(data, key, _countable(prefix + key, read, value.origin, findings))
    try:
        made = model.model_validate_json(json.dumps(data), strict=strict)
    except ValidationError as error:
        for problem in _problems(error, model, prefix, values, fix_missing, later):
            findings.add(problem)
        return None
    except RunError as error:
        findings.add(error)
        return None
    return made if len(findings.problems) == found else None


def unchecked(prefix: Key, values: Mapping[Key, Value], findings: Findings) -> dict[str, Any]:
    """``values`` (keys without ``prefix``) as nested plain data, text read as YAML reads a scalar."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        with findings.collect():
            _put(data, key, _read(prefix + key, value, object))
    return data


def annotation_at(model: type[BaseModel], prefix: Key, key: Key, origin: Origin) -> object:
    """The type of the field at ``key``. Raises :class:`InputError` with the nearest key when there is none."""
    fields = fields_of(model)
    field = fields.get(key[0])
    if field is None:
        raise unknown_key(prefix, key[0], [model], origin)
    return _deeper(field.annotation, prefix, key, origin)


def _deeper(annotation: object, prefix: Key, key: Key, origin: Origin) -> object:
    if len(key) == 1:
        return annotation
    inner = submodel(annotation)
    if inner is not None:
        return annotation_at(inner, (*prefix, key[0]), key[1:], origin)
    if _takes_mapping(annotation):
        return object
    name = dotted((*prefix, key[0]))
    raise InputError(f"{name} has no keys of its own, got {dotted(prefix + key)}", origin=str(origin))


def knows(model: type[BaseModel], key: Key) -> bool:
    """Whether ``model`` has the key, to its last part."""
    field = fields_of(model).get(key[0])
    if field is None or len(key) == 1:
        return field is not None
    inner = submodel(field.annotation)
    return knows(inner, key[1:]) if inner else _takes_mapping(field.annotation)


def _takes_mapping(annotation: object) -> bool:
    """Whether a field of this type holds a mapping of any keys."""
    return any(issubclass(kind, Mapping) for kind in map(_class_of, members(annotation)))


def _class_of(annotation: object) -> type:
    origin = getattr(annotation, "__origin__", annotation)
    return origin if isinstance(origin, type) else object


def unknown_key(
    prefix: Key, unknown: str, models: Iterable[type[BaseModel]], origin: Origin, owner: str = "", hint: str = ""
) -> InputError:
    """The error of a key that none of ``models`` has; ``owner`` is what would have it, the section unless given.

    ``hint`` says who has it: then nothing that is only spelt alike is suggested.
    """
    models = list(models)
    names = list(dict.fromkeys(name for model in models for name in fields_of(model)))
    owner = owner or dotted(prefix)
    listed = f"{owner} has {', '.join(names)}" if names else f"{owner} has no options"
    fix = f"{hint}; {listed}" if hint else _meant(prefix, unknown, models) or listed
    return InputError(f"unknown key {dotted((*prefix, unknown))}", origin=str(origin), fix=fix)


def _meant(prefix: Key, unknown: str, models: Iterable[type[BaseModel]]) -> str:
    """The key that ``unknown`` may stand for, one of a group by its full name: ``did you mean 'model.rope.theta'?``."""
    if any(tuple(unknown.split(".")) == key for model in models for key, _ in walk(model)):  # in a file or a mapping
        *groups, last = unknown.split(".")
        return f"nest it: {' {'.join(f'{each}:' for each in groups)} {{{last}: ...{'}' * len(groups)}"
    known = {"_".join(key): key for model in models for key, _ in walk(model)}
    ends = [name for name in known if f"_{name}".endswith(f"_{unknown}")]
    key = known.get(ends[0] if len(ends) == 1 else similar_word(unknown, known), ())
    if len(key) > 1:
        return f"did you mean {dotted(prefix + key)!r}?"
    return did_you_mean(unknown, [name for model in models for name in fields_of(model)])


def _read(key: Key, value: Value, annotation: object) -> Any:
    if isinstance(value.data, Text):
        if any("\ud800" <= each <= "\udfff" for each in value.data):  # a shell's bytes that are not UTF-8
            raise InputError(
                f"{dotted(key)} is not UTF-8", origin=str(value.origin).encode("ascii", "backslashreplace").decode()
            )
        if submodel(annotation) and value.data != "null":
            raise _not_a_value(key, value, annotation)
        if _takes_mapping(annotation) and value.data.lstrip().startswith("{"):
            return {name: bare(node) for name, node in parse(value.data, str(value.origin)).items()}
        return read_text(value.data, annotation)
    try:
        data = plain(value.data)
    except TypeError as error:
        raise InputError(f"{dotted(key)}: {error}", origin=str(value.origin)) from None
    if submodel(annotation) and not isinstance(data, dict) and not (data is None and NoneType in members(annotation)):
        raise _not_a_value(key, value, annotation)
    return data


def _not_a_value(key: Key, value: Value, annotation: object) -> InputError:
    """The error of a value for a group of keys, with the first key of the group that takes it."""
    inner = submodel(annotation)
    keys = [] if inner is None else list(walk(inner))
    taking = (each for each, field in keys if _takes(field, value.data))
    chosen = next(taking, keys[0][0] if keys else ())
    fix = f"set {dotted(key + chosen)}"
    return InputError(f"{dotted(key)} is a group of keys, not a value", origin=str(value.origin), fix=fix)


def _takes(field: FieldInfo, data: Any) -> bool:
    """Whether a field of this type and these bounds takes ``data``."""
    read = read_text(data, field.annotation) if isinstance(data, Text) else data
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]  # made from a field
        adapter.validate_python(read)
    except (ValidationError, PydanticUserError):
        return False
    return True


def _countable(key: Key, data: Any, origin: Origin, findings: Findings) -> Any:
    """``data``; a whole number that 64 bits do not hold is a problem, and cut: no tensor, counter or file has it."""
    if not isinstance(data, int) or -(2**63) <= data < 2**63:
        return data
    findings.add(InputError(f"{dotted(key)}={_shown(data)}", why="it must be below 2^63", origin=str(origin)))
    return 2**63 - 1


def _put(data: dict[str, Any], key: Key, value: Any) -> None:
    for part in key[:-1]:
        data = data.setdefault(part, {})
    data[key[-1]] = value


def _problems(
    error: ValidationError,
    model: type[BaseModel],
    prefix: Key,
    values: Mapping[Key, Value],
    fix_missing: str,
    later: Container[str],
) -> list[InputError]:
    """One problem per key, those of a kind in ``later`` left out; a union whose alternatives all failed counts once."""
    grouped: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] not in later:
            grouped.setdefault(_key_of(model, _location(detail)), []).append(detail)
    return [_problem(prefix, key, details, values, fix_missing) for key, details in grouped.items()]


def _location(detail: ErrorDetails) -> tuple[int | str, ...]:
    """Where the error is: a rule over several groups says at which key."""
    inside = detail["ctx"]["key"].split(".") if detail["type"] == AT_KEY else ()
    return (*detail["loc"], *inside)


def _key_of(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> Key:
    """The key part of pydantic's location, which also names union alternatives and list indices."""
    key: Key = ()
    for part in location:
        field = fields_of(model).get(str(part)) if model else None
        if field is None:
            break
        key, model = (*key, str(part)), submodel(field.annotation)
    return key


def _problem(
    prefix: Key, key: Key, details: list[ErrorDetails], values: Mapping[Key, Value], fix_missing: str
) -> InputError:
    name = dotted(prefix + key)
    inside = [value for each, value in values.items() if each[: len(key)] == key]
    origins = dict.fromkeys(str(value.origin) for value in inside if value.origin != DEFAULT)
    origin = " and ".join(origins)
    if details[0]["type"] == "missing" and not inside:
        return InputError(f"{name} is not set", why=fix_missing, fix=f"add --set {name}=... or write it into the file")
    if not key or details[0]["type"] == "rule":  # a rule over several keys says which by itself
        return InputError(_must(details[0]))
    given = details[0]["ctx"]["value"] if details[0]["type"] == AT_KEY else details[0]["input"]
    why = ", or ".join(dict.fromkeys(_must(detail) for detail in details)).replace(", or it must be", " or")
    return InputError(f"{name}={_shown(given)}", why=why, origin=origin)


def _must(detail: ErrorDetails) -> str:
    template = _MUST.get(detail["type"])
    if template is None:
        return detail["msg"][:1].lower() + detail["msg"][1:]
    context = {
        name: whole(value) if isinstance(value, float) else value for name, value in detail.get("ctx", {}).items()
    }
    return template.format(**context)


def _shown(value: object) -> str:
    """A value as the user could have typed it, shortened."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
