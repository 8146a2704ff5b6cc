"""Scheduler, KV manager and core over the fake runner, which checks every token through the block tables."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_core import fake_core
from fake_runner import next_token
from paceline.core import EngineCore
from paceline.engine.request import CoreOutput, Finish, Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import KVGroup

VOCAB = 97


def request(id: int, prompt: Sequence[int], **options) -> Request:
    own = {name: options.pop(name) for name in ("priority", "cache_salt", "seed", "arrival") if name in options}
    return Request(
        id=id, prompt=list(prompt), params=SamplingParams(**options), **{"seed": 0, "arrival": float(id), **own}
    )


def expected(prompt: Sequence[int], count: int, seed: int = 0, candidate: int = 0) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, VOCAB, seed, candidate))
    return context[len(prompt) :]


def run(core: EngineCore, most_steps: int = 3000) -> dict[tuple[int, int], list[CoreOutput]]:
    """Steps until idle; outputs by (request, candidate)."""
    outputs = defaultdict(list)
    for _ in range(most_steps):
        if not core.has_work:
            core.check_idle()
            return outputs
        for output in core.step():
            outputs[output.request, output.candidate].append(output)
    raise AssertionError("no end in sight")


def ids(outputs: list[CoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


@pytest.fixture(params=[1, 2, 3], ids="depth{}".format)
def depth(request) -> int:
    return request.param


def test_one_request(depth):
    core = fake_core(depth=depth)
    core.add(request(1, [5, 6, 7], max_tokens=5))
    outputs = run(core)[1, 0]
    assert ids(outputs) == expected([5, 6, 7], 5)
    assert [output.finish for output in outputs] == [None] * 4 + [Finish.LENGTH]


def test_no_tokens_wanted(depth):
    core = fake_core(depth=depth)
    core.add(request(1, [5, 6, 7], max_tokens=0, prompt_logprobs=0))
    [output] = run(core)[1, 0]
    assert output.ids == []
    assert output.finish is Finish.LENGTH
    assert [entry.logprob for entry in output.prompt_logprobs] == [-6.0, -7.0]


def test_context_end_is_the_limit_when_max_tokens_is_not_given(depth):
    core = fake_core(depth=depth, max_model_len=20)
    core.add(request(1, range(17), max_tokens=None))
    assert ids(run(core)[1, 0]) == expected(range(17), 3)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_of_sequence(depth, ignore_eos):
    prompt = [3, 1, 4]
    tokens = expected(prompt, 8)
    core = fake_core(depth=depth, eos_ids=(tokens[4], tokens[6]))
    core.add(request(1, prompt, max_tokens=8, ignore_eos=ignore_eos, logprobs=0))
    outputs = run(core)[1, 0]
    stop = 8 if ignore_eos else tokens.index(tokens[4]) + 1
    assert ids(outputs) == tokens[:stop]
    assert outputs[-1].finish is (Finish.LENGTH if ignore_eos else Finish.STOP)
    assert outputs[-1].stop_id == (None if ignore_eos else tokens[4])
    assert [entry.logprob for output in outputs for entry in output.logprobs] == [-float(t) for t in tokens[:stop]]


def test_stop_ids_are_the_requests_own(depth):
    prompt = [3, 1, 4]
    tokens = expected(prompt, 8)
    core = fake_core(depth=depth)
    core.add(request(1, prompt, max_tokens=8, stop_token_ids=(tokens[2],)))
    core.add(request(2, prompt, max_tokens=8))
    outputs = run(core)
    assert ids(outputs[1, 0]) == tokens[: tokens.index(tokens[2]) + 1]
    assert ids(outputs[2, 0]) == tokens


@pytest.mark.parametrize("windows", [(None,), (7,), (None, 6), (2,)], ids=str)
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_prompts_around_a_block_boundary_cold_and_warm(depth, windows, length):
    """failure 59: a fully cached prompt still computes its last token."""
    core = fake_core(depth=depth, windows=windows)
    prompt = [length] * length
    for id in range(3):
        core.add(request(id, prompt, max_tokens=6))
        outputs = run(core)[id, 0]
        assert ids(outputs) == expected(prompt, 6)
        hit = outputs[0].cached_tokens
        assert hit == (0 if id == 0 else (length - 1) // 4 * 4)


def test_cache_grows_with_the_conversation(depth):
    core = fake_core(depth=depth)
    prompt = list(range(10))
    core.add(request(1, prompt, max_tokens=9))
    reply = ids(run(core)[1, 0])
    core.add(request(2, [*prompt, *reply, 1, 2, 3], max_tokens=2))
    # 19 tokens were known, the last of them never computed.
    assert run(core)[2, 0][0].cached_tokens == 16


def test_salt_separates_prefixes(depth):
    """failure 56: requests share a prefix only under the same salt."""
    core = fake_core(depth=depth)
    hits = []
    for id, salt in enumerate(["", "a", "a", "b", ""]):
        core.add(request(id, range(12), max_tokens=1, cache_salt=salt))
        hits.append(run(core)[id, 0][0].cached_tokens)
    assert hits == [0, 0, 8, 0, 8]


def test_prefix_cache_can_be_off(depth):
    core = fake_core(depth=depth, prefix_cache=False)
    for id in range(2):
        core.add(request(id, range(12), max_tokens=3))
        assert run(core)[id, 0][0].cached_tokens == 0
    assert core.stats.prefix_queries == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_candidates_share_the_prompt(depth, prefix_cache):
    """failure 19: every candidate appears once, with tokens of its own."""
    core = fake_core(depth=depth, prefix_cache=prefix_cache, sampled_by_seed=True)
    prompt = list(range(22))
    core.add(request(1, prompt, max_tokens=7, n=8, seed=3))
    outputs = run(core)
    assert sorted(outputs) == [(1, candidate) for candidate in range(8)]
    for candidate in range(8):
        assert ids(outputs[1, candidate]) == expected(prompt, 7, 3, candidate)
        assert [output.finish for output in outputs[1, candidate] if output.finish] == [Finish.LENGTH]
    # The prompt is computed once; the others compute what is left of its last block.
    assert core.stats.step_tokens <= 22 + 7 * 2 + 8 * (7 + depth - 1)


def test_candidates_do_not_wait_for_an_aborted_leader(depth):
    core = fake_core(depth=depth)
    core.add(request(1, range(100), max_tokens=3, n=2))
    core.step()
    core.abort(1, 0)
    outputs = run(core)
    assert ids(outputs[1, 1]) == expected(range(100), 3)


def test_prompt_logprobs_do_not_depend_on_the_cache(depth):
    """failure 14: prompt log-probabilities are computed, never skipped because of a cached prefix."""
    core = fake_core(depth=depth, max_num_batched_tokens=5)
    one, two = [*range(40), 1, 2], [*range(40), 3]
    for id, prompt in enumerate([one, two, two, one]):
        core.add(request(id, prompt, max_tokens=2, prompt_logprobs=0, n=2))
        outputs = run(core)
        assert [entry.logprob for entry in outputs[id, 0][0].prompt_logprobs] == [-float(t) for t in prompt[1:]]
        assert all(output.prompt_logprobs is None for output in outputs[id, 0][1:] + outputs[id, 1])


def test_prompt_logprobs_survive_preemption(depth):
    core = fake_core(depth=depth, num_blocks=50, max_model_len=190, max_num_batched_tokens=6)
    prompts = [[id, *range(20)] for id in range(3)]
    for id, prompt in enumerate(prompts):
        core.add(request(id, prompt, max_tokens=150, prompt_logprobs=0))
    outputs = run(core)
    assert core.stats.preemptions > 0
    for id, prompt in enumerate(prompts):
        assert ids(outputs[id, 0]) == expected(prompt, 150)
        assert [entry.logprob for entry in outputs[id, 0][0].prompt_logprobs] == [-float(t) for t in prompt[1:]]


def test_preempted_requests_resume_where_they_were(depth):
    """failure 61: what is left to compute is 'computed < length', prompt or not."""
    core = fake_core(depth=depth, num_blocks=17, max_model_len=64, prefix_cache=False)
    for id in range(4):
        core.add(request(id, [id] * 9, max_tokens=40, logprobs=0))
    outputs = run(core)
    assert core.stats.preemptions > 0
    for id in range(4):
        assert ids(outputs[id, 0]) == expected([id] * 9, 40)
        assert len([entry for output in outputs[id, 0] for entry in output.logprobs]) == 40


def test_two_requests_that_do_not_fit_together_do_not_thrash(depth):
    """failure 62: a preempted request comes back only when its whole context fits and leaves room to grow."""
    core = fake_core(depth=depth, num_blocks=33, max_model_len=128, max_num_batched_tokens=8, prefix_cache=False)
    prompts = [[id] * 60 for id in range(2)]
    for id, prompt in enumerate(prompts):
        core.add(request(id, prompt, max_tokens=40))
    outputs = run(core)
    assert [ids(outputs[id, 0]) for id in range(2)] == [expected(prompt, 40) for prompt in prompts]
    assert core.stats.preemptions <= 1
    assert core.stats.step_tokens <= 2 * 100 + 100


def test_small_requests_pass_a_big_one_but_do_not_starve_it(depth):
    """failure 79: bounded skipping of a queue head that finds no blocks."""
    core = fake_core(depth=depth, num_blocks=33, max_model_len=128, prefix_cache=False, max_num_seqs=4)
    core.add(request(0, [1] * 60, max_tokens=30))
    core.add(request(1, [2] * 110, max_tokens=2))
    for id in range(2, 300):
        core.add(request(id, [3], max_tokens=3))
    finished = []
    while core.has_work:
        finished += [output.request for output in core.step() if output.finish]
    core.check_idle()
    assert sorted(finished) == list(range(300))
    assert finished.index(2) < finished.index(0), "small ones waited behind the big one"
    assert finished.index(1) < 100, "the big one starved"


def test_priority_goes_first_and_takes_the_place_of_others(depth):
    core = fake_core(depth=depth, max_num_seqs=2)
    for id in range(3):
        core.add(request(id, [id], max_tokens=20, priority=1))
    for _ in range(5):
        core.step()
    core.add(request(9, [9], max_tokens=3, priority=0))
    outputs = run(core)
    assert core.stats.preemptions == 1
    for id in range(3):
        tail = outputs[id, 0]
        assert tail[-1].finish is Finish.LENGTH
    assert ids(outputs[9, 0]) == expected([9], 3)


def test_priority_orders_the_queue():
    core = fake_core(max_num_seqs=1)
    for id, priority in enumerate([2, 1, 0, 1, -5]):
        core.add(request(id, [id], max_tokens=1, priority=priority))
    finished = []
    while core.has_work:
        finished += [output.request for output in core.step() if output.finish]
    assert finished == [4, 2, 1, 3, 0]


def test_priority_does_not_evict_in_vain(depth):
    """Preempting every less urgent request would not make the urgent one fit, so none is preempted."""
    core = fake_core(depth=depth, num_blocks=33, max_model_len=128, prefix_cache=False)
    core.add(request(0, [0] * 60, max_tokens=30, priority=0))
    core.add(request(1, [1] * 8, max_tokens=10, priority=2))
    core.step()
    core.add(request(2, [2] * 110, max_tokens=2, priority=1))
    outputs = run(core)
    assert core.stats.preemptions == 0
    assert ids(outputs[2, 0]) == expected([2] * 110, 2)


def test_decode_goes_before_prefill(depth):
    core = fake_core(depth=depth, max_num_batched_tokens=8)
    core.add(request(0, [1, 2], max_tokens=20))
    while not core.step():
        pass
    core.add(request(1, range(90), max_tokens=1))
    outputs = run(core)
    assert ids(outputs[1, 0]) == expected(range(90), 1)
    steps = core._runner.steps
    with_both = [step for step in steps if len(step.advance) == 1 and 7 in step.advance.values()]
    assert len(with_both) >= 10, "the long prompt got the budget that decoding left"


def test_a_row_that_fails_fails_alone(depth):
    core = fake_core(depth=depth)
    core._runner.fail_row_at = {9: 0}
    core.add(request(0, [1] * 6, max_tokens=10))
    core.add(request(1, [2] * 10, max_tokens=10))
    outputs = run(core)
    assert outputs[0, 0][-1].finish is Finish.ERROR
    assert "told to fail" in outputs[0, 0][-1].error
    assert ids(outputs[0, 0]) == expected([1] * 6, 3)
    assert ids(outputs[1, 0]) == expected([2] * 10, 10)


def test_abort_in_every_state(depth):
    """failure 52: blocks come back whatever a request was doing when it was aborted."""
    for steps in range(12):
        core = fake_core(depth=depth, max_num_batched_tokens=4, max_num_seqs=2)
        for id in range(4):
            core.add(request(id, [id] * 11, max_tokens=5, n=1 + id % 2))
        for _ in range(steps):
            core.step()
        for id in (0, 1, 3):
            core.abort(id)
            core.abort(id)
        core.abort(77)
        outputs = run(core)
        assert ids(outputs[2, 0]) == expected([2] * 11, 5) or steps > 8
        assert (3, 0) not in outputs


def test_row_ids_are_reused_only_after_the_step_that_removed_them(depth):
    core = fake_core(depth=depth, max_num_seqs=3)
    for id in range(30):
        core.add(request(id, [id], max_tokens=1 + id % 4))
    run(core)
    removed_at: dict[int, int] = {}
    for step in core._runner.steps:
        for start in step.added:
            assert start.row < 6
            assert step.id >= removed_at.get(start.row, -9) + 1
        for row in step.removed:
            removed_at[row] = step.id
    assert len(removed_at) > 3


def test_step_names_only_what_changes():
    core = fake_core(block_size=4)
    core.add(request(0, [1, 2, 3], max_tokens=20))
    run(core)
    later = core._runner.steps[1:-1]
    assert all(not step.added and not step.removed and not step.advance for step in later)
    assert [bool(step.blocks) for step in later[:9]] == [False, True, False, False, False, True, False, False, False]


def test_a_pool_too_small_for_the_context_is_refused():
    with pytest.raises(ValueError, match="max_model_len"):
        fake_core(num_blocks=9, block_size=4, max_model_len=33)


def test_runner_failure_reaches_the_caller():
    core = fake_core()
    core.add(request(0, [1], max_tokens=1))

    def fail(step):
        raise RuntimeError("device lost")

    core._runner.submit = fail
    with pytest.raises(RuntimeError, match="device lost"):
        core.step()


@st.composite
def schedules(draw):
    """A pool, a budget, and a script of arrivals and aborts."""
    windows = draw(st.sampled_from([(None,), (5,), (None, 6), (None, None)]))
    block_size = draw(st.sampled_from([1, 4, 8]))
    longest = 48
    fewest = -(-longest // block_size) + 1
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)
    script = draw(
        st.lists(
            st.one_of(
                st.tuples(
                    st.just("add"), prompts, st.integers(0, 18), st.integers(1, 3), st.integers(0, 2), st.booleans()
                ),
                st.tuples(st.just("abort"), st.integers(0, 9), st.integers(0, 2)),
                st.tuples(st.just("step"), st.integers(1, 6)),
            ),
            max_size=25,
        )
    )
    return {
        "core": {
            "windows": windows,
            "block_size": block_size,
            "num_blocks": draw(st.integers(fewest, fewest * 3)),
            "depth": draw(st.integers(1, 3)),
            "max_num_batched_tokens": draw(st.integers(1, 20)),
            "max_num_seqs": draw(st.integers(1, 5)),
            "max_model_len": longest,
            "prefix_cache": draw(st.booleans()),
            "sampled_by_seed": True,
        },
        "script": script,
    }


@settings(max_examples=250, deadline=None)
@given(schedules())
def test_any_schedule_gives_the_same_tokens_and_leaves_nothing_behind(schedule):
    """failure 52, failure 53, failure 61, failure 62, failure 89: random arrivals, aborts, tiny pools, any depth."""
    core = fake_core(**schedule["core"])
    got: dict[tuple[int, int], list[int]] = defaultdict(list)
    want: dict[tuple[int, int], list[int]] = {}
    aborted: set[tuple[int, int]] = set()
    finished: dict[tuple[int, int], int] = defaultdict(int)

    def step() -> None:
        for output in core.step():
            key = output.request, output.candidate
            assert key not in aborted, "an output after its abort"
            got[key] += output.ids
            finished[key] += output.finish is not None
            if output.prompt_logprobs is not None:
                prompt = prompts[output.request]
                assert [entry.logprob for entry in output.prompt_logprobs] == [-float(t) for t in prompt[1:]]

    prompts: list[list[int]] = []
    for action, *rest in schedule["script"]:
        if action == "add":
            prompt, max_tokens, n, priority, prompt_logprobs = rest
            id = len(prompts)
            prompts.append(prompt)
            core.add(
                request(
                    id,
                    prompt,
                    max_tokens=max_tokens,
                    n=n,
                    priority=priority,
                    seed=id,
                    prompt_logprobs=0 if prompt_logprobs else None,
                )
            )
            for candidate in range(n):
                want[id, candidate] = expected(prompt, max_tokens, id, candidate)
        elif action == "abort":
            id, candidate = rest
            core.abort(id, candidate)
            if finished[id, candidate] == 0 and id < len(prompts):
                aborted.add((id, candidate))
        else:
            for _ in range(rest[0]):
                step()
    for _ in range(4000):
        if not core.has_work:
            break
        step()
    core.check_idle()
    for key, tokens in want.items():
        if key in aborted:
            assert got[key] == tokens[: len(got[key])]
        else:
            assert got[key] == tokens
            assert finished[key] == 1


def test_groups_have_their_own_pools():
    core = fake_core(windows=(None, 6), num_blocks=70)
    core.add(request(0, range(50), max_tokens=100))
    for _ in range(60):
        core.step()
    full, windowed = core._scheduler.kv.pools
    assert full.capacity - full.num_free >= 25
    assert windowed.capacity - windowed.num_free <= 3
    run(core)
    assert core._runner.kv_groups == [KVGroup(None, 70), KVGroup(6, 70)]


def test_statistics_are_of_now(depth):
    core = fake_core(depth=depth, max_num_seqs=1)
    core.add(request(0, range(30), max_tokens=50))
    core.add(request(1, range(30), max_tokens=50))
    core.step()
    assert (core.stats.running, core.stats.waiting) == (1, 1)
    assert core.stats.kv_used > 0
    core.abort(0)
    core.abort(1)
    assert (core.stats.running, core.stats.waiting, core.stats.kv_used) == (0, 0, 0)
