"""How long a step takes: a few coefficients and what the step has to do."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class StepWork:
    """What one step has to do, in the quantities that its duration depends on."""

    tokens: int = 0
    """Computed, of all rows."""
    rows: int = 0
    """That sample."""
    kv_tokens: int = 0
    """Tokens whose keys and values are read by rows that compute a single token."""
    prompt_pairs: int = 0
    """Pairs (token, token it attends to) of rows that compute several: n tokens after a context of c are
    ``n * c + n * (n + 1) / 2`` pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicts the duration of a step, in seconds:

        fixed_s + max(weights_s, tokens * token_s) + rows * row_s + kv_tokens * kv_token_s + prompt_pairs * pair_s

    The linear layers either wait for their weights or for their multiplications, hence the maximum (the roofline model,
    Williams et al. 2009, with its knee at ``weights_s / token_s`` tokens). A step that computes nothing takes no time.

    Raises:
        ValueError: a coefficient is negative or not a number.
    """

    fixed_s: float = 0.0
    """Of every step."""
    weights_s: float = 0.0
    """To read all weights once."""
    token_s: float = 0.0
    """To multiply one token with all weights."""
    row_s: float = 0.0
    """For each row that samples: head, sampler, bookkeeping."""
    kv_token_s: float = 0.0
    """To read the keys and values of one token, where a row computes a single token."""
    pair_s: float = 0.0
    """For each pair of a token and one that it attends to, where a row computes several tokens."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{field.name}: must be a number of seconds, at least 0, not {value!r}")

    def seconds(self, work: StepWork) -> float:
        if work.tokens == 0:
            return 0.0
        return (
            self.fixed_s
            + max(self.weights_s, work.tokens * self.token_s)
            + work.rows * self.row_s
            + work.kv_tokens * self.kv_token_s
            + work.prompt_pairs * self.pair_s
        )
