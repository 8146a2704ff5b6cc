"""Workloads of random prompts.

Every maker takes ``seed`` and ``run``. Both choose the tokens of the prompts, ``seed`` alone their lengths: give each
stage of an experiment another ``run``, and an engine's prefix cache cannot answer from the stage before.
"""

from typing import Any

import numpy as np

from paceline.lab.workload.draft import Draft
from paceline.lab.workload.generator import generator
from paceline.lab.workload.lengths import Lengths, fixed
from paceline.lab.workload.vocabulary import Vocabulary


def fixed_lengths(
    n: int, input_tokens: int, output_tokens: int, *, vocabulary: Vocabulary, seed: int = 0, run: int = 0
) -> list[Draft]:
    """``n`` requests of the same lengths, in tokens."""
    return length_distribution(n, fixed(input_tokens), fixed(output_tokens), vocabulary=vocabulary, seed=seed, run=run)


def length_distribution(
    n: int, inputs: Lengths, outputs: Lengths, *, vocabulary: Vocabulary, seed: int = 0, run: int = 0
) -> list[Draft]:
    """``n`` requests; input and output lengths are drawn independently."""
    tokens = generator(seed, "tokens", run)
    return [
        Draft(vocabulary.prompt(vocabulary.draw(size, tokens)), output, vocabulary.tokens(size))
        for size, output in _pairs(n, inputs, outputs, seed)
    ]


def shared_prefix(
    n: int,
    groups: int,
    prefix_tokens: int,
    suffixes: Lengths,
    outputs: Lengths,
    *,
    vocabulary: Vocabulary,
    seed: int = 0,
    run: int = 0,
) -> list[Draft]:
    """``n`` requests in ``groups``, taken in turns: each has its group's prefix and then a suffix of its own.

    At best a cache saves the prefix of all but the first of each group.
    """
    tokens = generator(seed, "tokens", run)
    prefixes = [vocabulary.draw(prefix_tokens, tokens) for _ in range(groups)]
    drafts = []
    for index, (suffix, output) in enumerate(_pairs(n, suffixes, outputs, seed)):
        draws = np.concatenate([prefixes[index % groups], vocabulary.draw(suffix, tokens)])
        drafts.append(Draft(vocabulary.prompt(draws), output, vocabulary.tokens(len(draws))))
    return drafts


def multi_turn(
    sessions: int,
    turns: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    vocabulary: Vocabulary,
    think_s: float = 0.0,
    think_cv: float = 1.0,
    seed: int = 0,
    run: int = 0,
) -> list[Draft]:
    """Conversations: each turn sends all before it, the engine's own replies included, and waits for the last reply.

    Args:
        inputs: tokens of each user's message.
        vocabulary: of the form ``chat``.
        think_s: mean seconds from a reply's end to the next message.
        think_cv: coefficient of variation of the think times, which are gamma distributed: 1 is exponential, 0 fixed.
    """
    assert vocabulary.form == "chat", "a reply can only be put between messages"
    tokens, think = generator(seed, "tokens", run), generator(seed, "think")
    lengths = _pairs(sessions * turns, inputs, outputs, seed)
    drafts: list[Draft] = []
    for _ in range(sessions):
        messages: list[Any] = []
        for turn in range(turns):
            size, output = lengths[len(drafts)]
            messages = [*messages, *vocabulary.prompt(vocabulary.draw(size, tokens))]
            if turn == 0:
                drafts.append(Draft(messages, output))
                continue
            pause = think_s
            if think_s > 0 and think_cv > 0:
                pause = round(think.gamma(think_cv**-2, think_s * think_cv**2), 9)
            drafts.append(Draft(messages, output, after=len(drafts) - 1, delay_s=pause, needs=True))
    return drafts


def _pairs(n: int, inputs: Lengths, outputs: Lengths, seed: int) -> list[tuple[int, int]]:
    first = inputs(n, generator(seed, "input lengths")).tolist()
    return list(zip(first, outputs(n, generator(seed, "output lengths")).tolist(), strict=True))
