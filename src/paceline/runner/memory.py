"""How much memory this process can still take."""

import os
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: what the machine has available, or what this process's control groups leave, whichever is less.

    Control groups (v1 and v2) are how containers are limited; the machine's own figure ignores them.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    try:
        fields = (root / "proc/meminfo").read_text().split()
        machine = int(fields[fields.index("MemAvailable:") + 1]) * 1024
    except (OSError, ValueError):  # no Linux
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(_left(folder) for folder in _memory_groups(root))])


def _memory_groups(root: Path) -> list[Path]:
    """Folders of this process's memory control groups and all of their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = mount / path.strip("/")
        # Inside a container the path may be the host's, which is not mounted here; the mount is then the own group.
        folders += [mount, *(folder for folder in (group, *group.parents) if mount in folder.parents)]
    return folders


def _left(folder: Path) -> int:
    """Bytes that a group's limit leaves; file cache that can be dropped counts as free."""
    for limit_file, usage_file, cache_field in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            usage = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:  # the root group and the other version lack these files
            continue
        if limit != "max":
            return max(0, int(limit) - usage + int(stat.get(cache_field, 0)))
    return 1 << 62
