import gc

from paceline.engine.collector import calm_collector


def test_steps_of_a_thousand_rows_start_no_collection():
    before = gc.get_threshold()
    runs: list[dict] = []
    note = lambda phase, info: runs.append(info)  # noqa: E731
    try:
        calm_collector()
        gc.callbacks.append(note)
        for _ in range(20):
            outputs = [[[token]] for token in range(5000)]
            assert len(outputs) == 5000
            del outputs
        assert runs == []
        assert gc.get_freeze_count() > 0
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        gc.unfreeze()
