"""Command-line options made from the fields of a dataclass, so that the two cannot drift apart.

A config has its own reasons to be a dataclass, and its options follow from it (`Knobs`). Options that several commands
share are a dataclass of theirs (`Group`).
"""

import ast
import copy
import dataclasses
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30}

# Short, so that the names beside them fit on a narrow terminal.
_METAVARS = {bool: " ", int: "INT", float: "FLOAT", str: "TEXT"}


@dataclass(frozen=True)
class Knobs:
    """Marks a command's parameter: one option for each field of ``source``; it receives the given ones as a dict.

    A field's type, default and docstring become the option's type, shown default and help. An option that is not
    given is absent from the dict, so the dataclass's own default applies.
    """

    source: type
    panel: str
    only: tuple[str, ...] = ()
    """Fields to offer; none named: all but ``leave_out``."""
    leave_out: tuple[str, ...] = ()
    defaults: str = ""
    """Shown instead of the dataclass's defaults, where those do not apply."""

    def fields(self) -> list[dataclasses.Field[Any]]:
        fields = dataclasses.fields(self.source)
        return [f for f in fields if (f.name in self.only if self.only else f.name not in self.leave_out)]

    def take(self, values: dict[str, Any]) -> dict[str, Any]:
        """Removes this group's options from ``values``; returns the given ones as the dataclass wants them."""
        given: dict[str, Any] = {}
        for field in self.fields():
            value = values.pop(field.name)
            if isinstance(value, bool):
                given[field.name] = not field.default  # A knob that is on has a --no-... flag.
            elif isinstance(value, list):
                given |= {field.name: tuple(value)} if value else {}
            elif value is not None:
                given[field.name] = value
        return given

    def options(self) -> list[inspect.Parameter]:
        hints, docs = get_type_hints(self.source), field_docs(self.source)
        return [_option(field, hints[field.name], docs.get(field.name, ""), self) for field in self.fields()]


@dataclass(frozen=True)
class Group:
    """Marks a command's parameter: one option for each field of a dataclass, of which it receives an instance.

    A field's docstring is the option's help. Its type is ``Annotated[TYPE, typer.Option(...)]`` where there is more to
    say, such as a range.
    """

    defaults: Any
    """An instance: what an option that is not given is, in this command."""
    panel: str
    leave_out: tuple[str, ...] = ()
    """Fields without an option here."""
    more: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field -> what its help also says in this command."""

    def fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.defaults) if field.name not in self.leave_out]

    def take(self, values: dict[str, Any]) -> Any:
        """Removes this group's options from ``values``; returns the dataclass."""
        return dataclasses.replace(self.defaults, **{name: values.pop(name) for name in self.fields()})

    def options(self) -> list[inspect.Parameter]:
        hints, docs = get_type_hints(type(self.defaults), include_extras=True), field_docs(type(self.defaults))
        found = []
        for name in self.fields():
            kind, *extra = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
            info = copy.copy(extra[0]) if extra else typer.Option()
            info.help, info.rich_help_panel = " ".join([docs[name], *filter(None, [self.more.get(name)])]), self.panel
            default = getattr(self.defaults, name)
            found.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
                )
            )
        return found


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter of ``command`` that is ``Annotated[dict, Knobs(...)]``, or of a dataclass and a `Group`,
    by the options it stands for."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Knobs | Group] = {}
    for parameter in inspect.signature(command).parameters.values():
        marks = getattr(parameter.annotation, "__metadata__", ())
        group = next((mark for mark in marks if isinstance(mark, Knobs | Group)), None)
        if group is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group
        parameters += group.options()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {name: group.take(values) for name, group in groups.items()}
        command(**values, **given)

    del run.__wrapped__  # or inspect.signature would look through it
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parse_size(text: str) -> int:
    """Bytes from ``4GiB``, ``512M``, ``1.5 GB`` or a plain number; raises typer.BadParameter."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size; write it like 4GiB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def field_docs(source: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(source))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[field.target.id] = " ".join(inspect.cleandoc(ast.literal_eval(doc.value)).split()).replace("``", "`")
    return docs


def _option(field: dataclasses.Field[Any], hint: Any, doc: str, knobs: Knobs) -> inspect.Parameter:
    kind = _without_none(hint)
    flag, doc = "--" + field.name.replace("_", "-"), doc.replace("None: ", "Not given: ")
    extra: dict[str, Any] = {}
    if kind in _METAVARS:
        metavar = _METAVARS[kind]
    elif get_origin(kind) is Literal:
        metavar, doc = "NAME", f"{', '.join(get_args(kind))}. {doc}"
    elif kind == tuple[str, ...]:
        kind, metavar, flag, doc = list[str], "TEXT", flag.removesuffix("s"), f"{doc} Repeat it for several."
    else:
        raise TypeError(f"{knobs.source.__name__}.{field.name}: no option can be made of {kind}")
    if kind is bool and field.default:
        flag, doc = "--no-" + flag[2:], f"Do not {doc[:1].lower()}{doc[1:]}"
    elif field.name.endswith("_bytes"):
        extra, metavar = {"parser": parse_size}, "SIZE"
    elif field.name.endswith("_s"):
        metavar = "SECONDS"
    doc += _shown(field, knobs)
    info = typer.Option(flag, help=doc.strip(), rich_help_panel=knobs.panel, metavar=metavar, **extra)
    annotation = Annotated[kind | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(field: dataclasses.Field[Any], knobs: Knobs) -> str:
    default = field.default
    if knobs.defaults:
        return f" Default: {knobs.defaults}."
    if isinstance(default, bool) or default in (None, dataclasses.MISSING, (), ""):
        return ""
    if field.name.endswith("_bytes") and default % 2**20 == 0:
        return f" Default: {default // 2**20}MiB."
    return f" Default: {default}."


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (arm for arm in get_args(hint) if arm is not types.NoneType)
        return kind
    return hint
