import pytest

from paceline.checkpoint.gguf import GGUFCheckpoint
from paceline.checkpoint.source import locate


@pytest.fixture(scope="session")
def smollm2() -> GGUFCheckpoint:
    return GGUFCheckpoint(locate("smollm2"))
