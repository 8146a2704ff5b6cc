"""What GPUs cost."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


class InvalidPrices(ValueError):
    """A file that has no prices, or text that names no GPUs; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Of one hour of one GPU."""

    currency: str
    gpu_hour: dict[str, float]
    """Name of the GPU -> price."""

    def of(self, gpu: str) -> float | None:
        """The price of a GPU: that of its own name, else of the longest name that is a part of it (``H200`` of
        ``NVIDIA H200``), letters' case aside. None: no price."""
        wanted = gpu.casefold()
        fitting = [name for name in self.gpu_hour if _words(name) in _words(wanted)]
        exact = [name for name in fitting if name.casefold() == wanted]
        best = max(exact or fitting, key=len, default=None)
        return None if best is None else self.gpu_hour[best]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one replica of an engine runs on."""

    gpu: str
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Hardware":
        """Reads ``H200`` or ``2xH200``.

        Raises:
            InvalidPrices: the text is of another form.
        """
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\S.*?)\s*", text)
        if match is None or match[1] == "0":
            raise InvalidPrices(f"{text!r} names no GPUs; write it like H200 or 2xH200")
        return cls(match[2], int(match[1] or 1))

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu}"


def read_prices(path: Path) -> Prices:
    """Reads ``currency = "USD"`` and a table ``[gpu_hour]`` of prices by the GPU's name.

    Raises:
        InvalidPrices: no such file, no TOML, or a key that is missing, unknown or of a wrong type.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidPrices(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidPrices(f"{path}: {error}") from error
    if unknown := set(data) - {"currency", "gpu_hour"}:
        raise InvalidPrices(f"{path}: unknown key {', '.join(sorted(unknown))}; known are currency and gpu_hour")
    currency, prices = data.get("currency"), data.get("gpu_hour")
    if not isinstance(currency, str) or not currency:
        raise InvalidPrices(f'{path}: currency is missing; write it like currency = "USD"')
    if not isinstance(prices, dict) or not prices:
        raise InvalidPrices(f"{path}: the table [gpu_hour] is missing or has no price")
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < float("inf"):
            raise InvalidPrices(f"{path}: gpu_hour.{name} is {price!r}; a price is a number above 0")
    return Prices(currency, {name: float(price) for name, price in prices.items()})


def _words(text: str) -> str:
    """With a space around every word, so that ``H20`` is no part of ``H200``."""
    return f" {' '.join(re.findall(r'[a-z0-9.]+', text.casefold()))} "
