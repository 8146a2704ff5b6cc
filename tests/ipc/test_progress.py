"""How start-up shows itself."""

import io
import logging

import pytest

from paceline.ipc.progress import StartProgress


def test_log_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with StartProgress() as progress:
        for stage in ("Loading weights", "Profiling"):
            for share in (0.0, 0.5, 1.0, 1.0):
                progress(stage, share)
    assert caplog.messages == ["Loading weights ...", "Loading weights: done", "Profiling ...", "Profiling: done"]


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    with StartProgress() as progress:
        progress("Loading weights", 0.0)
        progress("Loading weights", 0.5)
    assert "Loading weights" in terminal.getvalue()
    assert "50%" in terminal.getvalue()
    assert caplog.messages == []
