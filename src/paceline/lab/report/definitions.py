"""What the figures of a report mean, printed where they are printed."""

DEFINITIONS = (
    (
        "TTFT",
        "Time to first token: from the scheduled send, not the actual one, to the first delta that carries a generated "
        "token. What a client's or a server's queue adds is in it.",
    ),
    (
        "TPOT",
        "Time per output token of a request: (last token - first token) / (n - 1), n by the server's usage. Not "
        "measured for fewer than 2 tokens. Each request has one vote.",
    ),
    ("ITL", "Gaps between deltas, each divided by the tokens of the later delta."),
    ("E2E", "From the scheduled send to the last token."),
    ("Window", "From the first scheduled send to the last token of a completed reply."),
    ("Throughput", "Output tokens of completed requests / window."),
    (
        "\N{PLUS-MINUS SIGN}",
        "Half of the 95% confidence interval from this one run; it knows nothing of what differs between runs. "
        "A run that is too short for an interval has none.",
    ),
    (
        "Client late, loop, CPU",
        "How late requests were sent and sockets were looked at, at p99, in milliseconds, and the share of a core that "
        "the busiest worker used in its busiest second.",
    ),
    ("Goodput", "Requests that kept every constraint / window. A failure or a value not measured keeps none."),
    ("Attainment", "The share of the requests sent that kept every constraint, with its 95% confidence interval."),
    ("Constraint", "A limit of one statistic of one metric, for example ttft_p99 < 1s."),
    (
        "Not valid",
        "The client or the run was at fault, or something went unmeasured: the point says nothing of the engine. The "
        "table gives the reason.",
    ),
    (
        "Indistinguishable",
        "By these points the limits of two engines may be the same: none broke at a load that the other keeps.",
    ),
    ("Failed requests", "They are left out of latency and throughput, and count against goodput and attainment."),
)
