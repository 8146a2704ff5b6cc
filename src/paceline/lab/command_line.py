"""The command that is running, as a user would repeat it."""

import shlex
import sys
from pathlib import Path


def command_line() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
