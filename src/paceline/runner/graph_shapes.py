"""Which steps are worth a graph of their own."""

from paceline.runner.step_graphs import Shape

FIRST = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Numbers of rows for which decode steps are captured before the engine is ready; the rest follows when there is
nothing to do. Small steps read the weights, whatever their number of rows; large ones take time for each row."""

MIXED_TOKENS = 1024
"""Steps of more tokens take the GPU longer than their launches take the host."""
SINGLES = (16, 64, 256)
"""For how many rows of one token a captured mixed step has room: few rows are read by more programs each."""
LONGER = 7
"""For how many rows of any number of tokens; one more holds the padding."""
MIXED_CONTEXT = 8192
"""How long the rows of a captured mixed step become: longer ones are read by more programs than it launches."""


def decode_shapes(most: int) -> list[Shape]:
    """Numbers of rows of decode steps, those of ``FIRST`` and the largest first. They lie dense where a few rows more
    cost much of a step."""
    steps = [*range(1, 16), *range(16, 64, 4), *range(64, 128, 8), *range(128, 512, 16), *range(512, 1025, 32)]
    sizes = [size for size in steps if size < most] + [most] if most < 1024 else steps
    return [(size,) for size in sorted(sizes, key=lambda size: (size not in FIRST and size != most, -size))]


def mixed_shapes(most_tokens: int, most_rows: int) -> list[Shape]:
    """Numbers of tokens, and of rows with one token, of steps in which other rows have several.

    A matrix unit computes tiles of 64 or 128 tokens in any case. From 128 on no linear layer gives partial sums. Full
    steps are frequent, so that their number is one of them.
    """
    sizes = [size for size in (*range(128, 640, 64), *range(640, MIXED_TOKENS + 1, 128)) if size < most_tokens]
    if 128 <= most_tokens <= MIXED_TOKENS:
        sizes.append(most_tokens)
    singles = [most for most, less in zip(SINGLES, (0, *SINGLES), strict=False) if less < most_rows]
    return [(size, most) for size in reversed(sizes) for most in reversed(singles) if most <= size]
