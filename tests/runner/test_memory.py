from pathlib import Path

import pytest

from paceline.runner.memory import available_memory

KIB = 1024


def machine(root: Path, available_kib: int, cgroup: str = "") -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:  999999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")


def test_without_control_groups(tmp_path):
    machine(tmp_path, 1000)
    assert available_memory(tmp_path) == 1000 * KIB


def test_v2_limit_of_a_parent_counts_and_file_cache_is_free(tmp_path):
    machine(tmp_path, 10_000, "0::/outer/inner\n")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "outer/inner", memory_max="max", memory_current=100, memory_stat="inactive_file 7")
    group(mount / "outer", memory_max=5000, memory_current=3000, memory_stat="anon 1\ninactive_file 500")
    assert available_memory(tmp_path) == 2500


def test_v2_in_a_container_that_sees_only_its_own_group(tmp_path):
    machine(tmp_path, 10_000, "0::/host/path/not/mounted\n")
    group(tmp_path / "sys/fs/cgroup", memory_max=4096, memory_current=96, memory_stat="inactive_file 0")
    assert available_memory(tmp_path) == 4000


def test_v1(tmp_path):
    machine(tmp_path, 10_000, "5:cpu,cpuacct:/a\n4:memory:/a/b\n1:name=systemd:/a\n0::/\n")
    group(
        tmp_path / "sys/fs/cgroup/memory/a/b",
        **{"memory_limit_in_bytes": 9000, "memory_usage_in_bytes": 8000},
        memory_stat="cache 3\ntotal_inactive_file 200",
    )
    assert available_memory(tmp_path) == 1200


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path):
    machine(tmp_path, 10_000, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", memory_max=10, memory_current=20, memory_stat="inactive_file 0")
    assert available_memory(tmp_path) == 0


def test_this_machine():
    psutil = pytest.importorskip("psutil")
    assert 0 < available_memory() <= psutil.virtual_memory().total
