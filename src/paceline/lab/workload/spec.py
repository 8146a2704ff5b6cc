"""Workloads and loads as tables of an experiment file or as flags."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.lab.stage import Stage
from paceline.lab.workload import lengths, traces
from paceline.lab.workload.arrivals import burst, closed_stage, constant, gamma, heads, open_stage, poisson, ramp
from paceline.lab.workload.draft import Draft
from paceline.lab.workload.files import chat_file, text_file
from paceline.lab.workload.invalid import InvalidWorkload
from paceline.lab.workload.keys import Keys
from paceline.lab.workload.lengths import Lengths
from paceline.lab.workload.replay import trace_drafts
from paceline.lab.workload.synthetic import fixed_lengths, length_distribution, multi_turn, shared_prefix
from paceline.lab.workload.vocabulary import (
    COMMON_IDS,
    COMMON_WORDS,
    Form,
    Vocabulary,
    ordinary_ids,
    read_tokenizer,
    single_token_words,
)


def workload_from(spec: Mapping[str, Any], run: int = 0) -> list[Draft]:
    """Drafts of a workload.

    | ``kind`` | keys (with their defaults) |
    |---|---|
    | ``fixed`` | ``requests``, ``input``, ``output`` in tokens |
    | ``lengths`` | the same, where ``input`` and ``output`` are lengths |
    | ``shared_prefix`` | ``requests``, ``groups``, ``prefix`` in tokens; ``suffix``, ``output`` lengths |
    | ``multi_turn`` | ``sessions``, ``turns``; ``input``, ``output`` lengths; ``think_s`` = 0, ``think_cv`` = 1 |
    | ``text`` | ``path``, ``requests``; ``input``, ``output`` lengths; ``input`` counts words without a tokenizer |
    | ``chat`` | ``path``; ``requests`` (all), ``output`` (as recorded), ``turns`` = first, **last** or all |
    | ``trace`` | ``path``, and what follows |

    A ``trace`` takes, in the order in which they act: ``format`` (guessed: azure, burstgpt, mooncake, bailian);
    ``start_s`` = 0, ``end_s``, ``first`` = 0, ``requests`` (see `traces.slice`); ``max_tokens``, which leaves out
    longer requests; ``jitter`` = false, ``tick_s`` (found); ``scale`` = 1, where 2 doubles the rate; ``sessions`` =
    true, ``seconds_per_token`` = 0 (see `trace_drafts`).

    All but ``chat`` also take:

    - ``seed`` = 0;
    - ``form``: ``ids`` (the default; of text without a tokenizer it is ``text``), ``text`` or ``chat``: what servers
      are sent; ``multi_turn`` is always chat;
    - ``tokenizer``: a folder, a ``.gguf`` file or an alias. Random ids then come from its vocabulary without special
      tokens, random words are those that are one token each, and text is cut by tokens; also for ``chat``;
    - ``token_ids`` = [1000, 31000]: without a tokenizer, random ids are from the first up to and without the second.

    **Lengths** are a whole number or a table: ``{kind = "uniform", min, max}``; ``{kind = "normal", mean, std, min = 1,
    max}``; ``lognormal`` with the same keys; ``{kind = "empirical", path}``, a file with one length a line.

    Args:
        run: another one for each stage makes other tokens of the same lengths, so that a prefix cache cannot answer
            from the stage before. Chat files are as they are.

    Raises:
        InvalidWorkload: names the key, or the file and line.
    """
    keys = Keys(spec)
    kind = keys.choice("kind", tuple(KINDS))
    return KINDS[kind](keys, run)


def workload_facts(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec for reports, with what it leaves open: ``cut_by``, of a text file, is ``tokens`` or ``words``."""
    facts = dict(spec)
    if spec.get("kind") == "text":
        facts["cut_by"] = "tokens" if "tokenizer" in spec else "words"
    return facts


def arrivals_from(spec: Mapping[str, Any], n: int) -> list[float]:
    """Due times of ``n`` requests.

    ``kind`` is ``burst``; ``constant`` or ``poisson`` with ``rate``; ``gamma`` with ``rate`` and ``cv``; ``ramp`` with
    ``start_rate`` and ``end_rate``. ``poisson`` and ``gamma`` also take ``seed`` = 0. Rates are requests a second.

    Raises:
        InvalidWorkload: names the key.
    """
    keys = Keys(spec)
    kind = keys.choice("kind", OPEN_KINDS)
    if kind == "burst":
        due = burst(n)
    elif kind == "constant":
        due = constant(n, keys.number("rate", positive=True))
    elif kind == "poisson":
        due = poisson(n, keys.number("rate", positive=True), keys.whole("seed", 0, low=0))
    elif kind == "gamma":
        rate, cv = (keys.number(key, positive=True) for key in ("rate", "cv"))
        due = gamma(n, rate, cv, keys.whole("seed", 0, low=0))
    else:
        due = ramp(n, *(keys.number(key, positive=True) for key in ("start_rate", "end_rate")))
    keys.end()
    return due


def stage_from(
    name: str,
    drafts: Sequence[Draft],
    load: Mapping[str, Any],
    *,
    deadline_s: float,
    ignore_eos: bool = True,
    sampling: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
) -> Stage:
    """A stage of any load: those of `arrivals_from`; ``{"kind": "concurrency", "batch": 8}``; ``{"kind": "trace"}``,
    which takes the times of the trace that the drafts come from.

    With sessions a rate is that of their starts. The stage then has no offered rate, because the other requests depend
    on the server. A ramp and a trace offer their mean rate.

    Args:
        workload: `workload_facts`, kept in the stage's load for reports.

    Raises:
        InvalidWorkload: names the key.
    """
    shown = {**load, **({} if workload is None else {"workload": dict(workload)})}
    keys = Keys(load)
    kind = keys.choice("kind", (*OPEN_KINDS, "concurrency", "trace"))
    if kind == "concurrency":
        batch = keys.whole("batch")
        keys.end()
        return closed_stage(
            name, drafts, batch, load=shown, deadline_s=deadline_s, ignore_eos=ignore_eos, sampling=sampling
        )
    first = heads(drafts)
    if kind == "trace":
        keys.end()
        due = [draft.time_s for draft in first if draft.time_s is not None]
        if len(due) < len(first):
            raise InvalidWorkload("kind: a trace's times need a workload of the kind trace")
    else:
        due = arrivals_from(load, len(first))
    rate = load.get("rate")
    if kind in ("ramp", "trace") and len(due) > 1 and due[-1] > due[0]:
        rate = (len(due) - 1) / (due[-1] - due[0])
    return open_stage(
        name,
        drafts,
        due,
        shown,
        offered_rate=rate if len(first) == len(drafts) else None,
        deadline_s=deadline_s,
        ignore_eos=ignore_eos,
        sampling=sampling,
    )


MOST_IDS = 10_000_000
"""More than any vocabulary has."""
OPEN_KINDS = ("burst", "constant", "poisson", "gamma", "ramp")


def _fixed(keys: Keys, run: int) -> list[Draft]:
    n, inputs, outputs = (keys.whole(key) for key in ("requests", "input", "output"))
    return fixed_lengths(n, inputs, outputs, **_random(keys, run))


def _lengths(keys: Keys, run: int) -> list[Draft]:
    inputs, outputs = _length(keys, "input"), _length(keys, "output")
    return length_distribution(keys.whole("requests"), inputs, outputs, **_random(keys, run))


def _shared_prefix(keys: Keys, run: int) -> list[Draft]:
    n, groups, prefix = (keys.whole(key) for key in ("requests", "groups", "prefix"))
    return shared_prefix(n, groups, prefix, _length(keys, "suffix"), _length(keys, "output"), **_random(keys, run))


def _multi_turn(keys: Keys, run: int) -> list[Draft]:
    sessions, turns = (keys.whole(key) for key in ("sessions", "turns"))
    inputs, outputs = _length(keys, "input"), _length(keys, "output")
    think_s, cv = keys.number("think_s", 0.0), keys.number("think_cv", 1.0)
    return multi_turn(sessions, turns, inputs, outputs, think_s=think_s, think_cv=cv, **_random(keys, run, ("chat",)))


def _text(keys: Keys, run: int) -> list[Draft]:
    path, n = Path(keys.text("path")), keys.whole("requests")
    inputs, outputs = _length(keys, "input"), _length(keys, "output")
    tokenizer = read_tokenizer(keys.text("tokenizer")) if keys.has("tokenizer") else None
    forms = FORMS if tokenizer else FORMS[1:]
    form, seed = keys.choice("form", forms, forms[0]), keys.whole("seed", 0, low=0)
    keys.end()
    return text_file(path, n, inputs, outputs, tokenizer=tokenizer, form=form, seed=seed, run=run)


def _chat(keys: Keys, run: int) -> list[Draft]:
    path = Path(keys.text("path"))
    n = keys.whole("requests") if keys.has("requests") else None
    output = keys.whole("output") if keys.has("output") else None
    tokenizer = read_tokenizer(keys.text("tokenizer")) if keys.has("tokenizer") else None
    turns = keys.choice("turns", ("first", "last", "all"), "last")
    keys.end()
    return chat_file(path, n, output_tokens=output, tokenizer=tokenizer, turns=turns)


def _trace(keys: Keys, run: int) -> list[Draft]:
    rows = traces.slice(
        traces.read_trace(Path(keys.text("path")), keys.text("format") if keys.has("format") else None),
        start_s=keys.number("start_s", 0.0),
        end_s=keys.number("end_s") if keys.has("end_s") else None,
        first=keys.whole("first", 0, low=0),
        count=keys.whole("requests") if keys.has("requests") else None,
    )
    if keys.has("max_tokens"):
        rows = traces.shorter(rows, keys.whole("max_tokens"))
    if not rows:
        raise InvalidWorkload(f"{keys.text('path')}: no request is left of what was asked for")
    tick_s = keys.number("tick_s", positive=True) if keys.has("tick_s") else None
    sessions = keys.flag("sessions", True)
    seconds_per_token = keys.number("seconds_per_token", 0.0)
    seed = keys.whole("seed", 0, low=0)
    if keys.flag("jitter", False):
        rows = traces.jitter(rows, seed, tick_s)
    elif tick_s is not None:
        raise keys.error("tick_s", "needs jitter")
    rows = traces.scale(rows, keys.number("scale", 1.0, positive=True))
    return trace_drafts(rows, sessions=sessions, seconds_per_token=seconds_per_token, **_random(keys, run))


KINDS: dict[str, Callable[[Keys, int], list[Draft]]] = {
    "fixed": _fixed,
    "lengths": _lengths,
    "shared_prefix": _shared_prefix,
    "multi_turn": _multi_turn,
    "text": _text,
    "chat": _chat,
    "trace": _trace,
}

FORMS: tuple[Form, ...] = ("ids", "text", "chat")


def _random(keys: Keys, run: int, forms: Sequence[Form] = FORMS) -> dict[str, Any]:
    """The arguments of all random makers; takes the last keys."""
    seed, form = keys.whole("seed", 0, low=0), keys.choice("form", forms, forms[0])
    tokenizer = read_tokenizer(keys.text("tokenizer")) if keys.has("tokenizer") else None
    if form != "ids":
        words = COMMON_WORDS if tokenizer is None else single_token_words(tokenizer)
        vocabulary = Vocabulary(words, form)
    elif tokenizer is not None:
        vocabulary = Vocabulary(ordinary_ids(tokenizer), form)
    else:
        vocabulary = Vocabulary(_id_range(keys), form)
    keys.end()
    return {"vocabulary": vocabulary, "seed": seed, "run": run}


def _id_range(keys: Keys) -> range:
    if not keys.has("token_ids"):
        return COMMON_IDS
    ends = keys.value("token_ids")
    if not (isinstance(ends, list | tuple) and len(ends) == 2 and all(type(end) is int for end in ends)):
        raise keys.error("token_ids", f"must be two whole numbers, not {ends!r}")
    if not 0 <= ends[0] < ends[1] <= MOST_IDS:
        raise keys.error("token_ids", f"must rise from 0 or more to at most {MOST_IDS:,}, not {ends!r}")
    return range(*ends)


def _length(keys: Keys, key: str) -> Lengths:
    if not isinstance(keys.value(key), Mapping):
        return lengths.fixed(keys.whole(key))
    table = Keys(keys.value(key), f"{key}.")
    kind = table.choice("kind", ("uniform", "normal", "lognormal", "empirical"))
    if kind == "empirical":
        made = lengths.empirical(lengths.read_lengths(Path(table.text("path"))))
    elif kind == "uniform":
        low = table.whole("min")
        made = lengths.uniform(low, table.whole("max", low=low))
    else:
        mean, std = table.number("mean", positive=True), table.number("std")
        low = table.whole("min", 1)
        high = table.whole("max", low=low) if table.has("max") else None
        made = {"normal": lengths.normal, "lognormal": lengths.lognormal}[kind](mean, std, low, high)
    table.end()
    return made
